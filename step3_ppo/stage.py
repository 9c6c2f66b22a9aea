"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from data.batches import Batches, prompt_batch
from data.dataset import PromptDataset
from rlhf import checkpoint, dist, rewards
from rlhf.engine import compute_dtype
from rlhf.models.export import save_policy, save_scalar
from rlhf.nonfinite import Tolerance
from rlhf.run import open_run, skip
from rlhf.types import Metrics, Rollout
from step3_ppo.chosen import append_chosen
from step3_ppo.config import Step3Config
from step3_ppo.evaluate import Best, Evaluation, compare, look, looked_at, show_samples, write_rollout, write_samples
from step3_ppo.guard import ended_by_kl
from step3_ppo.inputs import check, content, inputs, with_inputs
from step3_ppo.metrics import Clock, credit_metrics, rollout_metrics, speed
from step3_ppo.players import Players, iterations, reward_context, set_up
from step3_ppo.rollout import by_source, flaws, generate, score
from step3_ppo.update import Learners, Part, update
from step3_ppo.warnings import Limits, Watch, watched

STAGE = "step3_ppo"
HELD_OUT = 2**20 - 1
"""number of the random stream of held-out responses; a CPU's generator takes 32 bits, of which 12 are the rank's"""


def train(players: Players, prompts: PromptDataset, config: Step3Config) -> Iterator[Metrics]:
    """The method: an iteration samples responses, scores them, assigns credit, and updates actor and critic."""
    tolerance = Tolerance(config.max_bad_steps)
    for iteration, indices in enumerate(islice(_batches(prompts, config), iterations(config))):
        clock = Clock()
        rollout = sample(players, prompts, indices, config, iteration)
        clock.lap("generate")
        rollout = score(rollout, players.actor, players.critic, players.scorer)
        clock.lap("score")
        if _is_flawed(rollout, players, indices, iteration, tolerance):
            yield {"skipped_iteration": 1.0}
            continue
        heard = replace(rollout, scores=players.scaling(rollout.scores))
        credit = players.algorithm.credit(heard)
        metrics = learn(players, (heard, credit), indices, config, iteration)
        clock.lap("update")
        if config.export_rollouts:
            samples = rewards.as_samples(rollout, players.scorer.tokenizer)
            write_rollout(rollouts_file(config), iteration + 1, rollout, players.scorer.sources.names, samples)
        said = rollout_metrics(heard, by_source(players.scorer, rollout), config.score_clip)
        said |= credit_metrics(heard, credit) | {"kl_coef": players.algorithm.kl.coef}
        players.algorithm.kl.observe(said["kl"], config.batch_size)
        clock.lap("record")
        yield {**said, **metrics, **speed(said["tokens"], clock.seconds)}


def learn(players: Players, scored: Part, indices: list[int], config: Step3Config, iteration: int) -> Metrics:
    """The update: of all responses, or of those that the algorithm selects."""
    rows = torch.arange(len(indices))
    if hasattr(players.algorithm, "select"):
        rows = players.algorithm.select(scored[0]).cpu()
        chosen = scored[0][rows]
        append_chosen(chosen_file(config), iteration + 1, chosen, rewards.as_samples(chosen, players.scorer.tokenizer))
    actor = None if iteration < config.critic_warmup_iterations else players.actor
    learners = Learners(actor, players.critic, players.algorithm, players.ptx, players.ema)
    shuffle = torch.Generator().manual_seed(config.seed + iteration)
    return update(learners, (scored[0][rows], scored[1][rows]), config, shuffle, [indices[i] for i in rows])


def _is_flawed(rollout: Rollout, players: Players, indices: list[int], iteration: int, tolerance: Tolerance) -> bool:
    """Whether some rank has a number that is not finite: nobody learns from this rollout then.

    Raises: NonFiniteError after `max_bad_steps` such iterations in a row.
    """
    found = flaws(rollout, by_source(players.scorer, rollout))
    if not any(dist.gather_objects(bool(found))):
        tolerance.passed()
        return False
    rows = sorted({indices[row] for part in found.values() for row in part})
    tolerance.left_out(f"iteration {iteration + 1}", list(found), rows, rollout)
    return True


def chosen_file(config: Step3Config) -> Path:
    """Where the responses go that an algorithm selects to learn from."""
    return Path(config.output_dir) / STAGE / "chosen.jsonl"


def rollouts_file(config: Step3Config) -> Path:
    """Where this rank exports its rollouts to."""
    return Path(config.output_dir) / STAGE / f"rollouts-{dist.rank()}.jsonl"


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
    """Sampled responses to the held-out prompts, always from the same random stream, which no iteration has."""
    rows = list(range(dist.rank(), min(len(evaluation), config.eval_samples), dist.world_size()))
    rollout = sample(players, evaluation, rows, config, draw=HELD_OUT)
    rollout = score(rollout, players.actor, None, replace(players.scorer, missing_eos_penalty=None))
    return look(rollout, judge, players.scorer.tokenizer, by_source(players.scorer, rollout))


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    if skip(STAGE, config, inputs(config), partial(content, config)):
        return
    tokenizer, data = check(config, ranks=dist.world_size())
    given, config = config, with_inputs(config)
    prompts, evaluation = data.train, data.evaluation
    with open_run(STAGE, given) as stage:
        players = set_up(config, tokenizer)
        judge = None if config.judge is None else rewards.open_source(config.judge, reward_context(config, tokenizer))
        stage.describe(data, tokenizer)
        stage.manifest["data"] |= {place: digest for place, digest in content(config).items() if "(ptx)" in place}
        for left in (stage.directory / "samples.jsonl", rollouts_file(config), chosen_file(config)):
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
        steps = ended_by_kl(steps, config.abort_kl, config.abort_kl_iterations)
        dtype = "fp32" if compute_dtype(config, players.actor.device) == torch.float32 else "bf16"
        steps = watched(steps, Watch(Limits(), dtype), stage.recorder.warn)
        stage.follow(steps, iterations(config), shown=("score", "kl", "response_length"))
        metrics = look_at(iterations(config))
        show_samples(before, after, config.sample_rows)
        made: dict[str, Callable[[Path], None]] = {"actor": actor}
        if players.critic is not None:
            made["critic"] = partial(save_scalar, players.critic, config.adapter, tokenizer)
        if players.ema is not None:
            made["ema"] = partial(save_policy, players.actor, config.adapter, tokenizer, average=players.ema)
        if dist.is_main():
            checkpoint.write_json(stage.directory / "state.json", players.state_dict())
        stage.finish(
            made,
            {name: str(getattr(config, name)) for name in inputs(given)},
            metrics,
        )
