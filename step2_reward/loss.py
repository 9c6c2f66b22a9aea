"""The loss of one optimizer step of the reward model, micro-batch by micro-batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf.distributed import collectives
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
        correlation: float = 0.0,
    ) -> None:
        """count: batch elements of the step. correlation: of score and length in the step, with `length_coef`"""
        self._reward, self._config, self._pair_scores = reward, config, pair_scores
        self._count, self._correlation = count, correlation
        self.rows: list[Sequences | JoinedPairs] = []
        """the rows that the model has computed"""

    def __call__(self, pairs: Pairs) -> losses.Loss:
        """The loss and the metrics of a micro-batch."""
        config, device = self._config, self._reward.device
        margin, weight = (None if x is None else to_device(x, device) for x in (pairs.margin, pairs.weight))
        rows: Sequence[Sequences | JoinedPairs]
        nll = error = token_loss = None
        if config.attributes:
            assert pairs.ratings is not None
            side_scores, rows, predicted = score_and_rate(self._reward, pairs)
            error = losses.rating_error(predicted, to_device(pairs.ratings, device), weight, self._count)
        elif config.sft_coef:
            side_scores, rows, logprobs = score_and_predict(self._reward, pairs)
            mask = to_device(rows[0].loss_mask[: len(pairs)], device)
            nll = losses.chosen_nll(logprobs, mask, weight, self._count)
        elif config.token_coef:
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
        if nll is not None:
            value = value + config.sft_coef * nll
            metrics["nll"] = nll.detach()
        if error is not None:
            value = value + config.attribute_coef * error
            metrics["rating_error"] = error.detach()
        if token_loss is not None:
            value = value + config.token_coef * token_loss
            metrics["token_loss"] = token_loss.detach()
        if pairs.gap_gradient is not None and weight is not None:
            share = weight.sum() / self._count
            gradient = to_device(pairs.gap_gradient, device)
            penalty = (gradient * (chosen - rejected)).sum() + share * self._correlation**2
            value = value + config.length_coef * penalty
            metrics["length_correlation"] = share * self._correlation
        return value, metrics

    def learned_tokens(self) -> int:
        """Tokens of this rank under the loss of the language model."""
        return sum(
            int(rows.loss_mask.sum()) for rows in self.rows if isinstance(rows, Sequences) and self._config.sft_coef
        )


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


def score_and_predict(model: Any, pairs: Pairs) -> tuple[Tensor, list[Sequences], Tensor]:
    """Scores of the chosen and the rejected sides, [B, 2], and the log-probs of the chosen responses, [B, S].

    model: an `ActorCritic`, or its engine. Also returns the rows that it computed, in which only tokens of chosen
    responses are under the loss mask.
    """
    sides = pairs.stacked().trimmed()
    is_chosen = torch.arange(len(sides))[:, None] < len(pairs)
    sides = replace(sides, loss_mask=sides.loss_mask & is_chosen)
    logprobs, _, scalars = model(sides)
    return by_side(scalars, sides), [sides], logprobs[: len(pairs)]


def score_beside_head(model: Any, pairs: Pairs) -> tuple[Tensor, list[Sequences]]:
    """The scores alone of an `ActorCritic`."""
    return score_and_predict(model, pairs)[:2]


def score_and_rate(model: Any, pairs: Pairs) -> tuple[Tensor, list[Sequences], Tensor]:
    """Scores of the chosen and the rejected sides, [B, 2], the rows that the model computed, and the predicted ratings
    of both sides, [B, 2, K]. model: a `RatedModel`, or its engine."""
    sides = pairs.stacked().trimmed()
    scalars, ratings = model(sides)
    return by_side(scalars, sides), [sides], torch.stack(ratings.chunk(2), 1)


def score_beside_ratings(model: Any, pairs: Pairs) -> tuple[Tensor, list[Sequences]]:
    """The scores alone of a `RatedModel`."""
    return score_and_rate(model, pairs)[:2]


def with_length_gradient(
    reward: Engine[Any], batch: Pairs, groups: Sequence[Tensor], pair_scores: PairScores
) -> tuple[Pairs, float]:
    """The pairs of a step with the gradient of the squared correlation of score and length, and the correlation.

    The correlation is that of the whole step on all ranks, which needs the scores of all pairs beforehand: one pass
    without gradients. groups: the rows of each micro-batch
    """
    with reward.inference() as model:
        by_group = torch.cat([pair_scores(model, batch[rows])[0] for rows in groups])
    scored = by_group.float().cpu()[torch.cat(list(groups)).argsort()]
    assert batch.weight is not None
    gaps, length_gaps, weight = scored[:, 0] - scored[:, 1], batch.length_gaps, batch.weight
    moments = collectives.sum_over_ranks(losses.gap_moments(gaps, length_gaps, weight))
    correlation, gradient = losses.squared_correlation(gaps, length_gaps, weight, moments)
    return replace(batch, gap_gradient=gradient), correlation
