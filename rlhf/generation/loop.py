"""Sampling token by token with a key-value cache; log-probs are taken at the moment of sampling."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from rlhf import ops
from rlhf.config import Config as Base
from rlhf.config import UserError
from rlhf.generation._cache import left_padded
from rlhf.generation._decoding import decoding
from rlhf.models import attention
from rlhf.models.policy import only
from rlhf.models.traits import keeps_all, takes
from rlhf.options import SamplingOptions
from rlhf.types import Prompts, Rollout, token_groups

Generate = Callable[[PreTrainedModel, Prompts, SamplingOptions, Tensor | None], Rollout]

KEPT = 0.75
"""When no more than this share of the rows goes on, the others are dropped: that copies the cache."""
TOGETHER = 512
"""tokens of prompts that are read at once on a CPU: it gains nothing from more, and loses by their padding; elsewhere
32 times as many"""
BLOCK = 256
"""tokens whose probabilities are first looked at as one"""


class Config(Base):
    eos_token_id: int
    """the one token that ends a response"""
    pad_token_id: int
    """fills a response after its end"""


def build(config: Config) -> Generate:
    """`generate(lm, prompts, sampling, draws) -> Rollout`; `draws` are uniform numbers, one for each token that may be
    sampled, [B, response_length]; without them it is greedy.

    Raises: UserError for a recurrent model such as Mamba, which has no key-value cache.
    """

    def generate(lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None) -> Rollout:
        if not takes(lm, "past_key_values"):
            raise UserError(
                f"model type '{lm.config.model_type}': generation needs the key-value cache of an attention model; "
                "name another model"
            )
        with decoding(lm, len(prompts)):
            tokens, logprobs, mask = _sample(lm, prompts, sampling, draws, config)
        # A row still alive after its last column never sampled EOS.
        ended = ((tokens == config.eos_token_id) & mask).any(1)
        return Rollout(prompts.ids, prompts.mask, tokens, mask, logprobs, ended, prompts.rows)

    return generate


@torch.no_grad()
def _sample(
    lm: PreTrainedModel, prompts: Prompts, sampling: SamplingOptions, draws: Tensor | None, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and mask, each [B, T] with T at most `response_length`."""
    size, length, device = len(prompts), sampling.response_length, prompts.ids.device
    tokens = torch.full((size, length), config.pad_token_id, device=device)
    logprobs = torch.zeros(size, length, device=device)
    mask = torch.zeros(size, length, dtype=torch.bool, device=device)
    seen = torch.cat([prompts.mask[:, prompts.mask.any(0)], torch.ones_like(mask)], dim=1).long()
    positions = ops.positions(seen)
    counted = takes(lm, "position_ids")  # BLOOM and MPT do not
    rows = torch.arange(size, device=device)  # those that the model is asked about
    alive = torch.ones_like(mask[:, 0])
    droppable = keeps_all(lm.config)  # other caches may not know how to drop a row of a recurrent state
    logits, cache = _read(lm, prompts, seen.shape[1])
    start = seen.shape[1] - length
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
        logits = lm(
            input_ids=token[:, None],
            attention_mask=seen[:, : start + t + 1],
            past_key_values=cache,
            use_cache=True,
            **({"position_ids": positions[:, start + t, None]} if counted else {}),
        ).logits[:, -1]
    raise AssertionError("a response of no tokens")


def _read(lm: PreTrainedModel, prompts: Prompts, room: int) -> tuple[Tensor, DynamicCache]:
    """The logits of each first token [B, V], and a cache of the prompts, left-padded to the longest.

    Rows of similar length are read together, and a prompt that several responses continue once.
    """
    ids, lengths = ops.flush_left(prompts.ids, prompts.mask), prompts.mask.sum(1)
    if not keeps_all(lm.config):
        return _read_padded(lm, prompts)
    ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None], -1)
    unique, which = ids.unique(dim=0, return_inverse=True)
    width = (unique >= 0).sum(1)
    logits: list[Tensor] = []
    parts, order, read = [], torch.empty_like(which), 0
    for group in token_groups(width, TOGETHER * (1 if ids.device.type == "cpu" else 32)):
        part = DynamicCache(config=lm.config)
        longest = int(width[group].max())
        states = torch.arange(len(group), device=ids.device) * longest + width[group] - 1
        with only(lm.get_output_embeddings(), states):
            found = lm(input_ids=unique[group, :longest].clamp(min=0), past_key_values=part, use_cache=True)
        source, target = (group[:, None] == which).nonzero(as_tuple=True)
        order[target] = read + source
        read += len(group)
        logits.append(found.logits[0])
        parts.append((part, torch.stack([source, target], dim=1)))
    # What ALiBi adds to the scores is as wide as the tokens so far.
    linear = not takes(lm, "position_ids") or getattr(lm.config, "alibi", False)
    whole = lm.config._attn_implementation == attention.NAME and not linear
    return torch.cat(logits)[order], left_padded(parts, lengths, room, whole)


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
    logits = ops.at_least_fp32(logits) / temperature
    total = logits.logsumexp(-1, keepdim=True)
    # Of a row that is not finite any token is drawn; its log-prob says so, and nothing is learned from it.
    weights = (logits - total).exp_().nan_to_num_(1.0)
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block, rest = _first_beyond(blocks.sum(-1, dtype=torch.float64), draws)
    inside = blocks[torch.arange(len(blocks), device=block.device), block].double()
    token = block * BLOCK + _first_beyond(inside, rest)[0]
    return token, (logits.gather(1, token[:, None]) - total).squeeze(1)


def _first_beyond(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulated weights [B, N] first exceed `share` of their sum, and how far into that weight the share
    reaches, from 0 to 1. It has a weight above 0. [B] each"""
    sums = weights.cumsum(-1)
    # Below the sum even where the product is rounded up to it.
    aim = torch.minimum(share[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 1e-15))
    index = torch.searchsorted(sums, aim, right=True)
    weight = weights.gather(1, index)
    return index.squeeze(1), ((aim - (sums.gather(1, index) - weight)) / weight).clamp(0, 1).squeeze(1)
