"""Sampling token by token with a key-value cache; the log-probs are those of the sampling distribution."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.generation import BackendOptions
from rlhf.generation._cache import StaticCache, StaticLayer
from rlhf.generation._decoding import decoding
from rlhf.maths import ops
from rlhf.models import virtual_tokens
from rlhf.models.cpu import compiling
from rlhf.models.packing import States, model_inputs, packs
from rlhf.models.policy import restrict_head
from rlhf.models.traits import attends_to_all, cache_input, has_argument, has_key_value_cache
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


def build(
    config: BackendOptions,
) -> Callable[[PreTrainedModel, Prompts, SamplingOptions, Tensor | None], SampledRollout]:
    """The backend. It raises a UserError for a recurrent model such as Mamba."""

    def generate(
        lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None
    ) -> SampledRollout:
        refuse_recurrent(lm)
        tokens, logprobs, mask = _sample(lm, prompts, sampling, uniforms, config)
        return sampled(prompts, tokens, mask, logprobs, config)

    return generate


def sampled(prompts: Prompts, tokens: Tensor, mask: Tensor, logprobs: Tensor, config: BackendOptions) -> SampledRollout:
    """The rollout of sampled tokens, [B, T] each. A response has ended if it has EOS."""
    ended = ((tokens == config.eos_token_id) & mask).any(1)
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
    """One token of each of R responses, on the device of the model."""

    rows: Tensor
    """[R] long, rows of the batch"""
    tokens: Tensor
    """[R] long"""
    logprobs: Tensor
    """[R] fp32, at the sampling temperature"""
    unfinished: Tensor
    """[R] bool, False if the response had ended before this token, which is then not a part of it"""


def _sample(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None, config: BackendOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and mask, each [B, T] on the CPU, with T at most `response_length`."""
    shape, device = (len(prompts), sampling.response_length), lm.device
    tokens = torch.full(shape, config.pad_token_id, device=device)
    logprobs = torch.zeros(shape, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for t, step in enumerate(steps(lm, prompts, sampling, uniforms, config)):
        ended = ~step.unfinished
        tokens[step.rows, t] = step.tokens.masked_fill(ended, config.pad_token_id)
        logprobs[step.rows, t] = step.logprobs.masked_fill(ended, 0.0)
        mask[step.rows, t] = step.unfinished
    mask = mask.cpu()
    length = int(mask.any(0).sum())
    return tokens.cpu()[:, :length], logprobs.cpu()[:, :length], mask[:, :length]


@torch.no_grad()
def steps(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, uniforms: Tensor | None, config: BackendOptions
) -> Generator[Step, None, None]:
    """Each position of the responses to B prompts, until all responses have ended, at most `response_length`.

    On devices other than a CPU the host learns late that they have (`_Unfinished`), so some further steps follow.
    Between two steps no other pass of `lm` may run: its layers are prepared for decoding. Arguments: as of `Backend`.
    """
    prompts, batch, length, device = prompts.to("cpu"), len(prompts), sampling.response_length, lm.device
    no_tokens = torch.zeros(batch, length, dtype=torch.bool)
    attention_mask = to_device(torch.cat([prompts.mask[:, prompts.mask.any(0)], no_tokens], dim=1), device)
    start = attention_mask.shape[1] - length
    positions = to_device(prompts.mask.sum(1), device)
    uniforms = None if uniforms is None else to_device(uniforms, device)
    rows = torch.arange(batch, device=device)  # rows that are still in the cache
    active, unfinished = torch.ones(batch, dtype=torch.bool, device=device), _Unfinished()
    droppable = attends_to_all(lm.config)  # other caches may not support the removal of rows
    position = torch.full((1,), start, device=device) if packs(lm) else None
    # With a growing cache, layers would be compiled again for every length.
    with contextlib.nullcontext() if position is not None else compiling.eager():
        logits, cache = _read(lm, prompts, attention_mask.shape[1], position)
    with decoding(lm) as step:
        for t in range(length):
            token, logprob = choose(logits, sampling.temperature, None if uniforms is None else uniforms[rows, t])
            yield Step(rows, token, logprob, active)
            active = active & (token != config.eos_token_id)
            known = unfinished.observe(active)
            if t == length - 1 or (known is not None and not known.any()):
                return
            if known is not None and droppable and int(known.sum()) <= UNFINISHED_SHARE * len(rows):
                remaining = to_device(known.nonzero().squeeze(1), device)
                cache.batch_select_indices(remaining)
                rows, token, positions, attention_mask, active = (
                    x[remaining] for x in (rows, token, positions, attention_mask, active)
                )
                unfinished.forget()
            attention_mask[:, start + t] = True
            visible = attention_mask[:, : start + t + 1].long() if position is None else attention_mask[:, None, None]
            logits = step(lm, token[:, None], visible, positions[:, None], cache)
            positions += 1
            if position is not None:
                position += 1


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


def _read(lm: PreTrainedModel, prompts: Prompts, capacity: int, position: Tensor | None) -> tuple[Tensor, DynamicCache]:
    """(logits of each first token [B, V], a cache of the prompts, left-padded to the longest).

    Rows of similar length are processed together, and a repeated prompt only once.
    """
    if not attends_to_all(lm.config) or virtual_tokens.on(lm):
        return _read_padded(lm, prompts)
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
        cache = cache or StaticCache(states, lengths, capacity)
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
    cache = None if packs(lm) else DynamicCache(config=lm.config)
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
    """The same for models with other kinds of layers, such as a sliding window, or virtual tokens: all rows at once,
    left-padded."""
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
