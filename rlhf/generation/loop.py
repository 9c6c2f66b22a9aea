"""Sampling token by token with a key-value cache; log-probs are taken at the moment of sampling."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf import ops
from rlhf.config import Config as Base
from rlhf.config import UserError
from rlhf.models.policy import position_arguments, takes
from rlhf.options import SamplingOptions
from rlhf.types import Prompts, Rollout

Generate = Callable[[PreTrainedModel, Prompts, SamplingOptions, Tensor | None], Rollout]


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
    mask, ids = prompts.mask, prompts.ids
    positions = position_arguments(lm, mask)
    cache = DynamicCache(config=lm.config)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in range(sampling.response_length):
        output = lm(
            input_ids=ids,
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **positions,
        )
        logits = output.logits[:, -1:]
        token = _choose(logits[:, 0], sampling.temperature, None if draws is None else draws[:, t])
        logprob = ops.token_logprobs(logits, token[:, None], sampling.temperature).squeeze(1)
        token = torch.where(alive, token, config.pad_token_id)
        columns.append((token, torch.where(alive, logprob, 0.0), alive))
        mask = torch.cat([mask, alive[:, None]], dim=1)
        positions = {name: mask.sum(1, keepdim=True) - 1 for name in positions}
        ids = token[:, None]
        alive = alive & (token != config.eos_token_id)
        if not alive.any():
            break
    tokens, logprobs, kept = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return tokens, logprobs, kept


def _choose(logits: Tensor, temperature: float, draws: Tensor | None) -> Tensor:
    """One token a row [B] from logits [B, V] and uniform numbers [B]: the inverse of the distribution function."""
    if draws is None:
        return logits.argmax(-1)
    # Of a row that is not finite any token is drawn; its log-prob says so, and nothing is learned from it.
    probabilities = torch.softmax(logits.float() / temperature, dim=-1).nan_to_num(1.0)
    below = probabilities.cumsum(-1, dtype=torch.float64)
    # The first token whose sum is beyond the number: it has a probability above 0.
    return torch.searchsorted(below, (draws[:, None] * below[:, -1:]), right=True).squeeze(1)
