"""The loss of one optimizer step of the reward model, micro-batch by micro-batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models.scalar import scores
from rlhf.types import JoinedPairs, Pairs, Sequences, to_device
from step2_reward.config import RewardConfig
from step2_reward.heldout import PairScores


class PairLoss:
    """The share of each micro-batch in the loss of a step, with the terms that the options add."""

    def __init__(
        self,
        reward: Engine[Any],
        config: RewardConfig,
        count: Tensor,
        pair_scores: PairScores,
    ) -> None:
        """count: batch elements of the step"""
        self._reward, self._config, self._pair_scores = reward, config, pair_scores
        self._count = count
        self.rows: list[Sequences | JoinedPairs] = []
        """the rows that the model has computed"""

    def __call__(self, pairs: Pairs) -> losses.Loss:
        """The loss and the metrics of a micro-batch."""
        config, device = self._config, self._reward.device
        margin, weight = (None if x is None else to_device(x, device) for x in (pairs.margin, pairs.weight))
        rows: Sequence[Sequences | JoinedPairs]
        token_loss = None
        if config.token_coef:
            side_scores, rows, scalars = score_every_token(self._reward, pairs)
            mask, (chosen, rejected) = to_device(compared_columns(rows[0]), device), scalars.chunk(2)
            token_loss = losses.token_logistic(
                chosen, rejected, mask, weight, self._count, config.centering, config.label_smoothing
            )
        else:
            side_scores, rows = self._pair_scores(self._reward, pairs)
        self.rows.extend(rows)
        chosen, rejected = side_scores.unbind(1)
        value, metrics = losses.pairwise_logistic(
            chosen, rejected, margin, config.centering, self._count, weight, config.label_smoothing
        )
        if token_loss is not None:
            value = value + config.token_coef * token_loss
            metrics["token_loss"] = token_loss.detach()
        return value, metrics


def by_side(scalars: Tensor, sides: Sequences) -> Tensor:
    """Scores of the chosen and the rejected sides, [B, 2]. scalars: at every token of `sides`, [2 B, S], the chosen
    sides first."""
    return scores(scalars, sides.mask).view(2, -1).T


def score_every_token(model: Any, pairs: Pairs) -> tuple[Tensor, list[Sequences], Tensor]:
    """Scores of the chosen and the rejected sides, [B, 2], the rows that the model computed, and the scalars at all
    their tokens, [2 B, S], the chosen sides first. model: a `ScalarModel`, or its engine."""
    sides = pairs.stacked().trimmed()
    scalars = model(sides)
    return by_side(scalars, sides), [sides], scalars


def compared_columns(sides: Sequences) -> Tensor:
    """The columns in which both responses of a pair have a token, from the first one on that differs; bool [B, S].

    sides: [2 B, S], the chosen sides first. The prompt is the same on both sides, so the t-th tokens of both responses
    are in one column.
    """
    chosen, rejected = sides.loss_mask.chunk(2)
    both = chosen & rejected
    different = both & torch.ne(*sides.ids.chunk(2))
    return both & (different.long().cumsum(1) > 0)
