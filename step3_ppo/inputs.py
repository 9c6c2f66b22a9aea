"""The inputs of step 3, and the checks before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.dataset import PhaseData, PromptDataset, Recipe, fingerprints, open_datasets, require_rows
from data.prepare.encode import Demonstration, Preference, Prompt
from data.read.records import Phase
from rlhf import adapters, generation, plugins, rewards
from rlhf.config.options import FrozenOptions, OwnEngineOptions
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.models import quantized
from rlhf.models.adapter_files import base_of, read_options, same_method
from rlhf.models.load import load_config, require_context, require_decoder, require_generating
from rlhf.models.scalar import read_head
from rlhf.models.splitting import check_split, replicas
from rlhf.rewards import learned
from rlhf.roles import NO_PLANNED, LoadTokenizer, Planned, Role, load_once, tokenizer_of
from rlhf.text.tokenizer import prepare_tokenizer, same_ids
from rlhf.training.checkpoints import require_room
from rlhf.training.checks import check_engine, check_ranks, check_start, check_steps, check_trunk
from rlhf.training.trackers import check_trackers
from step3_ppo import algorithms
from step3_ppo.config import POLICY, SHARED, STAGE, Step3Config
from step3_ppo.cost import open_questions
from step3_ppo.pretraining import check_pretraining, open_pairs, pairs_content
from step3_ppo.ptx import open_ptx, ptx_content
from step3_ppo.roles import ACTOR, REFERENCE, REWARD_MODEL, roles, run_reward_model, source_specs, workload

PHASE: Phase = "ppo"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The models and the data that step 3 starts from."""

    roles: tuple[Role, ...]
    tokenizer: PreTrainedTokenizerBase
    """of the actor, prepared"""
    prompts: PhaseData[Prompt]
    ptx: PromptDataset[Demonstration] | None
    """rows of the fine-tuning loss (PPO-ptx); None without it"""
    pairs: PhaseData[Preference] | None
    """of the reward model, for the pretraining of the critic; None without it"""


def check(
    config: Step3Config, planned: Planned = NO_PLANNED, ranks: int = 1, load: LoadTokenizer | None = None
) -> Inputs:
    """Find the models and the data, and check them and the options, before a model is loaded or anything is written.

    planned: stages that run before this one, and the role that each trains, whose model is checked in place of the
        stage's output, which does not exist yet
    load: loads tokenizers
    Raises: UserError.
    """
    check_trackers(config.report_to)
    load = load or load_once()
    table = roles(config, planned, load)
    check_pretraining(config, table)
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
    for role in table:
        if role.part is ACTOR or (role.start is not ACTOR and role.part is not REFERENCE):
            _check_model(config, role, tokens, load)
    check_trunk_roles(config, table)
    _check_sources(config, table, load)
    require_room(Path(config.output_dir) / STAGE.name, workload(table, config, "cpu").checkpoints)
    tokenizer, data = open_data(config, table[0].path, load)
    require_rows(data, config, config.batch_size // config.num_generations, ranks)
    _check_lengths(config, table, tokenizer, data, load)
    _check_rows(config, data)
    open_questions("--multiple-choice", config.multiple_choice, table[0].path, tokenizer)
    ptx_rows = open_ptx(config, tokenizer)
    if ptx_rows is not None:
        check_ranks(config.ptx_batch_size, ranks, "ptx_batch_size")
        if len(ptx_rows) < config.ptx_batch_size:
            raise UserError(
                f"--ptx-batch-size {config.ptx_batch_size}: only {len(ptx_rows)} rows; lower it or add rows"
            )
    pairs = open_pairs(config, tokenizer)
    if pairs is not None:
        require_rows(pairs, config, config.batch_size, ranks)
    return Inputs(table, tokenizer, data, ptx_rows, pairs)


def _check_model(config: Step3Config, role: Role, tokens: int, load: LoadTokenizer) -> None:
    """tokens: of a prompt and its response. Raises: UserError for a model that cannot be what its role needs."""
    scores = role.part is REWARD_MODEL
    require_decoder(role.path)
    if role.part is ACTOR:
        require_generating(role.path)
    # Whether the context of a reward model is long enough depends on its own tokenizer (_check_lengths).
    template = "auto" if scores and not role.inputs else config.chat_template  # a named one keeps its own
    check_start(role.path, template, 0 if scores else tokens, config.convert_template, load)
    if not scores:
        check_split(config, role.path)
    if role.part.kind == "scalar" and not role.planned:
        read_head(resolve(role.path))


def check_trunk_roles(config: Step3Config, table: Sequence[Role]) -> None:
    """Check that all models of the run can be adapters on one base model.

    Raises: UserError for a model of another base, or an option that only separate models support.
    """
    if not config.share_trunk:
        return
    actor = resolve(table[0].path)
    base = base_of(actor)
    check_trunk(config, base)
    _check_trunk_options(config)
    if is_adapter(Path(actor)):
        own, requested = read_options(actor), adapters.peft_options(str(config.adapter), load_config(base))
        if requested is None or not same_method(own, requested):
            raise UserError(
                f"--share-trunk: the policy continues the adapter of '{actor}', but --adapter {config.adapter} has "
                "other options; expected those with which it was trained"
            )
    for role in table:
        if not role.on_trunk or role.part.kind == "lm" or role.start is ACTOR:
            continue
        path = resolve(role.path)
        whole = not role.planned and not is_adapter(Path(path))
        if whole or base_of(path) != base:
            got = "whole weights" if whole else f"an adapter on '{base_of(path)}'"
            option = next(iter(role.inputs), role.part.option)
            raise UserError(
                f"--share-trunk: {option.replace('_', ' ')} '{path}': got {got}, expected an adapter on the policy's "
                f"base model '{base}': train it there with --share-trunk, or remove the option"
            )


def _check_trunk_options(config: Step3Config) -> None:
    for name, options in {"reference": config.reference, "reward_models": config.reward_models}.items():
        if options != FrozenOptions():
            raise UserError(
                f"{name}: got engine options with --share-trunk, expected none: it is an adapter of the actor"
            )
    for name, trained in {"actor": config.actor, "critic": config.critic}.items():
        for option in ("gradient_checkpointing", "quantize"):
            if getattr(trained, option) not in (None, getattr(config, option)):
                raise UserError(
                    f"{name}.{option}: got a value for one role with --share-trunk, where all roles are one model; "
                    f"expected --{option.replace('_', '-')} for all"
                )


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


def open_data(
    config: Step3Config, model_path: str, load: LoadTokenizer = tokenizer_of
) -> tuple[PreTrainedTokenizerBase, PhaseData[Prompt]]:
    """The prepared tokenizer of the actor at `model_path`, and the prompts in its ids."""
    tokenizer = prepare_tokenizer(load(model_path), config.chat_template, config.chat_template_kwargs)
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
    """A digest of each local path of the data, those of `open_ptx` and `open_pairs` included."""
    return fingerprints(config, PHASE) | ptx_content(config) | pairs_content(config)


def _check_sources(config: Step3Config, table: Sequence[Role], load: LoadTokenizer) -> None:
    tokenizer, reward_model = load(table[0].path), run_reward_model(config, table)
    context = rewards.Context(tokenizer, torch.device("cpu"), torch.float32, reward_model, 1)
    rewards.check_weights(config.reward, config.reward_combine)
    for spec in source_specs(config):
        rewards.check_source(spec, context, scores=spec != config.judge)


def _check_lengths(
    config: Step3Config,
    table: Sequence[Role],
    tokenizer: PreTrainedTokenizerBase,
    data: PhaseData[Prompt],
    load: LoadTokenizer,
) -> None:
    """Raises: UserError if a reward model cannot score a response to every prompt, in its own tokens."""
    for role in (role for role in table if role.part is REWARD_MODEL):
        chat_template = config.chat_template if role.planned else "auto"  # it will be trained with the run's
        own_tokenizer = prepare_tokenizer(load(role.path), chat_template)
        if same_ids(own_tokenizer, tokenizer):
            require_context(role.path, config.max_prompt_length + config.response_length)
        else:
            prompts = [item.row for part in (data.train, data.evaluation) for item in part]
            learned.require_fitting(role.path, own_tokenizer, prompts)


def _check_rows(config: Step3Config, data: PhaseData[Prompt]) -> None:
    """Raises: UserError for a row that a source cannot score."""
    trained = [plugins.split_weight(spec)[1] for spec in config.reward]
    for spec in source_specs(config):
        parts = [data.train, data.evaluation] if spec in trained else [data.evaluation]
        rewards.check_rows(spec, (item.row for part in parts for item in part))
