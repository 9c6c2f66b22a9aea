"""The runner of the stages that learn from a data set.

A stage has its own data, model, loss and evaluation. Checks, batches, checkpoints, exports and the manifest are the
same for all stages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from data.batches import Batches
from data.dataset import PhaseData, PromptDataset, Recipe, fingerprints, open_datasets, require_rows
from rlhf import adapters, console
from rlhf.config.declaration import Declaration
from rlhf.console import status
from rlhf.distributed import collectives
from rlhf.engine.ema import BestWeights
from rlhf.engine.training import Engine
from rlhf.hub.short_names import resolve
from rlhf.models.splitting import check_split, replicas
from rlhf.plan.activations import PassShape
from rlhf.plan.compile_choice import choose_compiler
from rlhf.plan.forecast import Workload, dtype_on
from rlhf.report.verdict import stage_verdict
from rlhf.roles import (
    NO_PLANNED,
    FindTokenizer,
    LoadTokenizer,
    Part,
    Planned,
    Role,
    inputs,
    load_once,
    locate,
    tokenizer_of,
    with_options,
)
from rlhf.supervised.options import SupervisedOptions, steps_between
from rlhf.supervised.speed import Speed
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.training import progress, random_sources
from rlhf.training.checkpoints import Resumable, require_room
from rlhf.training.checks import check_engine, check_ranks, check_start, check_steps, check_trunk
from rlhf.training.evaluations import Best, EvaluationSchedule, with_evaluations
from rlhf.training.run import open_run
from rlhf.training.trackers import check_trackers
from rlhf.types import Metrics

C = TypeVar("C", bound=SupervisedOptions)
FOLDERS = ("model", "actor")
"""Folders of an earlier stage that may hold the model to start from."""


class ModelInTraining(Protocol):
    """A stage's model in its engine, with its data."""

    role: str
    """the name of the model in checkpoints"""
    shown: tuple[str, ...]
    """metrics on the progress bar"""
    rising: tuple[str, ...]
    """metrics on the held-out rows that are better when they are higher"""
    engine: Engine
    before: Metrics
    """metrics on the held-out rows before the first step; empty if the stage does not measure them"""

    def train(self, batches: Batches) -> Iterator[Metrics]:
        """Make one optimizer step on each batch, and yield its metrics."""

    def evaluate(self) -> Metrics:
        """Metrics on the held-out rows."""

    def require_converged(self, metrics: Metrics) -> None:
        """Raises: NonFiniteError if the last evaluation shows that the run has diverged."""

    def save(self, folder: Path, metrics: Metrics | None = None) -> None:
        """Write the model. metrics: of the last evaluation, if this is the final model."""


@dataclass(frozen=True, slots=True)
class Supervised(Generic[C]):
    """A stage (rlhf.chain.stages.Stage) that learns from a data set."""

    declaration: Declaration
    part: Part
    """what the stage has its model for"""
    shape: Callable[[C], PassShape]
    """of a micro-batch, whose rows have one or two texts"""
    recipe: Callable[[C], Recipe]
    """which rows to read, and which of their tokens to learn"""
    load: Callable[[C, str, PreTrainedTokenizerBase, PhaseData[Any], int], ModelInTraining]
    """(options, path of the model, tokenizer, data, number of optimizer steps)"""
    note: str = ""
    """a limit of the plan, for the user"""
    tokenizer: Callable[[C, PreTrainedTokenizerBase], PreTrainedTokenizerBase] = lambda _, tokenizer: tokenizer
    """(options, tokenizer of the model that the stage starts from): that of its result, before it gets a template"""
    added_ids: Callable[[C, str], tuple[int, int] | None] = lambda *_: None
    """(options, path of the model): `Role.ids`"""
    files: Callable[[C], dict[str, str]] = lambda _: {}
    """digests of files that the options name, beside the data"""
    check_options: Callable[[C], object] = lambda _: None
    """raises a UserError for options of this stage alone that are wrong"""

    def named_roles(self, config: C) -> tuple[Role]:
        """The model that is trained."""
        return (Role(self.part, config.model, config, config.adapter, inputs={self.part.option: config.model}),)

    def roles(self, config: C, planned: Planned = NO_PLANNED, _: FindTokenizer | None = None) -> tuple[Role]:
        """The same, found. planned: stages that run before this one. Raises: UserError."""
        (named,) = self.named_roles(config)
        role = locate(named, config.output_dir, planned)
        return (replace(role, ids=self.added_ids(config, role.path) or role.ids),)

    def workload(self, table: Sequence[Role], config: C, device: str) -> Workload:
        """The work for a plan. device: cpu or cuda"""
        shape = self.shape(config)
        row_tokens = shape.rows // config.micro_batch_size * shape.tokens
        return Workload(
            stage=self.declaration.name,
            models=with_options(table, config),
            dtype=dtype_on(config, device),
            batch=config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // row_tokens),
            micro_batch=config.micro_batch_size,
            shape=shape,
            keep=config.keep,
            averages=int(config.keep_best is not None),
            eval_rows=config.eval_rows,
            note=self.note,
        )

    def content(self, config: C) -> dict[str, str]:
        """A digest of each local file or folder of the data, and of other files of the user."""
        return fingerprints(config, self.recipe(config).phase) | self.files(config)

    def open_data(
        self, config: C, model_path: str, load: LoadTokenizer = tokenizer_of
    ) -> tuple[PreTrainedTokenizerBase, PhaseData[Any]]:
        """The prepared tokenizer of the model at `model_path`, and the data in its ids."""
        whole = self.tokenizer(config, load(model_path))
        tokenizer = prepare_tokenizer(whole, config.chat_template, config.chat_template_kwargs)
        return tokenizer, open_datasets(config, self.recipe(config), tokenizer)

    def check(
        self, config: C, planned: Planned = NO_PLANNED, ranks: int = 1, load: LoadTokenizer | None = None
    ) -> tuple[Role, PreTrainedTokenizerBase, PhaseData[Any]]:
        """Check the options, the model and the data before a model is loaded or anything is written.

        planned: stages that run before this one, and the role that each trains
        Returns: the model that is trained, and what `open_data` returns.
        Raises: UserError.
        """
        self.check_options(config)
        check_trackers(config.report_to)
        check_engine(config, ranks)
        if not self.declaration.policies:
            adapters.require_merging(config.adapter, "a reward model")
        ranks = replicas(config, ranks)
        if config.batch_tokens is None:
            check_ranks(config.batch_size, ranks)
            check_steps(config, config.batch_size, f"--batch-size {config.batch_size}", config.micro_batch_size, ranks)
        load = load or load_once()
        (role,) = self.roles(config, planned)
        check_trunk(config, resolve(role.path))
        tokens = config.max_length + adapters.virtual_tokens(config.adapter)
        check_start(role.path, config.chat_template, tokens, config.convert_template, load)
        check_split(config, role.path)
        directory = Path(config.output_dir) / self.declaration.name
        require_room(directory, self.workload((role,), config, "cpu").checkpoints)
        tokenizer, data = self.open_data(config, role.path, load)
        require_rows(data, config, config.batch_size if config.batch_tokens is None else ranks, ranks)
        batches_for(data.train, config, (0, ranks))
        return role, tokenizer, data

    def run(self, config: C) -> None:
        """Run the stage: write model, metrics.jsonl and manifest.json to OUT/NAME. Do nothing if it is finished."""
        name = self.declaration.name
        named = inputs(self.named_roles(config))
        stage_status = progress.report_status(self.declaration, config, named, partial(self.content, config))
        if stage_status == "finished":
            return
        status(f"{name}: reading the data")
        role, tokenizer, data = self.check(config, ranks=collectives.world_size())
        collectives.set_ranks_per_replica(config.tensor_parallel_size * config.sequence_parallel_size)
        batches = batches_for(data.train, config, (collectives.dp_rank(), collectives.dp_size()))
        total = batches.steps(config.num_train_epochs)
        tokens = float(data.train.row_lengths.sum()) * total / batches.steps(1)
        with open_run(self.declaration, config, stage_status, inputs([role])) as run:
            run.describe(data, tokenizer)
            status(f"{name}: loading the model")
            compiled = choose_compiler(config, name, role.path, tokens)
            learner = self.load(compiled, role.path, tokenizer, data, total)
            if config.adapter is not None:
                console.say(f"{name}: {adapters.describe_rates(config)}")
            if config.dropout:  # ranks have different rows, so they drop different activations
                random_sources.seed(config.seed, 0)
            best_model = None if config.keep_best is None else BestModel(config, learner)
            engine = {learner.role: learner.engine}
            state = Resumable({**engine, "batches": batches}, engine)
            run.resume(state if best_model is None else best_model.add_to(state))
            if learner.before and not run.done:
                run.record_evaluation(learner.before)
            speed = Speed()
            every = steps_between(config.eval_every, batches.steps(1))
            steps = with_evaluations(
                run.with_exports(speed.observe(learner.train(batches)), learner.save),
                EvaluationSchedule(every, total, run.done, at_end=best_model is not None),
                partial(self._evaluate, learner, batches.steps(1)),
                None if best_model is None else best_model.best,
            )
            run.run_loop(steps, total, learner.shown)
            metrics = {f"{metric}_before": value for metric, value in learner.before.items()}
            metrics |= learner.evaluate() if best_model is None else best_model.restore()
            run.record_evaluation(metrics)
            learner.require_converged(metrics)
            if speed.summary():
                numbers = {**speed.summary(), "peak_memory_gb": run.peak_memory_gb}
                console.say(f"{name}: {console.metrics_line(numbers)}")
            run.finish({"model": partial(learner.save, metrics=metrics)}, metrics)
            run.recorder.verdict(run.step, partial(stage_verdict, run.directory, self.declaration))

    def _evaluate(self, learner: ModelInTraining, steps_per_epoch: int, step: int) -> Metrics:
        """The metrics on the held-out rows after `step` steps; prints those that are results of the stage."""
        metrics = learner.evaluate()
        shown = {
            each.metric: metrics[each.metric] for each in self.declaration.report.results if each.metric in metrics
        }
        console.say(f"{self.declaration.name}: epoch {step / steps_per_epoch:.3g}: {console.metrics_line(shown)}")
        return metrics


class BestModel:
    """The weights of the best evaluation of a learner, which are exported in place of the last ones."""

    def __init__(self, config: SupervisedOptions, learner: ModelInTraining) -> None:
        assert config.keep_best is not None
        self._learner, self._weights = learner, BestWeights(learner.engine)
        lower = config.keep_best not in learner.rising
        self.best = Best(config.keep_best, config.patience, self._weights.update, lower)

    def add_to(self, state: Resumable) -> Resumable:
        """`state` with the best value and its weights."""
        return Resumable({**state.numbers, "best": self.best}, {**state.tensors, "best": self._weights})

    def restore(self) -> Metrics:
        """Set the learner's weights to the best ones. Returns their metrics, and the step of which they are."""
        if self.best.step:  # else no evaluation was a number, or none was made: the last weights stay
            self._weights.restore()
        return {**self._learner.evaluate(), "eval_best_step": float(self.best.step)}


def batches_for(dataset: PromptDataset[Any], config: SupervisedOptions, ranks: tuple[int, int]) -> Batches:
    """The batches of this rank, with every item in each epoch. ranks: (number of this rank, number of ranks)"""
    lengths = dataset.row_lengths
    rows = lengths if config.group_by_length or config.batch_tokens else len(lengths)
    return Batches(rows, config.batch_size, config.seed, ranks, config.batch_tokens, dataset.elements, drop_last=False)
