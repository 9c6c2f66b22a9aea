"""The reward model: the chosen response of each pair shall score higher (InstructGPT, arXiv 2203.02155, eq. 1)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, batches_of, counted, padding, pair_batch
from data.build.encode import Preference
from data.dataset import Opened, PromptDataset, Recipe, fingerprints, open_datasets
from data.preflight import require_rows
from data.read.records import Phase
from rlhf import adapters, console
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.export import save_scalar
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import Engine, compute_dtype, shards_of
from rlhf.hub.short_names import resolve
from rlhf.maths import losses
from rlhf.models import sequence_parallel
from rlhf.models.scalar import ScalarModel, ScoreStatistics, apart, can_join, new_scalar_model, together
from rlhf.models.splitting import check_split, shares
from rlhf.storage.manifests import model_place, planned_start
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.training.checkpoints import Resumable, require_room
from rlhf.training.checks import check_engine, check_ranks, check_start
from rlhf.training.progress import find
from rlhf.training.run import open_run
from rlhf.types import JoinedPairs, Metrics, Pairs, Sequences, length_groups
from step2_reward.config import RewardConfig
from step2_reward.plan import needs

STAGE = "step2_reward"
PHASE: Phase = "reward"
FOLDERS = ("model", "actor")
"""Models among what stages leave whose backbone may become the reward model's."""
DIVERGED = 10
"""times the loss of guessing, log 2; runs that overfit end at one to three times"""


PairScores = Callable[[Any, Pairs], tuple[Tensor, Sequence[Sequences | JoinedPairs]]]
"""Scores of both sides, [B, 2], and the rows that the model ran for them."""


def train(
    reward: Engine[ScalarModel],
    dataset: PromptDataset[Preference],
    batches: Batches,
    config: RewardConfig,
    pad_id: int,
    pair_scores: PairScores = apart,
) -> Iterator[Metrics]:
    """The method: the logistic loss of each pair's score difference, one optimizer step a batch.

    The pairs of K ranked responses are one element of a batch: together they weigh as much as a single pair.
    """
    lengths, weight_of = torch.from_numpy(dataset.row_lengths.max(1)), dataset.weights
    for indices in batches.take(config.num_train_epochs):
        weights = weight_of[indices] * counted(indices)
        batch = pair_batch([dataset[i] for i in indices], pad_id, weights).to(reward.device)
        count = collectives.sum_over_ranks(torch.tensor(weights.sum()))
        ran: list[Sequences | JoinedPairs] = []

        def loss(pairs: Pairs, count: Tensor = count, ran: list[Any] = ran) -> losses.Loss:
            scores, rows = pair_scores(reward, pairs)
            ran.extend(rows)
            chosen, rejected = scores.unbind(1)
            return losses.pairwise_logistic(chosen, rejected, pairs.margin, config.centering, count, pairs.weight)

        groups = length_groups(lengths[indices], config.micro_batch_size)
        metrics = reward.step([batch[rows] for rows in groups], loss, [[indices[i] for i in rows] for rows in groups])
        yield {**metrics, "padding": 0.0 if reward.module.packs else padding(ran)}


def batches_for(dataset: PromptDataset[Preference], config: RewardConfig, ranks: tuple[int, int]) -> Batches:
    """The batches of this rank's share. `ranks`: its number, and how many there are."""
    return batches_of(dataset.row_lengths, config, config.seed, ranks, dataset.elements)


def open_data(config: RewardConfig, place: str) -> tuple[PreTrainedTokenizerBase, Opened[Preference]]:
    """The prepared tokenizer of the model at `place`, and the data in its ids."""
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(place)), config.chat_template)
    return tokenizer, open_datasets(config, Recipe(PHASE), tokenizer)


def scoring(
    reward: Engine[ScalarModel], dataset: PromptDataset[Preference], config: RewardConfig, pad_id: int
) -> PairScores:
    """How pairs are scored: in one row each if the model can, as the longest of them show, and that saves tokens."""
    tokens = dataset.row_lengths
    if tokens.shape[1] == 2:
        return apart
    longest = tokens[:, 0].argsort(kind="stable")[-min(4, config.micro_batch_size) :]
    with reward.inference() as model:
        able = can_join(model, pair_batch([dataset[int(i)] for i in longest], pad_id).to(reward.device))
    if all(collectives.gather_objects(able)):
        return together
    console.say("both sides of a pair are computed in full: this model cannot keep them apart in one row")
    return apart


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


def inputs(config: RewardConfig) -> dict[str, str]:
    """The places this stage starts from."""
    return {"model": config.model}


def content(config: RewardConfig) -> dict[str, str]:
    """A digest of what is at each local place of the data."""
    return fingerprints(config, PHASE)


def check(
    config: RewardConfig, planned: Mapping[str, str] | None = None, ranks: int = 1
) -> tuple[PreTrainedTokenizerBase, Opened[Preference]]:
    """Refuse, before a model is loaded or anything written, what cannot work; else what `open_data` gives.

    `planned`: stages that will have run by then, and the model each starts from.
    Raises: UserError.
    """
    ranks = shares(config, ranks)
    if config.batch_tokens is None:
        check_ranks(config.batch_size, ranks)
    check_engine(config)
    start = planned_start(config.model, config.output_dir, planned or {})
    place = start or model_place(config.model, *FOLDERS)
    check_start(place, config.chat_template, config.max_length, config.convert_template)
    check_split(config, place)
    require_room(Path(config.output_dir) / STAGE, needs(config, "cpu", {"model": place}).checkpoints)
    tokenizer, data = open_data(config, place)
    require_rows(data, config, config.batch_size if config.batch_tokens is None else ranks, ranks)
    batches_for(data.train, config, (0, ranks))
    return tokenizer, data


def run(config: RewardConfig) -> None:
    """The stage from its inputs to OUT/step2_reward: model, metrics.jsonl, manifest.json; nothing if it is finished."""
    found = find(STAGE, config, inputs(config), partial(content, config))
    if found == "finished":
        return
    status(f"{STAGE}: reading the data")
    tokenizer, data = check(config, ranks=collectives.world_size())
    collectives.work_alike(config.tensor_parallel_size * config.sequence_parallel_size)
    place = model_place(config.model, *FOLDERS)
    dataset, evaluation = data.train, data.evaluation
    batches = batches_for(dataset, config, (collectives.data_rank(), collectives.data_world_size()))
    total = batches.steps(config.num_train_epochs)
    pad_id = tokenizer.pad_token_id
    with open_run(STAGE, config, found, {"model": place}) as stage:
        status(f"{STAGE}: loading the model")
        dtype = compute_dtype(config, collectives.local_device())
        model = new_scalar_model(place, dtype, id_count(tokenizer), config.seed, shards_of(config))
        model.backbone = adapters.wrap(model.backbone, config.adapter)
        model = sequence_parallel.scalar_model(model, config.sequence_parallel_size)
        reward = Engine(model, config, config, total)
        stage.describe(data, tokenizer)
        pair_scores = scoring(reward, dataset, config, pad_id)
        stage.go_on(Resumable({"reward": reward, "batches": batches}, {"reward": reward}))
        export = partial(save_scalar, reward, config.adapter, tokenizer)
        steps = stage.exporting(train(reward, dataset, batches, config, pad_id, pair_scores), export)
        stage.follow(steps, total, shown=("loss", "accuracy", "margin"))
        metrics = evaluate(reward, evaluation, config, pad_id, pair_scores)
        stage.evaluated(metrics)
        require_converged(metrics, evaluation.batch_elements, config.learning_rate)
        statistics = ScoreStatistics(metrics["eval_score_mean"], metrics["eval_score_std"])
        stage.finish({"model": partial(export, scores=statistics)}, metrics)
