"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from data.batches import Batches, prompt_batch
from data.dataset import PromptDataset, fingerprints
from rlhf import dist, rewards
from rlhf.models.export import save_policy, save_scalar
from rlhf.run import open_run, skip
from rlhf.types import Metrics, Rollout
from step3_ppo.config import Step3Config
from step3_ppo.evaluate import Evaluation, compare, look, show_samples
from step3_ppo.inputs import PHASE, check, inputs, with_inputs
from step3_ppo.players import Players, iterations, reward_context, set_up
from step3_ppo.rollout import generate, rollout_metrics, score
from step3_ppo.update import update

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


def _batches(prompts: PromptDataset, config: Step3Config) -> Iterator[list[int]]:
    batches = Batches(len(prompts), config.batch_size, config.seed, (dist.rank(), dist.world_size()))
    return batches.take(epochs=iterations(config))


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
