"""The reward model: the chosen response of each pair should score higher (InstructGPT, arXiv 2203.02155, section 3.5).

What is minimised is a file of step2_reward/objectives/; `pairwise` is the default.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, counted_rows, padding_share, pair_batch
from data.dataset import PhaseData, PromptDataset, Recipe
from data.prepare.encode import Preference
from rlhf import adapters, console
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.engine.export import save_scalar, saved_adapter
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine, shards_of
from rlhf.maths import losses
from rlhf.maths.bag_of_words import preference_gaps
from rlhf.maths.losses import Loss
from rlhf.maths.preferences import in_order
from rlhf.models import sequence_parallel
from rlhf.models.load import Loading, set_dropout
from rlhf.models.packing import packs_rows
from rlhf.models.reading import set_reading
from rlhf.models.scalar import (
    HEAD,
    PairOutput,
    ScalarModel,
    ScoreStatistics,
    can_join,
    new_scalar_model,
    score_every_token,
    score_joined,
    score_separately,
)
from rlhf.plan.activations import PassShape
from rlhf.roles import Part
from rlhf.storage import disk
from rlhf.supervised.runner import FOLDERS, Supervised
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.types import JoinedPairs, Metrics, Pairs, Sequences, length_groups, to_device
from step2_reward import objectives
from step2_reward.config import STAGE, RewardConfig
from step2_reward.heldout import PairScores, evaluate, require_converged, score_pairs
from step2_reward.objectives import Objective, ScoredPairs

REWARD_MODEL = Part("reward model", "model", FOLDERS, "scalar")
RANKED = "one pair a row is assumed; a ranked list of K responses is K (K - 1) / 2 pairs, so many times as long"
"""A plan reads no data, so it does not know how many responses a ranked list has."""
MEASURED = 20_000
"""training pairs of which the bag of words learns"""
Computed = Sequence[Sequences | JoinedPairs]
"""what the model computed for a micro-batch of pairs"""


@dataclass(frozen=True, slots=True)
class Step:
    """What this rank learns in one optimizer step."""

    micros: list[Pairs]
    rows: list[list[int]]
    """the row numbers of each micro-batch in the data"""
    count: Tensor
    """batch elements of the step on all ranks; the pairs of K ranked responses are one, and together weigh as one"""


def steps_of(dataset: PromptDataset[Preference], batches: Batches, config: RewardConfig, pad_id: int) -> Iterator[Step]:
    """The optimizer steps from the position of `batches` to the end of the last epoch."""
    lengths = torch.from_numpy(dataset.row_lengths.max(1))
    for indices in batches.until_epoch(config.num_train_epochs):
        weights = dataset.weights[indices] * counted_rows(indices)
        batch = pair_batch([dataset[i] for i in indices], pad_id, weights)
        groups = length_groups(lengths[indices], config.micro_batch_size)
        count = collectives.sum_over_ranks(torch.tensor(weights.sum()))
        yield Step([batch[rows] for rows in groups], [[indices[i] for i in rows] for rows in groups], count)


def train(
    reward: Engine[ScalarModel], objective: Objective, steps: Iterable[Step], pair_scores: PairScores
) -> Iterator[Metrics]:
    """The algorithm: score both responses of each pair, and descend on the objective of the scores."""
    for step in steps:
        passes: list[tuple[Pairs, Computed]] = []

        def loss(pairs: Pairs, count: Tensor = step.count, passes: list[tuple[Pairs, Computed]] = passes) -> Loss:
            output = pair_scores(reward, pairs)  # r(x, chosen), r(x, rejected)
            passes.append((pairs, output.rows))
            return pair_loss(objective, output, pairs, count)

        metrics = reward.step(step.micros, loss, step.rows)
        tokens = collectives.sum_over_ranks(torch.tensor(sum(counted_tokens(*each) for each in passes))).item()
        computed = [rows for _, all_rows in passes for rows in all_rows]
        padding = padding_share(computed, partial(packs_rows, reward.module.backbone))
        yield {**metrics, "tokens": tokens, "padding": padding}


def counted_tokens(pairs: Pairs, computed: Computed) -> int:
    """Tokens of the pairs with a weight, so not of the pair that is repeated to fill an incomplete batch."""
    assert pairs.weight is not None
    counts = pairs.weight.cpu() != 0
    return sum(int(rows.mask.cpu()[counts.repeat(len(rows.mask) // len(counts))].sum()) for rows in computed)


def pair_loss(objective: Objective, output: PairOutput, pairs: Pairs, count: Tensor) -> Loss:
    """The objective of a micro-batch, with the metrics that every objective has."""
    assert pairs.weight is not None
    (chosen, rejected), device = output.scores.unbind(1), output.scores.device
    weight, margin = to_device(pairs.weight, device), None if pairs.margin is None else to_device(pairs.margin, device)
    scored = ScoredPairs(chosen, rejected, weight, margin)
    if output.scalars is not None:
        (sides,) = output.rows
        assert isinstance(sides, Sequences)
        scored = replace(scored, sides=sides, scalars=output.scalars)
    value, metrics = objective.loss(scored, count)
    return value, {**losses.pair_metrics(chosen, rejected, count, weight), **metrics}


def scoring(
    reward: Engine[ScalarModel], dataset: PromptDataset[Preference], config: RewardConfig, pad_id: int
) -> PairScores:
    """Score each pair in one row if that saves tokens and a test on the longest pairs shows that the model can do
    it."""
    tokens = dataset.row_lengths
    if tokens.shape[1] == 2:
        return score_separately
    longest = tokens[:, 0].argsort(kind="stable")[-min(4, config.micro_batch_size) :]
    with reward.inference() as model:
        joinable = can_join(model, pair_batch([dataset[int(i)] for i in longest], pad_id), config.max_length)
    if all(collectives.gather_objects(joinable)):
        return score_joined
    console.say("both sides of a pair are computed in full: this model cannot separate them in one row")
    return score_separately


def shape(config: RewardConfig) -> PassShape:
    """Pairs whose sides have `max_length` tokens."""
    return PassShape(2 * config.micro_batch_size, config.max_length, 0)


def new_model(config: RewardConfig, path: str, dtype: torch.dtype, tokenizer_size: int) -> ScalarModel:
    """The model with a new score head."""
    loading = Loading(config.seed, shards_of(config), config.quantize)
    model = new_scalar_model(path, dtype, tokenizer_size, loading)
    if config.dropout:
        set_dropout(model.backbone, config.dropout, path)
    adapters.wrap(model.backbone, config.adapter)
    return sequence_parallel.scalar_model(model, config.sequence_parallel_size)


def recipe(_: RewardConfig) -> Recipe:
    """The rows to learn: pairs of a chosen and a rejected response."""
    return Recipe("reward")


class RewardModelling:
    """The reward model in training (rlhf.supervised.runner.ModelInTraining)."""

    role: str = "reward"
    shown: tuple[str, ...] = ("loss", "accuracy", "margin", "tokens_per_second")
    rising: tuple[str, ...] = ("eval_accuracy",)

    def __init__(
        self,
        config: RewardConfig,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        data: PhaseData[Preference],
        total_steps: int,
    ) -> None:
        self._config, self._tokenizer, self._data, self._model_path = config, tokenizer, data, model_path
        dtype = compute_dtype(config, collectives.local_device())
        model = new_model(config, model_path, dtype, id_count(tokenizer))
        set_reading(model.backbone.config, Template(tokenizer))
        rates = {} if config.head_learning_rate is None else {HEAD: config.head_learning_rate}
        if rates and config.learning_rate == 0:  # no gradients of what would not change
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in rates)
        self.engine: Engine = Engine(model, config, total_steps, rates=rates)
        self._objective = objectives.load(config)
        self._pair_scores = scoring(self.engine, data.train, config, tokenizer.pad_token_id)
        self.before: Metrics = {}

    def train(self, batches: Batches) -> Iterator[Metrics]:
        steps = steps_of(self._data.train, batches, self._config, self._tokenizer.pad_token_id)
        pair_scores = score_every_token if self._objective.every_token else self._pair_scores
        return train(self.engine, self._objective, steps, pair_scores)

    def evaluate(self) -> Metrics:
        pad_id = self._tokenizer.pad_token_id
        pairs, rows = self._data.evaluation, self._config.eval_rows
        scored = score_pairs(self.engine, pairs, rows, pad_id, self._pair_scores)
        metrics = evaluate(scored, self._config.learning_rate)
        if collectives.is_main():  # for the report
            file = Path(self._config.output_dir) / STAGE.name / STAGE.report.pair_scores
            columns: Tree = dict(zip(("chosen", "rejected", "weight"), scored[:, :3].T.tolist(), strict=True))
            if pairs.subsets:
                numbers = scored[:, 4].long().tolist()
                elements = range(len(pairs)) if pairs.elements is None else pairs.elements.tolist()
                columns |= {"group": [pairs.subsets[i] for i in numbers], "element": [elements[i] for i in numbers]}
            disk.write_json(file, columns)
        return metrics | {"eval_words_rule": self._words_rule}

    @cached_property
    def _words_rule(self) -> float:
        """The accuracy of a bag of words of the training pairs, on the held-out pairs. Rank 0 fits it."""
        accuracy, held_out = 0.0, self._data.evaluation
        if collectives.is_main():
            train, measured = (
                [(x.chosen[x.prompt_length :], x.rejected[x.prompt_length :]) for x in pairs]
                for pairs in (self._data.train[:MEASURED], held_out)
            )
            weight = torch.from_numpy(held_out.weights).double()
            accuracy = float((weight * in_order(preference_gaps(train, measured))).sum() / weight.sum())
        return float(collectives.gather_objects(accuracy)[0])

    def require_converged(self, metrics: Metrics) -> None:
        require_converged(metrics, self._data.evaluation.batch_elements, self._config)

    def save(self, folder: Path, metrics: Metrics | None = None) -> None:
        scores = None if metrics is None else ScoreStatistics(metrics["eval_score_mean"], metrics["eval_score_std"])
        save_scalar(self.engine, saved_adapter(self._config, self._model_path), self._tokenizer, folder, scores)


REWARD_MODELLING = Supervised(
    STAGE,
    REWARD_MODEL,
    shape,
    recipe,
    RewardModelling,
    note=RANKED,
    files=objectives.files,
    check_options=objectives.load,
)
