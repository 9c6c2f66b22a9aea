"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from data.batches import Batches, prompt_batch
from data.dataset import PromptDataset, fingerprints
from rlhf import dist, rewards
from rlhf.engine import compute_dtype
from rlhf.models.export import save_policy, save_scalar
from rlhf.run import open_run, skip
from rlhf.types import Metrics, Rollout
from step3_ppo.config import Step3Config
from step3_ppo.evaluate import Best, Evaluation, compare, look, looked_at, show_samples, write_rollout, write_samples
from step3_ppo.inputs import PHASE, check, inputs, with_inputs
from step3_ppo.metrics import credit_metrics, rollout_metrics, speed
from step3_ppo.players import Players, iterations, reward_context, set_up
from step3_ppo.rollout import generate, score
from step3_ppo.update import update
from step3_ppo.warnings import Limits, Watch, watched

STAGE = "step3_ppo"


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
        learners = (None if iteration < config.critic_warmup_iterations else players.actor, players.critic)
        metrics = update(*learners, players.algorithm, (rollout, credit), config, shuffle)
        seconds = {"generate": generated - start, "score": scored - generated, "update": time.monotonic() - scored}
        said = rollout_metrics(rollout, _by_source(players, rollout)) | credit_metrics(rollout, credit)
        if config.export_rollouts:
            samples = rewards.as_samples(rollout, players.scorer.tokenizer)
            write_rollout(rollouts_file(config), iteration + 1, rollout, players.scorer.sources.names, samples)
        said["kl_coef"] = players.algorithm.kl.coef
        players.algorithm.kl.observe(said["kl"], config.batch_size)
        yield {**said, **metrics, **speed(said["tokens"], seconds)}


def rollouts_file(config: Step3Config) -> Path:
    """Where this rank exports its rollouts to."""
    return Path(config.output_dir) / STAGE / f"rollouts-{dist.rank()}.jsonl"


def _by_source(players: Players, rollout: Rollout) -> dict[str, Tensor]:
    """What each reward source says. [B] each"""
    assert rollout.source_scores is not None
    return dict(zip(players.scorer.sources.names, rollout.source_scores.unbind(1), strict=True))


def sample(players: Players, prompts: PromptDataset, indices: list[int], config: Step3Config, draw: int) -> Rollout:
    """A response to the prompt at each of `indices`; `draw` numbers the random stream, each rank having its own."""
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


def _batches(prompts: PromptDataset, config: Step3Config) -> Iterator[list[int]]:
    """Prompts of each iteration, every one of them `num_generations` times in a row."""
    size = config.batch_size // config.num_generations
    batches = Batches(len(prompts), size, config.seed, (dist.rank(), dist.world_size()))
    for indices in batches.take(epochs=iterations(config)):
        yield [i for i in indices for _ in range(config.num_generations)]


def evaluate(
    players: Players, evaluation: PromptDataset, judge: rewards.Source | None, config: Step3Config
) -> Evaluation:
    """Sampled responses to the held-out prompts, always from the same random stream."""
    rows = list(range(dist.rank(), min(len(evaluation), config.eval_samples), dist.world_size()))
    rollout = sample(players, evaluation, rows, config, draw=2**20)
    rollout = score(rollout, players.actor, None, replace(players.scorer, missing_eos_penalty=None))
    return look(rollout, judge, players.scorer.tokenizer)


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    if skip(STAGE, config, inputs(config), partial(fingerprints, config, PHASE)):
        return
    tokenizer, data = check(config, ranks=dist.world_size())
    given, config = config, with_inputs(config)
    prompts, evaluation = data.train, data.evaluation
    with open_run(STAGE, given) as stage:
        players = set_up(config, tokenizer)
        judge = None if config.judge is None else rewards.open_source(config.judge, reward_context(config, tokenizer))
        stage.describe(data, tokenizer)
        for left in (stage.directory / "samples.jsonl", rollouts_file(config)):
            left.unlink(missing_ok=True)
        before = after = evaluate(players, evaluation, judge, config)

        def look_at(iteration: int) -> Metrics:
            nonlocal after
            after = evaluate(players, evaluation, judge, config)
            write_samples(stage.directory / "samples.jsonl", iteration, before, after)
            return compare(before, after)

        actor = partial(save_policy, players.actor, config.adapter, tokenizer)
        best = None
        if config.keep_best is not None:
            best = Best(config.keep_best, config.patience, lambda: stage.save("best", actor))
        steps = looked_at(train(players, prompts, config), config.eval_every, look_at, best)
        dtype = "fp32" if compute_dtype(config, players.actor.device) == torch.float32 else "bf16"
        steps = watched(steps, Watch(Limits(), dtype), stage.recorder.warn)
        stage.follow(steps, iterations(config), shown=("score", "kl", "response_length"))
        metrics = look_at(iterations(config))
        show_samples(before, after, config.sample_rows)
        made: dict[str, Callable[[Path], None]] = {"actor": actor}
        if players.critic is not None:
            made["critic"] = partial(save_scalar, players.critic, config.adapter, tokenizer)
        stage.finish(
            made,
            {name: str(getattr(config, name)) for name in inputs(given)},
            metrics,
        )
