"""What the reward model does on held-out pairs, and whether a run has diverged by it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from data.batches import pair_batch
from data.build.encode import Preference
from data.dataset import PromptDataset
from rlhf import console
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models.scalar import ScalarModel, apart
from rlhf.types import JoinedPairs, Metrics, Pairs, Sequences, length_groups
from step2_reward.config import RewardConfig

DIVERGED = 10
"""times the loss of guessing, log 2; runs that overfit end at one to three times"""
PairScores = Callable[[Any, Pairs], tuple[Tensor, Sequence[Sequences | JoinedPairs]]]
"""Scores of both sides, [B, 2], and the rows that the model ran for them."""


def evaluate(
    reward: Engine[ScalarModel],
    dataset: PromptDataset[Preference],
    config: RewardConfig,
    pad_id: int,
    pair_scores: PairScores = apart,
) -> Metrics:
    """Accuracy, loss and scores on held-out pairs, over all ranks; those of one ranked list weigh as one pair."""
    mine = range(collectives.data_rank(), len(dataset), collectives.data_world_size())
    weights = dataset.weights.tolist()
    found: list[list[float]] = []
    with reward.inference() as model:
        for rows in length_groups(torch.from_numpy(dataset.row_lengths[mine].max(1)), config.micro_batch_size):
            batch = pair_batch([dataset[mine[i]] for i in rows], pad_id).to(reward.device)
            scores = pair_scores(model, batch)[0].tolist()
            found += [[*pair, weights[mine[i]]] for pair, i in zip(scores, rows, strict=True)]
    every = torch.tensor([pair for part in collectives.gather_shares(found) for pair in part])
    pairs, (chosen, rejected, weight) = every[:, :2], every.unbind(1)
    require_finite(pairs, config.learning_rate)
    count = float(dataset.batch_elements)
    loss, metrics = losses.pairwise_logistic(chosen, rejected, count=count, weight=weight)
    console.say(score_histogram(pairs))
    return {
        "eval_accuracy": metrics["accuracy"].item(),
        "eval_loss": loss.item(),
        "eval_margin": metrics["margin"].item(),
        "eval_score_mean": pairs.mean().item(),
        "eval_score_std": pairs.std(correction=0).item(),
    }


def require_finite(pairs: Tensor, learning_rate: float) -> None:
    """Raises: NonFiniteError if a score of a held-out pair is not finite. pairs [N, 2]."""
    wrong = int((~pairs.isfinite()).any(1).sum())
    if wrong:
        raise NonFiniteError(
            f"the run has diverged: scores of {wrong} of {len(pairs)} held-out pairs are not finite; nothing was "
            f"exported; lower --learning-rate (now {learning_rate:g}) and add --overwrite"
        )


def require_converged(metrics: Metrics, pairs: int, learning_rate: float) -> None:
    """Raises: NonFiniteError if the held-out loss is DIVERGED times that of guessing, with as many pairs right as by
    guessing (95 %). A higher loss alone is overfitting, and scores far apart in the right order are of use."""
    chance = abs(metrics["eval_accuracy"] - 0.5) < 1.96 * 0.5 / math.sqrt(pairs)
    if chance and metrics["eval_loss"] > DIVERGED * math.log(2):
        raise NonFiniteError(
            f"the run has diverged: eval_loss is {metrics['eval_loss']:.4g} and eval_accuracy "
            f"{metrics['eval_accuracy']:.2f}, where guessing has 0.69 and 0.50; nothing was exported; lower "
            f"--learning-rate (now {learning_rate:g}) and add --overwrite"
        )


def score_histogram(pairs: Tensor, bins: int = 30) -> str:
    """Chosen and rejected scores as two lines of bars on one axis. pairs [N, 2]."""
    low, high = pairs.min().item(), pairs.max().item()
    lines = []
    for name, column in zip(("chosen  ", "rejected"), pairs.unbind(1), strict=True):
        counts = torch.histc(column, bins, low, high)
        heights = (counts / counts.max() * 8).ceil().long().tolist()
        lines.append(f"{name} {low:7.2f} |{''.join(' ▁▂▃▄▅▆▇█'[h] for h in heights)}| {high:.2f}")
    return "\n".join(lines)
