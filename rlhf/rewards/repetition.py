"""A penalty for responses that repeat themselves, in the policy's tokens."""

import torch
from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.rewards import Context, Source
from rlhf.types import Samples


class Config(Base):
    n: int = Field(3, ge=1)
    """number of tokens of an n-gram"""


def build(config: Config, context: Context) -> Source:
    """-(1 - distinct n-grams / all n-grams) of a response without its EOS, in (-1, 0]; 0 if it is shorter than n.

    Its negative is seq-rep-n of Welleck et al. (arXiv 1908.04319, section 6).
    """

    def score(samples: Samples) -> Tensor:
        scores = [-repeated_share(ids, config.n) for ids in samples.rollout.tokens_before_end()]
        return torch.tensor(scores, device=context.device)

    return score


def repeated_share(ids: list[int], n: int) -> float:
    """Share of the n-grams of `ids` that occurred before, in [0, 1)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
