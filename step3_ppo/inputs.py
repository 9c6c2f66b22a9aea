"""The inputs of step 3, and the checks before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.dataset import PhaseData, PromptDataset, Recipe, fingerprints, open_datasets, require_rows
from data.prepare.encode import Demonstration, Prompt
from data.read.records import Phase
from rlhf import adapters, generation, plugins, rewards
from rlhf.config.options import OwnEngineOptions
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models import quantized
from rlhf.models.load import require_context, require_decoder, require_generating
from rlhf.models.scalar import read_head
from rlhf.models.splitting import check_split, replicas
from rlhf.rewards import learned
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from rlhf.training.checkpoints import require_room
from rlhf.training.checks import check_engine, check_ranks, check_start, check_steps
from rlhf.training.trackers import check_trackers
from step3_ppo import algorithms
from step3_ppo.config import POLICY, SHARED, STAGE, Step3Config
from step3_ppo.plan import workload
from step3_ppo.ptx import open_ptx, ptx_content
from step3_ppo.resolved import Resolved, learned_models, resolve_models, reward_model_path, source_specs
from step3_ppo.trunk import check_roles

PHASE: Phase = "ppo"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The models and the data that step 3 starts from."""

    models: Resolved
    tokenizer: PreTrainedTokenizerBase
    """of the actor, prepared"""
    prompts: PhaseData[Prompt]
    ptx: PromptDataset[Demonstration] | None
    """rows of the fine-tuning loss (PPO-ptx); None without it"""


def check(config: Step3Config, planned: Mapping[str, str] | None = None, ranks: int = 1) -> Inputs:
    """Find the models and the data, and check them and the options, before a model is loaded or anything is written.

    planned: stages that run before this one, and the model that each starts from; that model is checked in place of the
        stage's output, which does not exist yet
    Raises: UserError.
    """
    check_trackers(config.report_to)
    resolved = resolve_models(config, planned)
    models = resolved.config
    _check_engines(config, ranks)
    ranks = _replicas(config, ranks)
    check_batches(config, ranks)
    backend = generation.options(config.rollout_backend, **_backend_options(config, 0, 0))
    backend.check(config.actor_options, config)
    open_backend(config, 0, 0)
    tokens = config.max_prompt_length + config.response_length
    if tokens > config.max_length:
        raise UserError(
            f"--max-prompt-length {config.max_prompt_length} + --response-length {config.response_length}: "
            f"got {tokens} tokens, expected at most --max-length {config.max_length}; lower one or raise --max-length"
        )
    if config.eval_samples < ranks:
        raise UserError(f"--eval-samples {config.eval_samples}: expected at least one for each of {ranks} processes")
    for name in resolved.paths:
        path = str(getattr(models, name))
        if path == POLICY:  # of its own accord, in place of a reward model with other tokens
            continue
        require_decoder(path)
        if name == "actor_model":
            require_generating(path)
        # Whether the context of a reward model is long enough depends on its own tokenizer (_check_lengths).
        check_start(path, config.chat_template, 0 if name == "reward_model" else tokens, config.convert_template)
        if name != "reward_model":
            check_split(config, path)
        if name not in resolved.planned and name != "actor_model":
            read_head(resolve(path))
    check_roles(resolved)
    _check_sources(models)
    require_room(Path(config.output_dir) / STAGE.name, workload(models, "cpu", {}).checkpoints)
    tokenizer, data = open_data(config, str(models.actor_model))
    require_rows(data, config, config.batch_size // config.num_generations, ranks)
    _check_lengths(models, "reward_model" in resolved.planned, tokenizer, data)
    _check_rows(config, data)
    ptx_rows = open_ptx(config, tokenizer)
    if ptx_rows is not None:
        check_ranks(config.ptx_batch_size, ranks, "ptx_batch_size")
        if len(ptx_rows) < config.ptx_batch_size:
            raise UserError(
                f"--ptx-batch-size {config.ptx_batch_size}: only {len(ptx_rows)} rows; lower it or add rows"
            )
    return Inputs(resolved, tokenizer, data, ptx_rows)


def _replicas(config: Step3Config, ranks: int) -> int:
    """How many copies of the models the ranks hold. Raises: UserError for a split that step 3 does not support."""
    if config.sequence_parallel_size > 1:
        raise UserError(
            f"--sequence-parallel-size {config.sequence_parallel_size}: expected 1 in step 3, whose generation "
            "and entropies cannot be split; use it in steps 1 and 2 (--sft.sequence-parallel-size)"
        )
    if config.critic_model == SHARED and config.tensor_parallel_size > 1:
        raise UserError(
            f"--critic-model {SHARED}: got it with --tensor-parallel-size {config.tensor_parallel_size}, expected a "
            f"critic of its own, because the head on a split actor is not tested; use --critic-model {POLICY}"
        )
    frozen = {"reference": config.reference, "reward_models": config.reward_models}
    for name, options in frozen.items() if config.tensor_parallel_size > 1 else ():
        if options.zero_stage == 3:
            raise UserError(
                f"{name}: --zero-stage 3: got it with --tensor-parallel-size {config.tensor_parallel_size}, expected "
                "0: a frozen model is not split when the trained models are"
            )
    return replicas(config, ranks)


def _check_engines(config: Step3Config, ranks: int) -> None:
    """Raises: UserError for options that exclude each other; it names the model if that has options of its own."""
    if config.critic_model == SHARED and config.critic != OwnEngineOptions():
        raise UserError("critic: got engine options with --critic-model shared, expected none: the actor's apply")
    if config.reference.quantize is not None:
        raise UserError(
            f"reference: --quantize {config.reference.quantize}: expected none of its own: it has the weights that the "
            "policy starts from, or the KL of the first rollout would not be 0"
        )
    quantized.require_possible_frozen(config.reward_model_options, "reward_models")
    for name, options in {"actor": config.actor_options, "critic": config.critic_options}.items():
        try:
            check_engine(options, ranks)
            adapters.require_merging(options.adapter, "reinforcement learning")
        except UserError as error:
            shared = getattr(config, name) == OwnEngineOptions()
            raise UserError(f"{error}" if shared else f"{name}: {error}") from None


def open_backend(config: Step3Config, eos_token_id: int, pad_token_id: int) -> generation.Backend:
    """The backend that samples responses."""
    return generation.open_backend(config.rollout_backend, **_backend_options(config, eos_token_id, pad_token_id))


def _backend_options(config: Step3Config, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """The options of every backend that the stage sets."""
    return {
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "max_tokens": config.max_prompt_length + config.response_length,
        "adapter": config.adapter,
    }


def open_data(config: Step3Config, model_path: str) -> tuple[PreTrainedTokenizerBase, PhaseData[Prompt]]:
    """The prepared tokenizer of the actor at `model_path`, and the prompts in its ids."""
    tokenizer = prepare_tokenizer(
        load_tokenizer(resolve(model_path)), config.chat_template, config.chat_template_kwargs
    )
    return tokenizer, open_datasets(config, Recipe(PHASE), tokenizer)


def check_batches(config: Step3Config, ranks: int) -> None:
    """Raises: UserError unless the run has at least one iteration, and each rank has complete groups in each
    minibatch."""
    check_ranks(config.batch_size, ranks, "batch_size", config.num_mini_batches, "num_mini_batches")
    rows_text = f"--batch-size {config.batch_size} / --num-mini-batches {config.num_mini_batches}"
    check_steps(config, config.batch_size // config.num_mini_batches, rows_text, config.micro_batch_size, ranks)
    if config.total_episodes < config.batch_size:
        raise UserError(f"--total-episodes {config.total_episodes}: expected at least --batch-size {config.batch_size}")
    algorithm = algorithms.load(config)
    minibatches = config.num_mini_batches if algorithm.select is not None else 1
    multiple = ranks * config.num_generations * minibatches
    if config.batch_size % multiple:
        each = (
            f" x --num-mini-batches {minibatches}, each of which learns from one response of a group"
            if minibatches > 1
            else ""
        )
        raise UserError(
            f"--batch-size {config.batch_size}: expected a multiple of {multiple} ({ranks} processes x "
            "--num-generations "
            f"{config.num_generations}{each}), so that each has complete groups"
        )
    count, warmup = config.total_episodes // config.batch_size, config.critic_warmup_iterations
    if warmup and algorithm.value_loss is None:
        raise UserError(f"--critic-warmup-iterations {warmup}: expected 0, as '{config.algorithm}' has no critic")
    if warmup >= count:
        raise UserError(f"--critic-warmup-iterations {warmup}: expected less than the {count} iterations of the run")


def content(config: Step3Config) -> dict[str, str]:
    """A digest of each local path of the data, those of `open_ptx` included."""
    return fingerprints(config, PHASE) | ptx_content(config)


def _check_sources(config: Step3Config) -> None:
    tokenizer = load_tokenizer(resolve(str(config.actor_model)))
    context = rewards.Context(tokenizer, torch.device("cpu"), torch.float32, str(config.reward_model), 1)
    rewards.check_weights(config.reward, config.reward_combine)
    for spec in source_specs(config):
        rewards.check_source(spec, context)


def _check_lengths(
    config: Step3Config, planned: bool, tokenizer: PreTrainedTokenizerBase, data: PhaseData[Prompt]
) -> None:
    """Raises: UserError if a reward model cannot score a response to every prompt, in its own tokens.

    planned: the reward model of the run is not trained yet, and will have the run's chat template
    """
    for model in learned_models(config):
        path = reward_model_path(config, model)
        chat_template = config.chat_template if planned and model is None else "auto"
        own_tokenizer = prepare_tokenizer(load_tokenizer(resolve(path)), chat_template)
        if same_ids(own_tokenizer, tokenizer):
            require_context(path, config.max_prompt_length + config.response_length)
        else:
            prompts = [item.row for part in (data.train, data.evaluation) for item in part]
            learned.require_fitting(path, own_tokenizer, prompts)


def _check_rows(config: Step3Config, data: PhaseData[Prompt]) -> None:
    """Raises: UserError for a row that a source cannot score."""
    trained = [plugins.split_weight(spec)[1] for spec in config.reward]
    for spec in source_specs(config):
        parts = [data.train, data.evaluation] if spec in trained else [data.evaluation]
        rewards.check_rows(spec, (item.row for part in parts for item in part))
