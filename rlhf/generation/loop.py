"""Sampling token by token with a key-value cache; log-probs are taken at the moment of sampling."""

import contextlib
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from rlhf.config.options import SamplingOptions
from rlhf.errors import UserError
from rlhf.generation import BackendOptions
from rlhf.generation._cache import Room, Rooms
from rlhf.generation._decoding import decoding
from rlhf.maths import ops
from rlhf.models.cpu import compiling
from rlhf.models.packing import States, packs, reading
from rlhf.models.policy import only
from rlhf.models.traits import keeps_all, takes
from rlhf.types import Prompts, Rollout, token_groups

KEPT = 0.75
"""When no more than this share of the rows goes on, the others are dropped: that copies the cache."""
TOGETHER = 2048
"""tokens of prompts that are read at once on a CPU; elsewhere 8 times as many"""
BLOCK = 256
"""tokens whose probabilities are first looked at as one"""


class Config(BackendOptions):
    """The loop has no options of its own."""


def build(config: BackendOptions) -> Callable[[PreTrainedModel, Prompts, SamplingOptions, Tensor | None], Rollout]:
    """The loop. Raises, when it samples: UserError for a recurrent model such as Mamba."""

    def generate(lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None) -> Rollout:
        refuse_recurrent(lm)
        tokens, logprobs, mask = _sample(lm, prompts, sampling, draws, config)
        return sampled(prompts, tokens, mask, logprobs, config)

    return generate


def sampled(prompts: Prompts, tokens: Tensor, mask: Tensor, logprobs: Tensor, config: BackendOptions) -> Rollout:
    """The rollout of what was sampled, [B, T] each. A row still alive after its last column never sampled EOS."""
    ended = ((tokens == config.eos_token_id) & mask).any(1)
    return Rollout(prompts.ids, prompts.mask, tokens, mask, logprobs, ended, prompts.rows)


def refuse_recurrent(lm: PreTrainedModel) -> None:
    """Raises: UserError for a model such as Mamba, which has no key-value cache."""
    if not takes(lm, "past_key_values"):
        raise UserError(
            f"model type '{lm.config.model_type}': generation needs the key-value cache of an attention model; "
            "name another model"
        )


@torch.no_grad()
def _sample(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None, config: BackendOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and mask, each [B, T] with T at most `response_length`."""
    size, length, device = len(prompts), sampling.response_length, prompts.ids.device
    tokens = torch.full((size, length), config.pad_token_id, device=device)
    logprobs = torch.zeros(size, length, device=device)
    mask = torch.zeros(size, length, dtype=torch.bool, device=device)
    seen = torch.cat([prompts.mask[:, prompts.mask.any(0)], mask], dim=1)
    start = seen.shape[1] - length
    positions = prompts.mask.sum(1)
    rows = torch.arange(size, device=device)  # those that the model is asked about
    alive = torch.ones_like(mask[:, 0])
    droppable = keeps_all(lm.config)  # other caches may not know how to drop a row of a recurrent state
    at = torch.full((1,), start, device=device) if packs(lm) else None
    # With a cache that grows, layers would be compiled once for each.
    with contextlib.nullcontext() if at is not None else compiling.eager():
        logits, cache = _read(lm, prompts, seen.shape[1], at)
    with decoding(lm) as step:
        for t in range(length):
            token, logprob = choose(logits, sampling.temperature, None if draws is None else draws[rows, t])
            now = rows[alive]
            tokens[now, t], logprobs[now, t], mask[now, t] = token[alive], logprob[alive], True
            alive = alive & (token != config.eos_token_id)
            count = int(alive.sum())
            if count == 0 or t == length - 1:
                return tokens[:, : t + 1], logprobs[:, : t + 1], mask[:, : t + 1]
            if droppable and count <= KEPT * len(rows):
                cache.batch_select_indices(alive.nonzero().squeeze(1))
                rows, token, seen, positions = rows[alive], token[alive], seen[alive], positions[alive]
                alive = alive[alive]
            seen[:, start + t] = True
            visible = seen[:, : start + t + 1].long() if at is None else seen[:, None, None]
            logits = step(lm, token[:, None], visible, positions[:, None], cache)
            positions += 1
            if at is not None:
                at += 1
    raise AssertionError("a response of no tokens")


def _read(lm: PreTrainedModel, prompts: Prompts, room: int, at: Tensor | None) -> tuple[Tensor, DynamicCache]:
    """The logits of each first token [B, V], and a cache of the prompts, left-padded to the longest.

    Rows of similar length are read together, and a prompt that several responses continue once.
    """
    if not keeps_all(lm.config):
        return _read_padded(lm, prompts)
    ids, lengths = ops.flush_left(prompts.ids, prompts.mask), prompts.mask.sum(1)
    ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None], -1)
    unique, which = ids.unique(dim=0, return_inverse=True)
    width = (unique >= 0).sum(1)
    logits: list[Tensor] = []
    rooms, order, read = None, torch.empty_like(which), 0
    for group in token_groups(width, TOGETHER * (1 if ids.device.type == "cpu" else 8)):
        found, states, starts = _read_together(lm, unique[group, : int(width[group].max())])
        source, target = (group[:, None] == which).nonzero(as_tuple=True)
        order[target] = read + source
        read += len(group)
        logits.append(found)
        rooms = rooms or Rooms(states, lengths, room)
        rooms.fill(states, target, starts[source])
        del states  # their memory is free for the next group's
    assert rooms is not None, "no prompts"
    return torch.cat(logits)[order], rooms.cache(at)


def _read_together(lm: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[States], Tensor]:
    """Of right-padded prompts, with -1 as padding: the logits of each first token [B, V], and what a cache is filled
    with: keys and values, and where each prompt begins in them."""
    mask = ids >= 0
    kept: list[States] = []
    given = reading(lm, ids.clamp(min=0), mask, kept)
    cache = None if packs(lm) else DynamicCache(config=lm.config)
    last = given.states.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
    with only(lm.get_output_embeddings(), last):
        logits = lm(**given.inputs, past_key_values=cache, use_cache=cache is not None).logits[0]
    if cache is not None:
        layers = cast(list[Room], cache.layers)  # or any that keep both
        kept = [(_of_tokens(layer.keys), _of_tokens(layer.values)) for layer in layers]
    return logits, kept, given.states[:, 0]


def _of_tokens(states: Tensor) -> Tensor:
    """[B, heads, S, d] -> [B * S, heads, d]"""
    return states.transpose(1, 2).flatten(0, 1)


def _read_padded(lm: PreTrainedModel, prompts: Prompts) -> tuple[Tensor, DynamicCache]:
    """The same for models with layers of another kind, such as a sliding window: all rows at once."""
    cache, mask = DynamicCache(config=lm.config), prompts.mask[:, prompts.mask.any(0)]
    positions = {"position_ids": ops.positions(mask)} if takes(lm, "position_ids") else {}
    found = lm(
        input_ids=prompts.ids[:, prompts.mask.any(0)],
        attention_mask=mask.long(),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **positions,
    )
    return found.logits[:, -1], cache


def choose(logits: Tensor, temperature: float, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token a row from logits [B, V] and uniform numbers [B], and its log-prob. [B] each

    The inverse of the distribution function: the first token at which the sum of probabilities is beyond the number.
    It is looked for in two steps, among sums of BLOCK tokens and then within one.
    """
    if draws is None:
        token = logits.argmax(-1)
        return token, ops.token_logprobs(logits, token, temperature)
    scores = ops.tempered(logits, temperature)
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most).exp_()
    short = -weights.shape[1] % BLOCK
    blocks = (F.pad(weights, (0, short)) if short else weights).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    # Of a row that is not finite any token is drawn; its log-prob says so, and nothing is learned from it.
    block, rest = _first_beyond(sums.nan_to_num(1.0), draws)
    inside = blocks[torch.arange(len(blocks), device=block.device), block].double().nan_to_num_(1.0)
    token = block * BLOCK + _first_beyond(inside, rest)[0]
    logprobs = (scores.gather(1, token[:, None]) - most).double() - sums.sum(-1, keepdim=True).log()
    return token, logprobs.squeeze(1).to(scores.dtype)


def _first_beyond(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulated weights [B, N] first exceed `share` of their sum, and how far into that weight the share
    reaches, from 0 to 1. It has a weight above 0. [B] each"""
    sums = weights.cumsum(-1)
    # Below the sum even where the product is rounded up to it.
    aim = torch.minimum(share[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 1e-15))
    index = torch.searchsorted(sums, aim, right=True)
    weight = weights.gather(1, index)
    return index.squeeze(1), ((aim - (sums.gather(1, index) - weight)) / weight).clamp(0, 1).squeeze(1)
