"""Bradley-Terry: the chosen response of each pair should score higher (InstructGPT, arXiv 2203.02155, eq. 1).

    loss = -1/N sum log sigmoid(r(x, chosen) - r(x, rejected) - margin)

The margin is Llama 2's (arXiv 2307.09288, eq. 2). Centering and label smoothing: `rlhf.maths.losses.pairwise_logistic`.
"""

from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.maths import losses
from step2_reward.objectives import ScoredPairs


class Config(Base):
    centering: float = Field(0.0, ge=0)
    """weight of (chosen + rejected)^2, which keeps scores near 0; 0.01 is a usual value"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """share of the pairs whose sides are assumed to be swapped; it bounds the scores that noisy labels ask for"""


class Pairwise:
    """The logistic loss of each pair's difference in score."""

    every_token: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def loss(self, pairs: ScoredPairs, count: Tensor) -> losses.Loss:
        c, p = self.config, pairs
        value = losses.pairwise_logistic(
            p.chosen, p.rejected, p.margin, c.centering, count, p.weight, c.label_smoothing
        )
        return value, {}


def build(config: Config) -> Pairwise:
    return Pairwise(config)
