"""Sampling token by token with a key-value cache; the log-probs are those of the sampling distribution."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from rlhf import kernels
from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.generation import BackendOptions
from rlhf.generation._cache import StaticCache, StaticLayer
from rlhf.generation._memory import Memory, Table
from rlhf.maths import ops
from rlhf.models import virtual_tokens
from rlhf.models.ends import end_ids
from rlhf.models.lm_head import restrict_head
from rlhf.models.packing import States, model_inputs, packs
from rlhf.models.traits import cache_input, has_argument, has_key_value_cache, reach
from rlhf.types import Download, Prompts, SampledRollout, to_device, token_groups

UNFINISHED_SHARE = 0.75
"""When at most this share of the rows is unfinished, finished rows are removed from the cache, which copies it."""
TOGETHER = 2048
"""prompt tokens in one forward pass on a CPU; on other devices 8 times as many"""
KNOWN_EVERY = 8
"""steps after which the host of another device than a CPU learns which responses have ended"""
BLOCK = 256
"""number of tokens whose probabilities are summed in the first step of sampling"""


class Config(BackendOptions):
    """The loop has no options of its own."""


class Loop:
    """The backend. It raises a UserError for a recurrent model such as Mamba."""

    def __init__(self, config: BackendOptions) -> None:
        self._config, self._memory = config, Memory()

    def __call__(
        self, lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None
    ) -> SampledRollout:
        refuse_recurrent(lm)
        choice = _Choice.from_options(lm, sampling, self._config, greedy=uniforms is None)
        begun = virtual_tokens.before_prompts(lm, prompts)
        tokens, logprobs, mask = _Rollout(lm, begun, choice, uniforms, self._memory).sample()
        return sampled(prompts, tokens, mask, logprobs, choice.ends)

    def release(self) -> None:
        """Free the memory of the cache, unless there is room for it beside the models that train next."""
        self._memory.release()


def build(config: BackendOptions) -> Loop:
    return Loop(config)


def sampled(prompts: Prompts, tokens: Tensor, mask: Tensor, logprobs: Tensor, ends: Sequence[int]) -> SampledRollout:
    """The rollout of sampled tokens, [B, T] each. A response has ended if it has one of the ends."""
    ended = (torch.isin(tokens, torch.tensor(ends, device=tokens.device)) & mask).any(1)
    return SampledRollout(prompts.ids, prompts.mask, tokens, mask, logprobs, ended, prompts.rows)


def refuse_recurrent(lm: PreTrainedModel) -> None:
    """Raises: UserError for a model such as Mamba, which has no key-value cache."""
    if not has_key_value_cache(lm, lm.config):
        raise UserError(
            f"model type '{lm.config.model_type}': generation needs the key-value cache of an attention model; "
            "name another model"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One token of each of B responses, on the device of the model."""

    tokens: Tensor
    """[B] long; padding after an end"""
    logprobs: Tensor
    """[B] fp32, at the sampling temperature; 0 after an end"""
    unfinished: Tensor
    """[B] bool, False if the response had ended before this token, which is then not a part of it"""


def steps(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None, config: BackendOptions
) -> Generator[Step, None, None]:
    """Each position of the responses to B prompts, until all responses have ended, at most `response_length`.

    On devices other than a CPU the host learns late that they have (`_Unfinished`), so some further steps follow.
    Between two steps no other pass of `lm` may run: its layers are prepared for decoding. Arguments: as of `Backend`.
    """
    choice = _Choice.from_options(lm, sampling, config, greedy=uniforms is None)
    rollout = _Rollout(lm, virtual_tokens.before_prompts(lm, prompts), choice, uniforms, Memory())
    table = rollout.table
    for column in rollout.columns():
        yield Step(table.tokens[:, column], table.logprobs[:, column], table.sampled[:, column])


class _Rollout:
    """B responses while they are sampled, into a table with B rows."""

    def __init__(
        self, lm: PreTrainedModel, prompts: Prompts, choice: "_Choice", uniforms: Tensor | None, memory: Memory
    ) -> None:
        self._lm, self._prompts, self._choice, self._memory = lm, prompts.to("cpu"), choice, memory
        device, mask = lm.device, self._prompts.mask[:, self._prompts.mask.any(0)]
        self._start, self._end = mask.shape[1], mask.shape[1] + choice.response_length
        self._fixed = packs(lm, self._end)
        """whether the shapes of a step do not depend on the tokens so far"""
        memory.begin(lm, self._fixed)
        self.table = memory.table(len(prompts), memory.capacity(self._end))
        on_device = None if uniforms is None else to_device(uniforms[:, : choice.response_length], device)
        self.table.begin(to_device(mask, device), to_device(mask.sum(1), device), on_device, choice.pad_token_id)

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probs and mask, each [B, T] on the CPU, with T at most `response_length`."""
        end = 1 + max(self.columns())
        table = (x[:, self._start : end] for x in (self.table.tokens, self.table.logprobs, self.table.sampled))
        tokens, logprobs, mask = (x.cpu() for x in table)
        length = int(mask.any(0).sum())
        return tokens[:, :length], logprobs[:, :length], mask[:, :length]

    @torch.no_grad()
    def columns(self) -> Generator[int, None, None]:
        """Sample into the columns of the table. Yields each of them."""
        lm, table, memory, unfinished = self._lm, self.table, self._memory, _Unfinished()
        whole = self._end <= reach(lm.config)  # other caches may not support the removal of rows
        # With a growing cache, layers would be compiled again for every length.
        with contextlib.nullcontext() if self._fixed else kernels.eager():
            if whole:
                logits, cache = _read(lm, self._prompts, table, table.column if self._fixed else None, memory)
            else:
                logits, cache = _read_padded(lm, self._prompts)
        self._choice.append(table, logits)
        del logits
        with kernels.decode_step(lm, next_logits, _Choice.append, self._fixed) as fast:
            for column in range(self._start, self._end):
                yield column
                known = unfinished.observe(table.active)
                if column == self._end - 1 or (known is not None and not known.any()):
                    return
                if known is not None and whole:
                    count = memory.row_count(int(known.sum()), len(known))
                    if count <= UNFINISHED_SHARE * len(known):
                        order = known.byte().argsort(descending=True, stable=True)  # those that go on are first
                        remaining = to_device(order[:count], lm.device)
                        cache.batch_select_indices(remaining)
                        table = table.moved_to_front(remaining)
                        unfinished.forget()
                if memory.graphs is None:
                    self._advance(fast, table, cache, table.visible.shape[1] if self._fixed else column + 1)
                else:
                    width = memory.capacity(column + 1)
                    for layer in cast(list[StaticLayer], cache.layers):
                        layer.show(width)
                    memory.graphs.run(
                        (len(table.rows), width, self._choice),
                        partial(self._advance, fast, table, cache, width),
                        partial(self._advance, (_eager_next_logits, _Choice.append), table, cache, width),
                    )

    def _advance(
        self, step: tuple[kernels.Step, kernels.Choice], table: Table, cache: DynamicCache, width: int
    ) -> None:
        """Sample the next column. width: the number of columns that it depends on, or more"""
        read, append = step
        table.visible.index_fill_(1, table.column, True)
        visible = table.visible[:, None, None, :width] if self._fixed else table.visible[:, :width].long()
        logits = read(self._lm, table.newest[:, None], visible, table.positions[:, None], cache)
        table.positions.add_(1)
        append(self._choice, table, logits)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How the next token is chosen, and when a response ends. It is part of the key of a recorded step."""

    temperature: float
    greedy: bool
    response_length: int = field(compare=False)
    """maximum number of tokens; a step does not depend on it"""
    ends: tuple[int, ...]
    pad_token_id: int

    @classmethod
    def from_options(
        cls, lm: PreTrainedModel, sampling: SamplingOptions, config: BackendOptions, greedy: bool
    ) -> "_Choice":
        ends = end_ids(lm, config.eos_token_id)
        return cls(sampling.temperature, greedy, sampling.response_length, ends, config.pad_token_id)

    def append(self, table: Table, logits: Tensor) -> None:
        """Choose a token of each row from logits [R, V], and append it to the table."""
        token, logprob = choose(logits, self.temperature, None if self.greedy else table.next_uniforms())
        table.append(token, logprob, self.ends, self.pad_token_id)


class _Unfinished:
    """What the host knows of which responses have not ended: on a CPU all of it at once.

    On other devices the host is ahead of the device, and would wait for it. So it gets a copy every `KNOWN_EVERY`
    steps, and reads it as many steps later.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._download: Download | None = None

    def observe(self, active: Tensor) -> Tensor | None:
        """active [R] bool, after each step -> the same on the CPU, perhaps of an earlier step; None: not known now."""
        if active.device.type == "cpu":
            return active
        self._steps += 1
        if self._steps % KNOWN_EVERY:
            return None
        earlier, self._download = self._download, Download(active)
        return None if earlier is None else earlier.result()

    def forget(self) -> None:
        """Other rows follow."""
        self._download = None


def next_logits(
    lm: PreTrainedModel, ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """The logits of the next token, [B, V].

    ids, positions: [B, 1]; positions count real tokens.
    attention_mask: mask of real tokens, long [B, S] of the tokens so far, or bool [B, 1, 1, S] of the whole cache
    """
    inputs = {"input_ids": ids, "attention_mask": attention_mask, **cache_input(lm, cache)}
    if has_argument(lm, "position_ids"):  # BLOOM and MPT have none
        inputs["position_ids"] = positions
    outputs = lm(**inputs, use_cache=True)
    logits: Tensor = outputs.logits[:, -1]
    return logits


def _eager_next_logits(*arguments: Any) -> Tensor:
    with kernels.eager():
        return next_logits(*arguments)


def _read(
    lm: PreTrainedModel, prompts: Prompts, table: Table, position: Tensor | None, memory: Memory
) -> tuple[Tensor, DynamicCache]:
    """(logits of each first token [B, V], a cache of the prompts, left-padded to the longest).

    Rows of similar length are processed together, and a repeated prompt only once.
    """
    ids, lengths = ops.flush_left(prompts.ids, prompts.mask), prompts.mask.sum(1)
    ids = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -1)
    unique, which = ids.unique(dim=0, return_inverse=True)
    width = (unique >= 0).sum(1)
    logits: list[Tensor] = []
    cache, order, read = None, torch.empty_like(which), 0
    for group in token_groups(width, TOGETHER * (1 if lm.device.type == "cpu" else 8)):
        first_logits, states, starts = _read_together(lm, unique[group, : int(width[group].max())])
        source, target = (group[:, None] == which).nonzero(as_tuple=True)
        order[target] = read + source
        read += len(group)
        logits.append(first_logits)
        cache = cache or StaticCache(memory.states(states, *table.visible.shape), lengths)
        cache.fill(states, target, starts[source])
        del states  # frees their memory for the next group
    assert cache is not None, "no prompts"
    return torch.cat(logits)[to_device(order, lm.device)], cache.cache(position)


def _read_together(lm: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[States], Tensor]:
    """Of right-padded prompts, with -1 as padding: (logits of each first token [B, V], keys and values of each layer,
    index of each prompt's first token in them [B])."""
    mask = ids >= 0
    states: list[States] = []
    packed = model_inputs(lm, ids.clamp(min=0), mask, states)
    cache = None if packs(lm, ids.shape[1]) else DynamicCache(config=lm.config)
    last = packed.states.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
    with restrict_head(lm.get_output_embeddings(), to_device(last, lm.device)):
        logits = lm(**packed.inputs, **cache_input(lm, cache), use_cache=cache is not None).logits[0]
    if cache is not None:
        layers = cast(list[StaticLayer], cache.layers)  # or any that keep both
        states = [(_of_tokens(layer.keys), _of_tokens(layer.values)) for layer in layers]
    return logits, states, packed.states[:, 0]


def _of_tokens(states: Tensor) -> Tensor:
    """[B, heads, S, d] -> [B * S, heads, d]"""
    return states.transpose(1, 2).flatten(0, 1)


def _read_padded(lm: PreTrainedModel, prompts: Prompts) -> tuple[Tensor, DynamicCache]:
    """The same where a layer does not attend to all tokens: all rows at once, left-padded."""
    cache, columns = DynamicCache(config=lm.config), prompts.mask.any(0)
    mask = prompts.mask[:, columns]
    inputs = {"input_ids": prompts.ids[:, columns], "attention_mask": mask.long()}
    if has_argument(lm, "position_ids"):
        inputs["position_ids"] = ops.positions(mask)
    on_device = {name: to_device(value, lm.device) for name, value in inputs.items()}
    output = lm(**on_device, **cache_input(lm, cache), use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], cache


def choose(logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sampled token of each row, its log-prob), [B] each, from logits [B, V] and uniform random numbers [B].

    The inverse of the distribution function: the first token at which the sum of probabilities exceeds the random
    number. The search has two steps: among the sums of blocks of BLOCK tokens, then within one block.
    """
    if uniforms is None:
        token = logits.argmax(-1)
        return token, ops.token_logprobs(logits, token, temperature)
    scores = ops.tempered(logits, temperature)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    short = -weights.shape[1] % BLOCK
    blocks = (F.pad(weights, (0, short)) if short else weights).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    # In a non-finite row any token is sampled; its log-prob is non-finite, and the row is not trained on.
    block, fraction = _first_beyond(sums.nan_to_num(1.0), uniforms)
    inside = blocks[torch.arange(len(blocks), device=block.device), block].double().nan_to_num_(1.0)
    token = block * BLOCK + _first_beyond(inside, fraction)[0]
    logprobs = (scores.gather(1, token[:, None]) - largest).double() - sums.sum(-1, keepdim=True).log()
    return token, logprobs.squeeze(1).to(scores.dtype)


def _first_beyond(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(index at which the cumulative weights [B, N] first exceed `share` of their sum, the fraction of the weight there
    that is below the share, from 0 to 1), [B] each. The weight at the index is above 0."""
    sums = weights.cumsum(-1)
    # Strictly below the sum, even if the product is rounded up to it.
    target = torch.minimum(share[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 1e-15))
    index = torch.searchsorted(sums, target, right=True)
    weight = weights.gather(1, index)
    return index.squeeze(1), ((target - (sums.gather(1, index) - weight)) / weight).clamp(0, 1).squeeze(1)
