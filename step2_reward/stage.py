"""The reward model: the chosen response of each pair should score higher (InstructGPT, arXiv 2203.02155, eq. 1).

loss = -1/N sum log sigmoid(r(x, chosen) - r(x, rejected)), over the N pairs of a batch
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, counted_rows, padding_share, pair_batch, sample_rows
from data.build.encode import Preference
from data.dataset import PhaseData, PromptDataset, Recipe
from rlhf import adapters, console
from rlhf.distributed import collectives
from rlhf.engine.adapter_export import save_scalar_adapter
from rlhf.engine.export import save_scalar
from rlhf.engine.precision import compute_dtype
from rlhf.engine.training import Engine, shards_of
from rlhf.models import adapter_files, sequence_parallel
from rlhf.models.load import Loading, set_dropout
from rlhf.models.reading import set_reading
from rlhf.models.scalar import (
    HEAD,
    ScalarModel,
    ScoreStatistics,
    can_join,
    new_scalar_model,
    score_joined,
    score_separately,
)
from rlhf.supervised.runner import Supervised
from rlhf.text.dialogues import Template
from rlhf.text.encoder import id_count
from rlhf.types import Metrics, length_groups
from step2_reward.config import STAGE, RewardConfig
from step2_reward.heldout import PairScores, evaluate, require_converged
from step2_reward.loss import PairLoss
from step2_reward.plan import workload


def train(
    reward: Engine[ScalarModel],
    dataset: PromptDataset[Preference],
    batches: Batches,
    config: RewardConfig,
    pad_id: int,
    pair_scores: PairScores = score_separately,
) -> Iterator[Metrics]:
    """The algorithm: one optimizer step a batch on the logistic loss of each pair's score difference.

    The pairs of K ranked responses are one batch element: together they have the weight of one pair.
    """
    lengths, weight_of = torch.from_numpy(dataset.row_lengths.max(1)), dataset.weights
    for indices in batches.until_epoch(config.num_train_epochs):
        weights = weight_of[indices] * counted_rows(indices)
        batch = pair_batch([dataset[i] for i in indices], pad_id, weights)
        count = collectives.sum_over_ranks(torch.tensor(weights.sum()))
        groups = length_groups(lengths[indices], config.micro_batch_size)
        loss = PairLoss(reward, config, count, pair_scores)
        metrics = reward.step([batch[rows] for rows in groups], loss, [[indices[i] for i in rows] for rows in groups])
        tokens = collectives.sum_over_ranks(torch.tensor(sum(int(rows.mask.sum()) for rows in loss.rows)))
        numbers = {"tokens": tokens.item(), "tokens_learned": 0}  # no head of a language model learns
        yield {**metrics, **numbers, "padding": 0.0 if reward.module.packs else padding_share(loss.rows)}


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
        joinable = can_join(model, pair_batch([dataset[int(i)] for i in longest], pad_id))
    if all(collectives.gather_objects(joinable)):
        return score_joined
    console.say("both sides of a pair are computed in full: this model cannot separate them in one row")
    return score_separately


def new_model(
    config: RewardConfig, path: str, dtype: torch.dtype, tokenizer_size: int, rows: Sequence[Sequence[int]] = ()
) -> ScalarModel:
    """The model with a new score head.

    rows: training rows, as of `adapters.wrap`
    """
    loading = Loading(config.seed, shards_of(config), config.quantize)
    model = new_scalar_model(path, dtype, tokenizer_size, loading)
    if config.dropout:
        set_dropout(model.backbone, config.dropout, path)
    adapters.wrap(model.backbone, config.adapter, rows)
    return sequence_parallel.scalar_model(model, config.sequence_parallel_size)


def recipe(_: RewardConfig) -> Recipe:
    """The rows to learn: pairs of a chosen and a rejected response."""
    return Recipe("reward")


class RewardModelling:
    """The reward model in training (rlhf.supervised.runner.Learner)."""

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
        rows = sample_rows(data.train, config.seed, adapters.START_TOKENS)
        model = new_model(config, model_path, dtype, id_count(tokenizer), rows)
        set_reading(model.backbone.config, Template(tokenizer))
        rates = {} if config.head_learning_rate is None else {HEAD: config.head_learning_rate}
        if rates and config.learning_rate == 0:  # no gradients of what would not change
            for name, weight in model.named_parameters():
                weight.requires_grad_(name in rates)
        self.engine: Engine = Engine(model, config, config, total_steps, rates=rates)
        self._pair_scores = scoring(self.engine, data.train, config, tokenizer.pad_token_id)
        self.before: Metrics = {}

    def train(self, batches: Batches) -> Iterator[Metrics]:
        pad_id = self._tokenizer.pad_token_id
        data = self._data.train
        return train(self.engine, data, batches, self._config, pad_id, self._pair_scores)

    def evaluate(self) -> Metrics:
        pad_id = self._tokenizer.pad_token_id
        scores_file = Path(self._config.output_dir) / STAGE.name / STAGE.report.pair_scores
        return evaluate(self.engine, self._data.evaluation, self._config, pad_id, self._pair_scores, scores_file)

    def require_converged(self, metrics: Metrics) -> None:
        require_converged(metrics, self._data.evaluation.batch_elements, self._config.learning_rate)

    def save(self, folder: Path, metrics: Metrics | None = None) -> None:
        scores = None if metrics is None else ScoreStatistics(metrics["eval_score_mean"], metrics["eval_score_std"])
        if self._config.share_trunk:
            save_scalar_adapter(self.engine, adapter_files.base_of(self._model_path), self._tokenizer, folder, scores)
        else:
            save_scalar(self.engine, self._config.adapter, self._tokenizer, folder, scores)


REWARD_MODELLING = Supervised(STAGE, workload, recipe, RewardModelling)
