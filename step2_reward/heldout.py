"""Evaluation of the reward model on held-out pairs, and the check for divergence."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from data.batches import pair_batch
from data.dataset import PromptDataset
from data.prepare.encode import Preference
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import Engine
from rlhf.maths import losses, preferences
from rlhf.models.scalar import PairOutput, ScalarModel, score_separately
from rlhf.types import Metrics, Pairs, length_groups
from step2_reward.config import LOGISTIC, RewardConfig

DIVERGED = 10
"""multiple of the loss of guessing, log 2; runs that overfit end at one to three times that loss"""
PairScores = Callable[[ScalarModel | Engine[ScalarModel], Pairs], PairOutput]
"""(model, or its engine; pairs) -> the scores of both sides"""


def score_pairs(
    reward: Engine[ScalarModel],
    dataset: PromptDataset[Preference],
    rows: int,
    pad_id: int,
    pair_scores: PairScores = score_separately,
) -> Tensor:
    """(chosen, rejected, weight, gap in length, row) of the pairs of all ranks [N, 5], `rows` pairs in one pass."""
    of_rank = collectives.rows_of_rank(len(dataset))
    weights = dataset.weights.tolist()
    groups = length_groups(torch.from_numpy(dataset.row_lengths[of_rank].max(1)), rows)
    scores: list[Tensor] = []
    length_gaps: list[Tensor] = []
    with reward.inference() as model:
        for group in groups:
            batch = pair_batch([dataset[of_rank[i]] for i in group], pad_id)
            scores.append(pair_scores(model, batch).scores)
            length_gaps.append(batch.chosen.lengths - batch.rejected.lengths)
    by_pair, gaps, order = torch.cat(scores).tolist(), torch.cat(length_gaps).tolist(), torch.cat(groups).tolist()
    scored = [[*pair, weights[of_rank[i]], gap, of_rank[i]] for pair, gap, i in zip(by_pair, gaps, order, strict=True)]
    return torch.tensor([pair for part in collectives.gather_replicas(scored) for pair in part])


def evaluate(scored: Tensor, learning_rate: float) -> Metrics:
    """Accuracy, loss and scores of held-out pairs, as of `score_pairs`: means by their weights.

    Raises: NonFiniteError if a score is not finite.
    """
    pairs, (chosen, rejected, weight, length_gap) = scored[:, :2], scored[:, :4].unbind(1)
    require_finite(pairs, learning_rate)
    weight = weight / weight.mean()
    loss = losses.pairwise_logistic(chosen, rejected, weight=weight)
    metrics = losses.pair_metrics(chosen, rejected, weight=weight)
    return {
        "eval_accuracy": metrics["accuracy"].item(),
        "eval_loss": loss.item(),
        "eval_margin": metrics["margin"].item(),
        "eval_score_mean": pairs.mean().item(),
        "eval_score_std": pairs.std(correction=0).item(),
        **_reliability(chosen - rejected, weight, length_gap),
    }


def _reliability(gaps: Tensor, weight: Tensor, length_gap: Tensor) -> Metrics:
    """Calibration error, the accuracy of length alone, and the accuracy where that rule is right and wrong. All [N]."""
    right, longer = preferences.in_order(gaps), preferences.in_order(length_gap)
    metrics = {
        "eval_ece": preferences.calibration_error(gaps),
        "eval_length_rule": ((weight * longer).sum() / weight.sum()).item(),
    }
    for name, part in {"longer": length_gap > 0, "shorter": length_gap < 0}.items():
        if part.any():
            share = (weight * right)[part].sum() / weight[part].sum()
            metrics[f"eval_accuracy_if_{name}"] = share.item()
    return metrics


def require_finite(pairs: Tensor, learning_rate: float) -> None:
    """Raises: NonFiniteError if a score of a held-out pair is not finite. pairs [N, 2]."""
    nonfinite = int((~pairs.isfinite()).any(1).sum())
    if nonfinite:
        raise NonFiniteError(
            f"the run has diverged: scores of {nonfinite} of {len(pairs)} held-out pairs are not finite; nothing was "
            f"exported; lower --learning-rate (now {learning_rate:g}) and add --overwrite"
        )


def require_converged(metrics: Metrics, pairs: int, config: RewardConfig) -> None:
    """Raises: NonFiniteError if the held-out loss is above DIVERGED times that of guessing, and the accuracy is that of
    guessing (95 % interval).

    A high loss alone is overfitting: scores in the right order are still useful. The scores of a user's objective may
    have a scale in which this loss is always high, so nothing is said of them.
    """
    chance = abs(metrics["eval_accuracy"] - 0.5) < 1.96 * 0.5 / math.sqrt(pairs)
    if chance and LOGISTIC.include(config.model_dump()) and metrics["eval_loss"] > DIVERGED * math.log(2):
        raise NonFiniteError(
            f"the run has diverged: eval_loss is {metrics['eval_loss']:.4g} and eval_accuracy "
            f"{metrics['eval_accuracy']:.2f}; guessing gives 0.69 and 0.50; nothing was exported; lower "
            f"--learning-rate (now {config.learning_rate:g}) and add --overwrite"
        )
