"""The pairwise loss of the whole responses and of their tokens, as DeepSpeed-Chat's reward model has it.

    loss = pairwise + token_coef / N sum_pairs mean_t -log sigmoid(r_t(x, chosen) - r_t(x, rejected))

r_t is the score at the t-th token; t goes from the first token that differs to the end of the shorter response. The
score at a token then predicts that of the whole response, from which a critic starts.
"""

import torch
from pydantic import Field
from torch import Tensor

from rlhf.maths import losses
from rlhf.types import Sequences, to_device
from step2_reward.objectives import ScoredPairs
from step2_reward.objectives.pairwise import Config as PairwiseConfig
from step2_reward.objectives.pairwise import Pairwise


class Config(PairwiseConfig):
    """Options of `pairwise`, which hold for the tokens too, and the weight of the tokens."""

    token_coef: float = Field(0.5, gt=0)
    """weight of the loss between the t-th tokens of both responses, which has no margins"""


class EveryToken(Pairwise):
    """The pairwise loss at the last token, and at every token that both responses have."""

    every_token = True
    config: Config

    def loss(self, pairs: ScoredPairs, count: Tensor) -> losses.Loss:
        assert pairs.sides is not None and pairs.scalars is not None, "a pass that gives every token"
        c, (value, _) = self.config, super().loss(pairs, count)
        mask, (chosen, rejected) = compared_columns(pairs.sides), pairs.scalars.chunk(2)
        mask = to_device(mask, chosen.device)
        by_token = losses.token_logistic(chosen, rejected, mask, pairs.weight, count, c.centering, c.label_smoothing)
        return value + c.token_coef * by_token, {"token_loss": by_token.detach()}


def compared_columns(sides: Sequences) -> Tensor:
    """The columns in which both responses of a pair have a token, from the first one on that differs; bool [B, S].

    sides: [2 B, S], the chosen sides first. The prompt is the same on both sides, so the t-th tokens of both responses
    are in one column.
    """
    chosen, rejected = sides.loss_mask.chunk(2)
    both = chosen & rejected
    different = both & torch.ne(*sides.ids.chunk(2))
    return both & (different.long().cumsum(1) > 0)


def build(config: Config) -> EveryToken:
    return EveryToken(config)
