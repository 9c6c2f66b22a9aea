"""Supervised fine-tuning: maximise the log-probability of the responses (InstructGPT, arXiv 2203.02155)."""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, batches_of, padding, sft_batch
from data.build.encode import Demonstration
from data.build.pack import ACROSS
from data.dataset import Opened, PromptDataset, Recipe, fingerprints, open_datasets
from data.preflight import require_rows
from data.read.records import Phase
from rlhf import adapters, console
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.export import save_policy
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import Engine, compute_dtype, shards_of
from rlhf.hub.short_names import resolve
from rlhf.maths import losses
from rlhf.models import sequence_parallel
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.splitting import check_split, shares
from rlhf.storage.manifests import model_place, planned_start
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.training.checkpoints import Resumable, require_room
from rlhf.training.checks import check_engine, check_ranks, check_start
from rlhf.training.progress import find
from rlhf.training.run import open_run
from rlhf.types import Metrics, Sequences, length_groups
from step1_sft.config import SFTConfig
from step1_sft.plan import needs

STAGE = "step1_sft"
PHASE: Phase = "sft"
FOLDERS = ("model", "actor")
"""Language models among what stages leave."""


def train(
    policy: Engine[Policy], dataset: PromptDataset[Demonstration], batches: Batches, config: SFTConfig, pad_id: int
) -> Iterator[Metrics]:
    """The method: each batch's mean token loss, one optimizer step."""
    for indices in batches.take(config.num_train_epochs):
        batch = sft_batch([dataset[i] for i in indices], pad_id).to(policy.device)
        count = collectives.sum_over_ranks(batch.loss_mask.sum())
        groups = length_groups(batch.lengths, config.micro_batch_size)
        micros = [batch[rows].trimmed() for rows in groups]

        def loss(micro: Sequences, count: Tensor = count) -> losses.Loss:
            return losses.token_nll(policy(micro)[0], micro.loss_mask, count)

        metrics = policy.step(micros, loss, [[indices[i] for i in rows] for rows in groups])
        yield {**metrics, "padding": 0.0 if policy.module.packs else padding(micros)}


def _batches(dataset: PromptDataset[Demonstration], config: SFTConfig) -> Batches:
    return batches_of(dataset.sides, config, config.seed, (collectives.data_rank(), collectives.data_world_size()))


def open_data(config: SFTConfig, place: str) -> tuple[PreTrainedTokenizerBase, Opened[Demonstration]]:
    """The prepared tokenizer of the model at `place`, and the data in its ids."""
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(place)), config.chat_template)
    return tokenizer, open_datasets(config, Recipe(PHASE, config.loss_on, config.objective), tokenizer)


def perplexity(policy: Engine[Policy], dataset: PromptDataset[Demonstration], config: SFTConfig, pad_id: int) -> float:
    """exp of the mean loss over the response tokens of `dataset`, each token counting the same over all ranks; infinite
    where no float holds it."""
    mine = range(collectives.data_rank(), len(dataset), collectives.data_world_size())
    totals = torch.zeros(2, dtype=torch.float64, device=policy.device)
    with policy.inference() as model:
        for rows in length_groups(torch.tensor(dataset.lengths[mine]), config.micro_batch_size):
            batch = sft_batch([dataset[mine[i]] for i in rows], pad_id).to(policy.device)
            logprobs, _ = model(batch)
            totals += torch.stack([-logprobs.sum().double(), batch.loss_mask.sum()])
    nll, count = collectives.sum_over_ranks(totals).tolist()
    mean = nll / count
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def require_converged(before: float, after: float, vocabulary: int, learning_rate: float) -> None:
    """Raises: NonFiniteError if the perplexity is higher than before, and than that of guessing among all tokens."""
    if after > max(before, vocabulary):
        raise NonFiniteError(
            f"the run has diverged: eval_perplexity was {before:.4g} before training and is {after:.4g} now, where "
            f"guessing among {vocabulary} tokens has {vocabulary}; nothing was exported; lower --learning-rate (now "
            f"{learning_rate:g}) and add --overwrite"
        )


def inputs(config: SFTConfig) -> dict[str, str]:
    """The places this stage starts from."""
    return {"model": config.model}


def content(config: SFTConfig) -> dict[str, str]:
    """A digest of what is at each local place of the data."""
    return fingerprints(config, PHASE)


def check(
    config: SFTConfig, planned: Mapping[str, str] | None = None, ranks: int = 1
) -> tuple[PreTrainedTokenizerBase, Opened[Demonstration]]:
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
    batches_of(data.train.sides, config, config.seed, (0, ranks))
    return tokenizer, data


def run(config: SFTConfig) -> None:
    """The stage from its inputs to OUT/step1_sft: model, metrics.jsonl, manifest.json; nothing if it is finished."""
    found = find(STAGE, config, inputs(config), partial(content, config))
    if found == "finished":
        return
    status(f"{STAGE}: reading the data")
    tokenizer, data = check(config, ranks=collectives.world_size())
    collectives.work_alike(config.tensor_parallel_size * config.sequence_parallel_size)
    place = model_place(config.model, *FOLDERS)
    dataset, evaluation = data.train, data.evaluation
    batches = _batches(dataset, config)
    total = batches.steps(config.num_train_epochs)
    with open_run(STAGE, config, found, {"model": place}) as stage:
        status(f"{STAGE}: loading the model")
        dtype = compute_dtype(config, collectives.local_device())
        lm = load_causal_lm(place, dtype, id_count(tokenizer), config.seed, shards_of(config))
        model = sequence_parallel.policy(adapters.wrap(lm, config.adapter), config.sequence_parallel_size)
        policy = Engine(model, config, config, total)
        stage.describe(data, tokenizer)
        if config.objective == "text":
            console.say(f"{STAGE}: {ACROSS}")
        before = perplexity(policy, evaluation, config, tokenizer.pad_token_id)
        stage.go_on(Resumable({"policy": policy, "batches": batches}, {"policy": policy}))
        if not stage.done:
            stage.evaluated({"eval_perplexity": before})
        export = partial(save_policy, policy, config.adapter, tokenizer)
        steps = stage.exporting(train(policy, dataset, batches, config, tokenizer.pad_token_id), export)
        stage.follow(steps, total, shown=("loss", "grad_norm"))
        metrics = {
            "eval_perplexity_before": before,
            "eval_perplexity": perplexity(policy, evaluation, config, tokenizer.pad_token_id),
        }
        stage.evaluated(metrics)
        require_converged(before, metrics["eval_perplexity"], len(tokenizer), config.learning_rate)
        stage.finish({"model": export}, metrics)
