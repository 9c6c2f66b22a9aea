"""Reinforcement learning from scores: generate, score, assign credit, update (InstructGPT, arXiv 2203.02155)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from data.dataset import PromptDataset
from data.prepare.encode import Prompt
from rlhf import adapters, console, rewards
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.ema import BestWeights, WeightsCopy
from rlhf.engine.export import save_policy, save_scalar, saved_adapter
from rlhf.engine.precision import compute_dtype
from rlhf.errors import UserError
from rlhf.plan.compile_choice import choose_compiler
from rlhf.report.verdict import stage_verdict
from rlhf.roles import inputs
from rlhf.training import random_sources
from rlhf.training.checkpoints import Numbers, Resumable
from rlhf.training.evaluations import Best, EvaluationSchedule, with_evaluations
from rlhf.training.progress import report_status
from rlhf.training.run import Run, open_run
from rlhf.types import Credit, Metrics, ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.config import STAGE, Step3Config
from step3_ppo.cost import Cost
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
from step3_ppo.inputs import check, content
from step3_ppo.learner import Learner
from step3_ppo.metrics import credit_metrics, group_metrics, rollout_metrics, shaped_metrics, speed
from step3_ppo.models import set_up
from step3_ppo.pretraining import pairs_content, pretrain
from step3_ppo.ptx import ptx_content
from step3_ppo.resampling import resample
from step3_ppo.roles import named_roles, notes, roles, workload
from step3_ppo.rollout import score
from step3_ppo.schedule import Schedule, computed_tokens, iterations
from step3_ppo.warnings import Watch
from step3_ppo.worth import measure, worth

SHOWN = ("score", "kl", "response_length", rewards.REQUESTS, rewards.TOKENS, rewards.CACHED)
"""metrics on the status line, those that the run has"""
HELD_OUT = 2**20 - 1
"""number of the rollout of held-out responses, which no iteration has"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an iteration made. Without credit it was skipped: its rollout has a number that is not finite."""

    iteration: Iteration
    rollout: ScoredRollout
    shaped: ScoredRollout | None = None
    """the rollout as the algorithm sees it"""
    credit: Credit | None = None
    update: Metrics = field(default_factory=dict)


def train(learner: Learner, prompts: PromptDataset[Prompt], schedule: Schedule) -> Iterator[Outcome]:
    """The method: an iteration samples responses, scores them, assigns credit, and updates actor and critic."""
    for iteration in schedule:
        rollout = learner.generate(prompts, iteration)  # y ~ pi_old(. | x), with the log-probs it was sampled with
        rollout = learner.score(rollout)  # scores of y, log-probs of policy and reference, values
        iteration, rollout = resample(learner, prompts, iteration, rollout)  # other prompts for groups of equal scores
        if schedule.skips(iteration, rollout, learner.nonfinite(rollout)):
            yield Outcome(iteration, rollout)
            continue
        shaped = learner.shape(rollout)  # scores scaled and clipped
        iteration = learner.steer(iteration, shaped)  # with the weight of the KL that this KL asks for
        credit = learner.algorithm.credit(shaped, iteration)  # advantages and returns of each token
        yield Outcome(iteration, rollout, shaped, credit, learner.update(shaped, credit, iteration))


def observe(outcomes: Iterable[Outcome], learner: Learner) -> Iterator[Metrics]:
    """The metrics of each iteration."""
    config, sources = learner.config, learner.scorer.sources
    for outcome in outcomes:
        iteration, rollout, shaped, credit = outcome.iteration, outcome.rollout, outcome.shaped, outcome.credit
        if shaped is None or credit is None:
            yield {"skipped_iteration": 1.0}
            continue
        if config.export_rollouts and collectives.leads_replica():
            samples = rewards.as_samples(rollout, learner.scorer.tokenizer)
            write_rollout(rollouts_file(config), iteration.number + 1, rollout, sources.names, samples)
        disagreement = sources.disagreement(rollout.source_scores)
        metrics = rollout_metrics(rollout, learner.scores_by_source(rollout), disagreement)
        metrics |= group_metrics(rollout.scores, config.num_generations)
        metrics |= {"resampled_groups": float(iteration.resampled)} if config.resample_groups else {}
        metrics |= shaped_metrics(shaped.scores, config) | credit_metrics(shaped, credit)
        if not config.rescore:
            del metrics["sampling_mismatch"]  # the update measures it
        metrics |= {"kl_coef": iteration.kl_coef} | sources.counts()
        learner.clock.lap("record")
        yield {**metrics, **outcome.update, **speed(metrics["tokens"], learner.clock.seconds)}


def rollouts_file(config: Step3Config) -> Path:
    """The file to which this rank's share of the rollouts is exported."""
    return Path(config.output_dir) / STAGE.name / f"rollouts-{collectives.dp_rank()}.jsonl"


def evaluate(
    learner: Learner,
    evaluation: PromptDataset[Prompt],
    judge: rewards.Source | None,
    before: Evaluation | None = None,
) -> Evaluation:
    """Sampled responses to the held-out prompts, always from the same random stream, which no iteration has. before:
    the evaluation before training, unless this is it.

    A score source that draws random numbers draws them apart, too.
    """
    count = min(len(evaluation), learner.config.eval_samples)
    sampled = learner.sample(evaluation, collectives.rows_of_rank(count), HELD_OUT)
    with random_sources.apart(learner.config.seed):
        rollout = score(sampled, learner.actor, None, replace(learner.scorer, rescore=True))
        return gather_evaluation(rollout, judge, learner.scorer.tokenizer, learner.scores_by_source(rollout), before)


class HeldOut:
    """The policy on the held-out prompts: before training, and at its last evaluation."""

    def __init__(self, learner: Learner, prompts: PromptDataset[Prompt], judge: rewards.Source | None) -> None:
        """Raises: UserError if a score is not finite."""
        self._learner, self._prompts, self._judge = learner, prompts, judge
        self.before = self.after = evaluate(learner, prompts, judge)
        if (problem := nonfinite_scores(self.before)) is not None:
            raise UserError(problem)
        self._cost = Cost(learner)
        self._cost_before = self._cost_after = self._cost.measure()
        counts = getattr(judge, "counts", None)  # of a judge whose answers have a price
        self._best_of = measure(learner, prompts, judge if counts is None else None, self.before)

    def evaluate(self) -> None:
        """Evaluate the policy as it is now."""
        self.after = evaluate(self._learner, self._prompts, self._judge, self.before)
        self._cost_after = self._cost.measure()

    def evaluate_again(self, run: Run, iteration: int) -> Metrics:
        """The same, with the responses to samples.jsonl and the trackers."""
        self.evaluate()
        if (problem := nonfinite_scores(self.after)) is not None:  # no reason to end a long run
            console.say(f"warning, iteration {iteration}: {problem}")
        groups = self._prompts.subsets
        samples = write_samples(run.directory / "samples.jsonl", iteration, self.before, self.after, groups)
        run.recorder.table("samples", iteration, samples[: self._learner.config.sample_rows])
        return self.results()

    def results(self) -> Metrics:
        """The last evaluation against that before training."""
        cost = {f"{name}_before": value for name, value in self._cost_before.items()} | self._cost_after
        return compare(self.before, self.after) | worth(self._best_of, self.before, self.after) | cost

    def at_start(self) -> Metrics:
        """The numbers of the policy before training."""
        return at_start(self.before) | self._cost_before


def resumable(learner: Learner, copies: Mapping[str, WeightsCopy], observers: Mapping[str, Numbers]) -> Resumable:
    """What a checkpoint holds: the state of the models and of the observers of the run."""
    engines = {"actor": learner.actor, "critic": learner.critic}
    trained = {name: engine for name, engine in engines.items() if engine is not None}
    if learner.critic is learner.actor:
        del trained["critic"]
    ptx = {} if learner.ptx is None else {"ptx": learner.ptx.batches}
    return Resumable({**trained, **ptx, "models": learner, **observers}, {**trained, **copies})


def keep_best(weights: BestWeights, save: Callable[[], None]) -> None:
    """Keep the policy as it is now; `save` writes it at once, so that a run that does not finish leaves it."""
    weights.update()
    save()


def describe_left_out(prompts: int, config: Step3Config) -> None:
    """Say how many prompts a pass over them leaves out, if the run makes a whole pass."""
    size = config.batch_size // config.num_generations
    if prompts % size and iterations(config) >= prompts // size:
        console.say(
            f"{STAGE.name}: each pass over the {prompts} prompts skips {prompts % size}, different ones each "
            f"time, because an iteration takes {size}"
        )


def run(config: Step3Config) -> None:
    """The stage from its inputs to OUT/step3_ppo: actor, critic, metrics.jsonl, manifest.json; nothing if finished."""
    stage_status = report_status(STAGE, config, inputs(named_roles(config)), partial(content, config))
    if stage_status == "finished":
        return
    status(f"{STAGE.name}: reading the data")
    checked = check(config, ranks=collectives.world_size())
    collectives.set_ranks_per_replica(config.tensor_parallel_size)
    user_config, table, tokenizer = config, checked.roles, checked.tokenizer
    prompts, actor_path = checked.prompts.train, table[0].path
    config = choose_compiler(config, STAGE.name, actor_path, computed_tokens(config, prompts))
    with open_run(STAGE, user_config, stage_status, inputs(table)) as stage, ExitStack() as at_end:
        status(f"{STAGE.name}: loading the models")
        learner = set_up(config, table, tokenizer, checked.ptx)
        if learner.backend.close is not None:
            at_end.callback(learner.backend.close)
        if config.adapter is not None:
            console.say(f"{STAGE.name}: {adapters.describe_rates(config)}")
        for note in (*notes(config, table), learner.kl.note):
            if note is not None:
                console.say(f"{STAGE.name}: {note}")
        judge = None if config.judge is None else rewards.open_unchecked(config.judge, learner.context)
        stage.describe(checked.prompts, tokenizer)
        describe_left_out(len(prompts), config)
        stage.manifest["data"] |= ptx_content(config) | pairs_content(config)
        status(f"{STAGE.name}: responding to the held-out prompts, before training")
        held_out = HeldOut(learner, checked.prompts.evaluation, judge)
        adapter = saved_adapter(config, actor_path)
        save_actor = partial(save_policy, learner.actor, adapter, tokenizer)
        dtype = "fp32" if compute_dtype(config, learner.actor.device) == torch.float32 else "bf16"
        schedule, watch = Schedule(len(prompts), config), Watch(dtype, learner.kl.budget, learner.kl.closer)
        observers: dict[str, Numbers] = {"schedule": schedule, "watch": watch}
        best, copies = None, dict[str, WeightsCopy]({} if learner.ema is None else {"ema": learner.ema})
        if config.keep_best is not None:
            copies["best"] = weights = BestWeights(learner.actor)
            keep = partial(keep_best, weights, partial(stage.save, "best", save_actor))
            observers["best"] = best = Best(config.keep_best, config.patience, keep, admits=learner.kl.admits)
        random_sources.seed(config.seed, 0)  # ranks have different rows, so random scores differ
        stage.resume(resumable(learner, copies, observers))
        if stage.done:
            if best is not None and best.step:  # on the disk may be what steps wrote that are thrown away
                stage.save("best", partial(save_actor, weights=copies["best"]))
            held_out.evaluate()
        else:
            start = held_out.at_start()
            if checked.pairs is not None and learner.critic is not None:
                start |= pretrain(learner.critic, checked.pairs, config, tokenizer.pad_token_id)
            stage.record_evaluation(start)
        total = iterations(config)
        steps = stage.with_exports(observe(train(learner, prompts, schedule), learner), save_actor)
        evaluations = EvaluationSchedule(
            config.iterations_between_evaluations, total, stage.done, unchanged=config.critic_warmup_iterations
        )
        steps = with_evaluations(steps, evaluations, partial(held_out.evaluate_again, stage), best)
        stage.run_loop(steps, total, SHOWN, watch)
        show_samples(held_out.before, held_out.after, config.sample_rows)
        metrics = held_out.results()
        if best is not None and best.step:
            metrics["eval_best_step"] = float(best.step)
        else:  # no evaluation, or no policy within the budget of the KL
            copies.pop("best", None)
        exports: dict[str, Callable[[Path], None]] = {"actor": save_actor}
        if learner.critic is not None:
            exports["critic"] = partial(save_scalar, learner.critic, adapter, tokenizer)
        exports |= {folder: partial(save_actor, weights=copy) for folder, copy in copies.items()}
        stage.finish(exports, metrics, learner.state_dict())
        stage.recorder.verdict(stage.step, partial(stage_verdict, stage.directory, STAGE))


class Reinforcement:
    """Step 3 as the chain sees it (rlhf.chain.stages.Stage)."""

    named_roles, roles = staticmethod(named_roles), staticmethod(roles)
    content, workload, check = staticmethod(content), staticmethod(workload), staticmethod(check)


REINFORCEMENT = Reinforcement()
