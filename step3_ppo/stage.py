"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.batches import batch_indices, prompt_batch
from data.dataset import PromptDataset, open_datasets
from data.preflight import require_rows
from rlhf import adapters, dist, plugins, record, rewards
from rlhf.checkpoint import model_place, planned_start
from rlhf.config import UserError
from rlhf.engine import Engine, compute_dtype
from rlhf.generation import loop
from rlhf.models.export import save_policy, save_scalar
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar import load_scalar_model, read_head
from rlhf.names import resolve
from rlhf.run import check_engine, check_plugin, check_ranks, check_start, open_run, skip
from rlhf.text import load_tokenizer, prepare_tokenizer, same_ids
from rlhf.types import Metrics, Rollout
from step3_ppo.config import Step3Config
from step3_ppo.evaluate import Evaluation, compare, look
from step3_ppo.rollout import Reference, Scorer, generate, score
from step3_ppo.update import update

STAGE = "step3_ppo"


@dataclass(frozen=True, slots=True)
class Players:
    """Who takes part: two trained models, the scorer that holds the frozen ones, and the algorithm."""

    actor: Engine
    critic: Engine
    scorer: Scorer
    algorithm: Any
    backend: loop.Generate


def train(players: Players, prompts: PromptDataset, config: Step3Config) -> Iterator[Metrics]:
    """The method: an iteration samples responses, scores them, assigns credit, and updates actor and critic."""
    for iteration, indices in enumerate(islice(_batches(prompts, config), iterations(config))):
        start = time.monotonic()
        rollout = sample(players, prompts, indices, config, iteration)
        generated = time.monotonic()
        rollout = score(rollout, players.actor, players.critic, players.scorer)
        scored = time.monotonic()
        credit = players.algorithm.credit(rollout)
        shuffle = torch.Generator().manual_seed(config.seed + iteration)
        metrics = update(players.actor, players.critic, players.algorithm, (rollout, credit), config, shuffle)
        seconds = {"generate": generated - start, "score": scored - generated, "update": time.monotonic() - scored}
        yield {
            **rollout_metrics(rollout),
            **metrics,
            **{f"seconds_{name}": value for name, value in seconds.items()},
        }


def sample(players: Players, prompts: PromptDataset, indices: list[int], config: Step3Config, draw: int) -> Rollout:
    """Responses to the prompts at `indices`; `draw` numbers the random stream, which each rank has its own of."""
    batch = prompt_batch([prompts[i] for i in indices], players.scorer.tokenizer.pad_token_id)
    generator = torch.Generator(players.actor.device)
    generator.manual_seed((config.seed * 1_000_003 + draw) * 4096 + dist.rank())
    return generate(
        players.actor,
        players.backend,
        batch.to(players.actor.device),
        players.scorer.sampling,
        generator,
        config.rollout_batch_size,
    )


def rollout_metrics(rollout: Rollout) -> Metrics:
    """Means over the responses of all ranks, padding excluded. KL in nats per response."""
    assert rollout.logprobs is not None and rollout.ref_logprobs is not None and rollout.scores is not None
    log_ratio = rollout.logprobs - rollout.ref_logprobs
    mismatch = (rollout.sampled_logprobs - rollout.logprobs).abs()
    each = {
        "score": rollout.scores,
        "score_square": rollout.scores.square(),
        "kl": log_ratio.sum(1),
        "response_length": rollout.lengths,
        "ended": rollout.ended,
        "sampling_mismatch": mismatch.sum(1) / rollout.lengths.clamp(min=1),
    }
    each["rows"] = torch.ones(len(rollout), device=rollout.mask.device)
    sums = torch.stack([value.double().sum() for value in each.values()])
    totals = dist.sum_over_ranks(sums)
    means = dict(zip(each, (totals / totals[-1]).tolist(), strict=True))
    del means["rows"]
    means["score_std"] = math.sqrt(max(0.0, means.pop("score_square") - means["score"] ** 2))
    return means


def iterations(config: Step3Config) -> int:
    """Rollout-update cycles of the whole run."""
    return max(1, config.total_episodes // config.batch_size)


def _batches(prompts: PromptDataset, config: Step3Config) -> Iterator[list[int]]:
    epochs = iterations(config)
    return batch_indices(len(prompts), config.batch_size, config.seed, epochs, dist.rank(), dist.world_size())


def evaluate(
    players: Players, evaluation: PromptDataset, judge: rewards.Source | None, config: Step3Config
) -> Evaluation:
    """Sampled responses to the held-out prompts, always from the same random stream."""
    rows = list(range(dist.rank(), min(len(evaluation), config.eval_samples), dist.world_size()))
    rollout = sample(players, evaluation, rows, config, draw=2**20)
    rollout = score(rollout, players.actor, None, replace(players.scorer, missing_eos_penalty=None))
    return look(rollout, judge, players.scorer.tokenizer)


def set_up(config: Step3Config, tokenizer: PreTrainedTokenizerBase) -> Players:
    """Load every model and build the engines."""
    device = dist.local_device()
    dtype = compute_dtype(config, device)
    steps = iterations(config) * config.num_ppo_epochs * config.num_mini_batches
    lm = load_causal_lm(str(config.actor_model), dtype, len(tokenizer), config.seed)
    frozen = None
    if config.adapter is None:
        reference = load_causal_lm(str(config.actor_model), dtype, len(tokenizer), config.seed)
        frozen = Policy(reference).to(device).requires_grad_(False)
    actor = Engine(Policy(adapters.wrap(lm, config.adapter)), config, config, steps)
    value_model = load_scalar_model(str(config.critic_model), dtype, len(tokenizer))
    value_model.backbone = adapters.wrap(value_model.backbone, config.adapter)
    critic_options = config.model_copy(update={"learning_rate": config.critic_learning_rate})
    critic = Engine(value_model, config, critic_options, steps)
    scorer = Scorer(
        Reference(frozen),
        rewards.open_source(config.reward, _context(config, tokenizer)),
        tokenizer,
        config,
        config.micro_batch_size,
        config.missing_eos_penalty,
    )
    ends = loop.Config(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    algorithm = plugins.find("step3_ppo.algorithms", config.algorithm).build(config)
    return Players(actor, critic, scorer, algorithm, loop.build(ends))


def _context(config: Step3Config, tokenizer: PreTrainedTokenizerBase) -> rewards.Context:
    device = dist.local_device()
    dtype = compute_dtype(config, device)
    return rewards.Context(tokenizer, device, dtype, str(config.reward_model), config.rollout_batch_size)


MAKERS = {"actor_model": "step1_sft", "reward_model": "step2_reward"}
"""Models of this stage, and the stage that makes each."""
FOLDERS = {"actor_model": ("actor", "model"), "reward_model": ("model", "critic"), "critic_model": ("critic", "model")}
"""Which of a stage's models may play each role."""


def inputs(config: Step3Config) -> dict[str, str]:
    """The places this stage starts from: what is not named is the output of the earlier stages."""
    places = {name: getattr(config, name) or f"{config.output_dir}/{maker}" for name, maker in MAKERS.items()}
    places["critic_model"] = config.critic_model or places["reward_model"]
    scored_by = [plugins.parse_spec(spec)[0] for spec in (config.reward, config.judge) if spec is not None]
    if config.critic_model is not None and "learned" not in scored_by:
        del places["reward_model"]  # nobody asks it
    return places


def with_inputs(config: Step3Config) -> Step3Config:
    """The config with the place of every model named.

    Raises: UserError if one is neither named nor there, or is unfinished.
    """
    places = inputs(config)
    for name, maker in MAKERS.items():
        if name in places and getattr(config, name) is None and not Path(places[name]).is_dir():
            option = name.replace("_", "-")
            raise UserError(f"{name} not found at {places[name]}; run {maker} first, or name one with --{option}")
    return config.model_copy(update={name: model_place(places[name], *FOLDERS[name]) for name in places})


def check(config: Step3Config, planned: Mapping[str, str] | None = None, ranks: int = 1) -> None:
    """Refuse, before anything is loaded or written, what cannot work. Raises: UserError.

    `planned`: stages that will have run by then, and the model each starts from, which is looked at instead of theirs.
    """
    starts = {name: planned_start(place, config.output_dir, planned or {}) for name, place in inputs(config).items()}
    known = {name: start for name, start in starts.items() if start is not None}
    models = with_inputs(config.model_copy(update=known))
    check_ranks(config.batch_size, ranks, config.num_mini_batches)
    check_engine(config)
    tokens = config.max_prompt_length + config.response_length
    if tokens > config.max_length:
        raise UserError(
            f"--max-prompt-length {config.max_prompt_length} + --response-length {config.response_length}: "
            f"got {tokens} tokens, expected at most --max-length {config.max_length}; lower one or raise --max-length"
        )
    if config.eval_samples < ranks:
        raise UserError(f"--eval-samples {config.eval_samples}: expected at least one for each of {ranks} processes")
    for name in starts:
        place = str(getattr(models, name))
        check_start(place, config.chat_template, tokens)
        if name not in known and name != "actor_model":
            read_head(resolve(place))
    _check_tokenizers(models)
    _check_sources(models)
    require_rows(config, "ppo", config.batch_size, ranks)


def _check_tokenizers(config: Step3Config) -> None:
    actor, critic = (
        prepare_tokenizer(load_tokenizer(resolve(str(place))), config.chat_template)
        for place in (config.actor_model, config.critic_model)
    )
    if not same_ids(actor, critic):
        raise UserError(
            f"critic '{config.critic_model}': its tokenizer or chat template gives other ids than that of the actor "
            f"'{config.actor_model}'; expected one family: name one with --critic-model"
        )


def _check_sources(config: Step3Config) -> None:
    tokenizer = load_tokenizer(resolve(str(config.actor_model)))
    context = rewards.Context(tokenizer, torch.device("cpu"), torch.float32, str(config.reward_model), 1)
    for spec in (config.reward, config.judge):
        if spec is not None and plugins.parse_spec(spec)[0] == "learned":
            check_plugin("rlhf.rewards", spec)
        elif spec is not None:
            rewards.open_source(spec, context)


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    if skip(STAGE, config, inputs(config)):
        return
    check(config, ranks=dist.world_size())
    given, config = config, with_inputs(config)
    tokenizer = prepare_tokenizer(load_tokenizer(resolve(str(config.actor_model))), config.chat_template)
    prompts, evaluation = open_datasets(config, "ppo", tokenizer, config.response_length)
    with open_run(STAGE, given) as stage:
        players = set_up(config, tokenizer)
        judge = None if config.judge is None else rewards.open_source(config.judge, _context(config, tokenizer))
        stage.describe(prompts, evaluation)
        before = evaluate(players, evaluation, judge, config)
        stage.follow(train(players, prompts, config), iterations(config), shown=("score", "kl", "response_length"))
        after = evaluate(players, evaluation, judge, config)
        metrics = compare(before, after)
        show_samples(before, after, config.sample_rows)
        stage.finish(
            {
                "actor": lambda folder: save_policy(players.actor, config.adapter, tokenizer, folder),
                "critic": lambda folder: save_scalar(players.critic, config.adapter, tokenizer, folder),
            },
            {name: str(getattr(config, name)) for name in inputs(given)},
            metrics,
        )


def show_samples(before: Evaluation, after: Evaluation, count: int) -> None:
    """Prompts with the response before and after, side by side."""
    rows = [
        (prompt, f"{old}\n[{old_score:.2f}]", f"{new}\n[{new_score:.2f}]")
        for prompt, old, new, old_score, new_score in zip(
            after.samples.prompts,
            before.samples.responses,
            after.samples.responses,
            before.scores.tolist(),
            after.scores.tolist(),
            strict=False,
        )
    ]
    record.show_table("held-out prompts [score]", ("prompt", "before", "after"), rows[:count])
