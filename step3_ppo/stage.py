"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batches import sample_rows
from data.build.encode import Prompt
from data.dataset import PromptDataset
from rlhf import adapters, console, rewards
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.adapter_export import save_policy_adapter, save_scalar_adapter
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.nonfinite import Tolerance
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.maths.uniforms import MINI_BATCHES, torch_stream
from rlhf.models.adapter_files import base_of
from rlhf.plan.compile_choice import choose_compiler
from rlhf.report.verdict import stage_verdict
from rlhf.text.prompt_file import format_prompt
from rlhf.training import random_sources
from rlhf.training.checkpoints import Resumable
from rlhf.training.evaluations import Best, EvaluationSchedule, with_evaluations
from rlhf.training.progress import report_status
from rlhf.training.run import open_run
from rlhf.types import Metrics, SampledRollout, Samples, ScoredRollout
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.critic import describe as describe_critic
from step3_ppo.global_rollout import CreditedRollout, gather
from step3_ppo.guard import KLGuard
from step3_ppo.heldout import (
    Evaluation,
    at_start,
    compare,
    gather_evaluation,
    nonfinite_scores,
    show_samples,
    write_rollout,
    write_samples,
)
from step3_ppo.inputs import check, content, input_paths, inputs, ptx_content, with_inputs
from step3_ppo.metrics import Clock, credit_metrics, rollout_metrics, shaped_metrics, speed
from step3_ppo.models import Models, set_up
from step3_ppo.plan import workload
from step3_ppo.rollout import (
    generate,
    nonfinite,
    prompts_and_uniforms,
    score,
    scores_by_source,
)
from step3_ppo.schedule import Schedule, computed_tokens, iterations
from step3_ppo.update import Learners, update
from step3_ppo.warnings import Watch

HELD_OUT = 2**20 - 1
"""number of the rollout of held-out responses, which no iteration has"""


def train(models: Models, prompts: PromptDataset[Prompt], schedule: Schedule, config: Step3Config) -> Iterator[Metrics]:
    """The method: an iteration samples responses, scores them, assigns credit, and updates actor and critic."""
    for iteration, indices in schedule:
        clock = Clock()
        sampled = sample(models, prompts, indices, config, iteration)
        clock.lap("generate")
        rollout = score(sampled, models.actor, models.critic, models.scorer)
        clock.lap("score")
        source_scores = scores_by_source(models.scorer, rollout)
        if _must_skip(rollout, source_scores, indices, iteration, schedule.tolerance):
            yield {"skipped_iteration": 1.0}
            continue
        shaped = replace(rollout, scores=models.scaling(rollout.scores))
        models.algorithm.kl_coef = models.kl.coef
        models.algorithm.pretrains_critic = iteration < config.critic_warmup_iterations
        credit = models.algorithm.credit(shaped)
        updated = learn(models, CreditedRollout(shaped, credit), indices, config, iteration)
        clock.lap("update")
        if config.export_rollouts and collectives.is_share_leader():
            samples = rewards.as_samples(rollout, models.scorer.tokenizer)
            write_rollout(rollouts_file(config), iteration + 1, rollout, models.scorer.sources.names, samples)
        disagreement = models.scorer.sources.disagreement(rollout.source_scores)
        metrics = rollout_metrics(rollout, source_scores, disagreement) | shaped_metrics(shaped.scores, config)
        metrics |= credit_metrics(shaped, credit)
        if not config.rescore:
            del metrics["sampling_mismatch"]  # the update measures it
        metrics["kl_coef"] = models.kl.coef
        if not models.algorithm.pretrains_critic:  # the policy of a warm-up is still the reference
            models.kl.observe(metrics["kl"])
        clock.lap("record")
        yield {**metrics, **updated, **speed(metrics["tokens"], clock.seconds)}


def learn(
    models: Models, credited: CreditedRollout, indices: list[int], config: Step3Config, iteration: int
) -> Metrics:
    """The update, on the responses of all ranks or on those that the algorithm selects."""
    group = config.num_generations
    if models.algorithm.select is not None:
        group = 1
        rows = models.algorithm.select(credited.rollout)
        credited, indices = credited[rows], [indices[i] for i in rows]
        samples = rewards.as_samples(credited.rollout, models.scorer.tokenizer)
        append_chosen(chosen_file(config), iteration + 1, credited.rollout, samples)
    actor = None if iteration < config.critic_warmup_iterations else models.actor
    learners = Learners(actor, models.critic, models.algorithm, models.ptx, models.ema)
    shuffle = torch_stream(MINI_BATCHES, config.seed, iteration)
    credited, indices = gather(credited, indices, group)
    return update(learners, credited, config, shuffle, indices)


def _must_skip(
    rollout: ScoredRollout,
    source_scores: Mapping[str, Tensor],
    indices: list[int],
    iteration: int,
    tolerance: Tolerance,
) -> bool:
    """Whether some rank has a number that is not finite, so that no rank may learn from this rollout.

    Raises: NonFiniteError after `max_bad_steps` such iterations in a row.
    """
    problems = nonfinite(rollout, source_scores)
    if not any(collectives.gather_objects(bool(problems))):
        tolerance.reset()
        return False
    rows = sorted({indices[row] for rows in problems.values() for row in rows})
    tolerance.skip(f"iteration {iteration + 1}", list(problems), rows, rollout)
    return True


def chosen_file(config: Step3Config) -> Path:
    """The file of the responses that an algorithm selects to learn from."""
    return Path(config.output_dir) / STAGE.name / "chosen.jsonl"


def append_chosen(path: Path, iteration: int, chosen: ScoredRollout, samples: Samples) -> None:
    """Append a row for each of the chosen responses of all ranks: prompt, response, score, iteration.

    `samples` is the text of `chosen`. `--sft-only-data-path FILE` learns from it, or `--data-path FILE --data-split
    1,0,0`. A response that was cut before its EOS is skipped: as a demonstration it would teach the model to end
    there. Rank 0 writes; every rank must call.
    """
    own = [row for row, ended in zip(_rows(iteration, chosen, samples), chosen.ended.tolist(), strict=True) if ended]
    shares = collectives.gather_shares(own)
    if collectives.is_main():
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for share in shares for row in share)


def _rows(iteration: int, chosen: ScoredRollout, samples: Samples) -> list[dict[str, Any]]:
    return [
        {"prompt": format_prompt(row.prompt), "response": response, "score": score, "iteration": iteration}
        for row, response, score in zip(chosen.rows, samples.responses, chosen.scores.tolist(), strict=True)
    ]


def rollouts_file(config: Step3Config) -> Path:
    """The file to which this rank's share of the rollouts is exported."""
    return Path(config.output_dir) / STAGE.name / f"rollouts-{collectives.data_rank()}.jsonl"


def sample(
    models: Models, prompts: PromptDataset[Prompt], indices: list[int], config: Step3Config, number: int
) -> SampledRollout:
    """The policy's response to the prompt at each of `indices`, with repetitions. number: of the rollout"""
    batch, draws = prompts_and_uniforms(prompts, indices, config, models.scorer.tokenizer.pad_token_id, number)
    policy = models.actor.inference()
    return generate(policy, models.backend, batch, models.scorer.sampling, draws, config.rollout_batch_size)


def evaluate(
    models: Models, evaluation: PromptDataset[Prompt], judge: rewards.Source | None, config: Step3Config
) -> Evaluation:
    """Sampled responses to the held-out prompts, always from the same random stream, which no iteration has.

    A score source that draws random numbers draws them apart, too.
    """
    rows = list(
        range(collectives.data_rank(), min(len(evaluation), config.eval_samples), collectives.data_world_size())
    )
    sampled = sample(models, evaluation, rows, config, number=HELD_OUT)
    with random_sources.apart(config.seed):
        rollout = score(sampled, models.actor, None, replace(models.scorer, rescore=True))
        return gather_evaluation(rollout, judge, models.scorer.tokenizer, scores_by_source(models.scorer, rollout))


def resumable(models: Models, observers: Mapping[str, Any]) -> Resumable:
    """What a checkpoint holds: the state of the models and of the observers of the run."""
    engines = {"actor": models.actor, "critic": models.critic}
    trained = {name: engine for name, engine in engines.items() if engine is not None}
    if models.critic is models.actor:
        del trained["critic"]
    ptx = {} if models.ptx is None else {"ptx": models.ptx.batches}
    average = {} if models.ema is None else {"ema": models.ema}
    return Resumable({**trained, **ptx, "models": models, **observers}, {**trained, **average})


def _exports(
    models: Models, config: Step3Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Functions that write the actor and the critic: as adapters on the shared trunk, or as whole models."""
    critic: Any = models.critic
    if config.share_trunk:
        base = base_of(str(config.actor_model))
        save_actor: Callable[..., None] = partial(save_policy_adapter, models.actor, base, tokenizer)
        return save_actor, partial(save_scalar_adapter, critic, base, tokenizer)
    save_actor = partial(save_policy, models.actor, config.adapter, tokenizer)
    return save_actor, partial(save_scalar, critic, config.adapter, tokenizer)


def describe_left_out(prompts: int, config: Step3Config) -> None:
    """Say how many prompts a pass over them leaves out, if the run makes a whole pass."""
    size = config.batch_size // config.num_generations
    if prompts % size and iterations(config) >= prompts // size:
        console.say(
            f"{STAGE.name}: {prompts % size} of the {prompts} prompts are left out of a pass over them, others in each "
            f"pass, because every iteration takes {size}"
        )


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    stage_status = report_status(STAGE, config, inputs(config), partial(content, config))
    if stage_status == "finished":
        return
    status(f"{STAGE.name}: reading the data")
    tokenizer, data = check(config, ranks=collectives.world_size())
    collectives.set_ranks_per_share(config.tensor_parallel_size)
    user_config, config = config, with_inputs(config)
    prompts, evaluation = data.train, data.evaluation
    config = choose_compiler(config, STAGE.name, str(config.actor_model), computed_tokens(config, prompts))
    with open_run(STAGE, user_config, stage_status, input_paths(user_config)) as stage, ExitStack() as at_end:
        status(f"{STAGE.name}: loading the models")
        models = set_up(config, tokenizer, sample_rows(prompts, config.seed, adapters.START_TOKENS))
        if models.backend.close is not None:
            at_end.callback(models.backend.close)
        if config.adapter is not None:
            console.say(f"{STAGE.name}: {adapters.describe_rates(config)}")
        if models.critic is not None:
            console.say(f"{STAGE.name}: {describe_critic(user_config.critic_model, config)}")
        judge = None if config.judge is None else rewards.open_unchecked(config.judge, models.context)
        stage.describe(data, tokenizer)
        describe_left_out(len(prompts), config)
        stage.manifest["data"] |= ptx_content(config)
        status(f"{STAGE.name}: responding to the held-out prompts, before training")
        before = after = evaluate(models, evaluation, judge, config)
        problem = nonfinite_scores(before)
        if problem is not None:
            raise UserError(problem)

        def evaluate_again(iteration: int) -> Metrics:
            nonlocal after
            after = evaluate(models, evaluation, judge, config)
            problem = nonfinite_scores(after)
            if problem is not None:  # no reason to end a long run
                console.say(f"warning, iteration {iteration}: {problem}")
            samples = write_samples(stage.directory / "samples.jsonl", iteration, before, after)
            stage.recorder.table("samples", iteration, samples[: config.sample_rows])
            return compare(before, after)

        save_actor, save_critic = _exports(models, config, tokenizer)
        dtype = "fp32" if compute_dtype(config, models.actor.device) == torch.float32 else "bf16"
        schedule, watch = Schedule(len(prompts), config, config.seed), Watch(dtype)
        guard = KLGuard(config.abort_kl, config.abort_kl_iterations)
        observers = {"schedule": schedule, "watch": watch, "guard": guard}
        best = None
        if config.keep_best is not None:
            observers["best"] = best = Best(config.keep_best, config.patience, lambda: stage.save("best", save_actor))
        random_sources.seed(config.seed, 0)  # ranks have different rows, so random scores differ
        stage.resume(resumable(models, observers))
        if stage.done:
            after = evaluate(models, evaluation, judge, config)
        else:
            stage.record_evaluation(at_start(before))
        total = iterations(config)
        steps = stage.with_exports(train(models, prompts, schedule, config), save_actor)
        evaluations = EvaluationSchedule(
            config.eval_every, total, stage.done, unchanged=config.critic_warmup_iterations
        )
        steps = with_evaluations(steps, evaluations, evaluate_again, best)
        stage.run_loop(guard.guarded(steps, stage.done), total, ("score", "kl", "response_length"), watch)
        show_samples(before, after, config.sample_rows)
        exports: dict[str, Callable[[Path], None]] = {"actor": save_actor}
        if models.critic is not None:
            exports["critic"] = save_critic
        if models.ema is not None:
            exports["ema"] = partial(save_actor, average=models.ema)
        stage.finish(exports, compare(before, after), models.state_dict())
        stage.recorder.verdict(stage.step, partial(stage_verdict, stage.directory, STAGE))


class Reinforcement:
    """Step 3 as the chain sees it (rlhf.chain.stages.Stage)."""

    inputs, content = staticmethod(inputs), staticmethod(content)
    workload, check = staticmethod(workload), staticmethod(check)


REINFORCEMENT = Reinforcement()
