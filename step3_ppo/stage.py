"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from data.batches import prompt_batch
from data.build.encode import Prompt
from data.dataset import PromptDataset
from rlhf import console, rewards
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.nonfinite import Tolerance
from rlhf.engine.training import compute_dtype
from rlhf.errors import UserError
from rlhf.maths.uniforms import uniforms
from rlhf.training.checkpoints import Resumable
from rlhf.training.progress import find
from rlhf.training.run import open_run
from rlhf.types import Metrics, Rollout
from step3_ppo.chosen import append_chosen
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.global_rollout import Part, of_all_ranks
from step3_ppo.guard import KLGuard
from step3_ppo.heldout import (
    Best,
    Evaluation,
    Turns,
    at_start,
    collapse,
    compare,
    flaw,
    look,
    looked_at,
    show_samples,
    write_rollout,
    write_samples,
)
from step3_ppo.inputs import check, content, inputs, ptx_content, with_inputs
from step3_ppo.metrics import Clock, credit_metrics, rollout_metrics, speed
from step3_ppo.models import Players, reward_context, set_up
from step3_ppo.plan import workload
from step3_ppo.rollout import by_source, flaws, generate, score
from step3_ppo.schedule import Course, iterations
from step3_ppo.update import Learners, update
from step3_ppo.warnings import Limits, Watch

HELD_OUT = 2**20 - 1
"""number of the rollout that held-out responses are drawn in; no iteration has it"""


def train(players: Players, prompts: PromptDataset[Prompt], course: Course, config: Step3Config) -> Iterator[Metrics]:
    """The method: an iteration samples responses, scores them, assigns credit, and updates actor and critic."""
    for iteration, indices in course:
        clock = Clock()
        rollout = sample(players, prompts, indices, config, iteration)
        clock.lap("generate")
        rollout = score(rollout, players.actor, players.critic, players.scorer)
        clock.lap("score")
        heard = by_source(players.scorer, rollout)
        if _is_flawed(rollout, heard, indices, iteration, course.tolerance):
            yield {"skipped_iteration": 1.0}
            continue
        scores = cast(Tensor, rollout.scores)  # None only before `score`
        scaled = replace(rollout, scores=players.scaling(scores))
        players.algorithm.kl_coef = players.kl.coef
        credit = players.algorithm.credit(scaled)
        metrics = learn(players, (scaled, credit), indices, config, iteration)
        clock.lap("update")
        if config.export_rollouts and collectives.is_share_leader():
            samples = rewards.as_samples(rollout, players.scorer.tokenizer)
            write_rollout(rollouts_file(config), iteration + 1, rollout, players.scorer.sources.names, samples)
        said = rollout_metrics(scaled, heard, config.score_clip)
        said |= credit_metrics(scaled, credit) | {"kl_coef": players.kl.coef}
        players.kl.observe(said["kl"], config.batch_size)
        clock.lap("record")
        yield {**said, **metrics, **speed(said["tokens"], clock.seconds)}


def learn(players: Players, scored: Part, indices: list[int], config: Step3Config, iteration: int) -> Metrics:
    """The update: of the responses of all ranks, or of those that the algorithm selects."""
    group = config.num_generations
    if players.algorithm.select is not None:
        group = 1
        rows = players.algorithm.select(scored[0]).cpu()
        scored, indices = (scored[0][rows], scored[1][rows]), [indices[i] for i in rows]
        samples = rewards.as_samples(scored[0], players.scorer.tokenizer)
        append_chosen(chosen_file(config), iteration + 1, scored[0], samples)
    actor = None if iteration < config.critic_warmup_iterations else players.actor
    learners = Learners(actor, players.critic, players.algorithm, players.ptx, players.ema)
    shuffle = torch.Generator().manual_seed(config.seed + iteration)
    scored, indices = of_all_ranks(scored, indices, group)
    return update(learners, scored, config, shuffle, indices)


def _is_flawed(
    rollout: Rollout, heard: Mapping[str, Tensor], indices: list[int], iteration: int, tolerance: Tolerance
) -> bool:
    """Whether some rank has a number that is not finite: nobody learns from this rollout then.

    Raises: NonFiniteError after `max_bad_steps` such iterations in a row.
    """
    found = flaws(rollout, heard)
    if not any(collectives.gather_objects(bool(found))):
        tolerance.passed()
        return False
    rows = sorted({indices[row] for part in found.values() for row in part})
    tolerance.left_out(f"iteration {iteration + 1}", list(found), rows, rollout)
    return True


def chosen_file(config: Step3Config) -> Path:
    """Where the responses go that an algorithm selects to learn from."""
    return Path(config.output_dir) / STAGE.name / "chosen.jsonl"


def rollouts_file(config: Step3Config) -> Path:
    """Where this share of the rollouts is exported to."""
    return Path(config.output_dir) / STAGE.name / f"rollouts-{collectives.data_rank()}.jsonl"


def sample(
    players: Players, prompts: PromptDataset[Prompt], indices: list[int], config: Step3Config, draw: int
) -> Rollout:
    """A response to the prompt at each of `indices`, one after the other of the same prompt; `draw` numbers the
    rollout. Every response of every rollout has a random stream of its own."""
    batch = prompt_batch([prompts[i] for i in indices], players.scorer.tokenizer.pad_token_id)
    earlier: Counter[int] = Counter()
    keys = []
    for index in indices:
        keys.append((config.seed, draw, index, earlier[index]))
        earlier[index] += 1
    draws = uniforms(keys, config.response_length).to(players.actor.device)
    return generate(
        players.actor,
        players.backend,
        batch.to(players.actor.device),
        players.scorer.sampling,
        draws,
        config.rollout_batch_size,
    )


def evaluate(
    players: Players, evaluation: PromptDataset[Prompt], judge: rewards.Source | None, config: Step3Config
) -> Evaluation:
    """Sampled responses to the held-out prompts, always from the same random stream, which no iteration has."""
    rows = list(
        range(collectives.data_rank(), min(len(evaluation), config.eval_samples), collectives.data_world_size())
    )
    rollout = sample(players, evaluation, rows, config, draw=HELD_OUT)
    rollout = score(rollout, players.actor, None, replace(players.scorer, missing_eos_penalty=None))
    return look(rollout, judge, players.scorer.tokenizer, by_source(players.scorer, rollout))


def resumable(players: Players, others: Mapping[str, Any]) -> Resumable:
    """What the players, and `others` who follow the run, go on from."""
    engines = {"actor": players.actor, "critic": players.critic}
    trained = {name: engine for name, engine in engines.items() if engine is not None}
    ptx = {} if players.ptx is None else {"ptx": players.ptx.batches}
    average = {} if players.ema is None else {"ema": players.ema}
    return Resumable({**trained, **ptx, "players": players, **others}, {**trained, **average})


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    found = find(STAGE, config, inputs(config), partial(content, config))
    if found == "finished":
        return
    status(f"{STAGE.name}: reading the data")
    tokenizer, data = check(config, ranks=collectives.world_size())
    collectives.set_ranks_per_share(config.tensor_parallel_size)
    given, config = config, with_inputs(config)
    prompts, evaluation = data.train, data.evaluation
    with open_run(STAGE, given, found, {name: str(getattr(config, name)) for name in inputs(given)}) as stage:
        status(f"{STAGE.name}: loading the models")
        players = set_up(config, tokenizer)
        context = reward_context(config, tokenizer)
        judge = None if config.judge is None else rewards.open_unchecked(config.judge, context)
        stage.describe(data, tokenizer)
        stage.manifest["data"] |= ptx_content(config)
        status(f"{STAGE.name}: responding to the held-out prompts, before training")
        before = after = evaluate(players, evaluation, judge, config)
        flawed = flaw(before)
        if flawed is not None:
            raise UserError(flawed)

        def look_at(iteration: int) -> Metrics:
            nonlocal after
            after = evaluate(players, evaluation, judge, config)
            flawed = flaw(after)
            if flawed is not None:  # a long run must not end by it
                console.say(f"warning, iteration {iteration}: {flawed}")
            write_samples(stage.directory / "samples.jsonl", iteration, before, after)
            return compare(before, after)

        actor = partial(save_policy, players.actor, config.adapter, tokenizer)
        dtype = "fp32" if compute_dtype(config, players.actor.device) == torch.float32 else "bf16"
        course, watch = Course(len(prompts), config), Watch(Limits(), dtype)
        guard = KLGuard(config.abort_kl, config.abort_kl_iterations)
        others = {"course": course, "watch": watch, "guard": guard}
        best = None
        if config.keep_best is not None:
            others["best"] = best = Best(config.keep_best, config.patience, lambda: stage.save("best", actor))
        stage.go_on(resumable(players, others))
        if stage.done:
            after = evaluate(players, evaluation, judge, config)
        else:
            stage.evaluated(at_start(before))
        total = iterations(config)
        steps = stage.exporting(train(players, prompts, course, config), actor)
        steps = looked_at(steps, Turns(config.eval_every, total, stage.done), look_at, best)
        stage.follow(guard.guarded(steps, stage.done), total, ("score", "kl", "response_length"), watch)
        show_samples(before, after, config.sample_rows)
        alike = collapse(before, after)
        if alike is not None:  # no error: the scores, which may be what the user asked for, are as good as they say
            console.say(f"warning: {alike}")
        made: dict[str, Callable[[Path], None]] = {"actor": actor}
        if players.critic is not None:
            made["critic"] = partial(save_scalar, players.critic, config.adapter, tokenizer)
        if players.ema is not None:
            made["ema"] = partial(save_policy, players.actor, config.adapter, tokenizer, average=players.ema)
        stage.finish(made, compare(before, after), players.state_dict())


class Reinforcement:
    """Step 3 as the chain sees it (rlhf.chain.stages.Stage)."""

    inputs, content = staticmethod(inputs), staticmethod(content)
    workload, check = staticmethod(workload), staticmethod(check)


REINFORCEMENT = Reinforcement()
