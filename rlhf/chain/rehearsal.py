"""`--rehearse`: the typed command in small before the run, so that what fails late fails within minutes.

Two optimizer steps (in step 3 iterations) a stage, on the devices, with the data, rewards and plug-ins of the run. The
models have the run's architecture, tokenizer and width, but two layers with random weights. Everything is written that
the run will write: checkpoints, exports, models, cards, the report, the runs of trackers. Then each stage is resumed.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import transformers

from rlhf import console, plugins
from rlhf.chain import report
from rlhf.chain.options import StageOptions
from rlhf.chain.recount import load_plainly
from rlhf.chain.stages import STAGES, load
from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import is_adapter
from rlhf.launch.supervisor import ExitStatus
from rlhf.models.load import load_config
from rlhf.plan.activations import with_layers
from rlhf.report.records import read_stage
from rlhf.storage.manifests import CARD, planned_start, read_manifest, resolve_model_path
from rlhf.text.tokenizer import load_tokenizer
from rlhf.training.record import LEFT_OUT

RunAll = Callable[[dict[int, StageOptions]], tuple[int, ExitStatus] | None]
FOLDER = ".rehearsal"
"""in the output directory, removed at the end; also the project of its runs in trackers"""
LAYERS, STEPS = 2, 2
EVAL_ROWS = 17
"""no multiple of a batch of a user's reward: the run's number may be none"""


def rehearse(todo: Mapping[int, StageOptions], ranks: int, run_all: RunAll) -> None:
    """Run the stages in small, and remove what they have written.

    todo: checked options by step; ranks: processes of a stage; run_all: runs stages, and returns the step that failed
    and its exit status, or None
    Raises: SystemExit with that status.
    """
    if all(map(_short, todo.values())):
        console.say("rehearsal: left out, because the run itself is no longer")
        return
    output = Path(next(iter(todo.values())).output_dir)
    folder, start = output / FOLDER, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of a rehearsal that was killed
    folder.mkdir(parents=True)
    one = time.time() - psutil.Process().create_time()  # imports and checks, which a stage has at each start
    processes = 2 * len(todo)
    console.say(
        f"rehearsal: {STEPS} steps of each stage, then more from its checkpoint, with models of {LAYERS} layers; "
        f"{processes} starts of a stage take at least {console.duration(processes * one)}, and the steps come on top"
    )
    try:
        small = in_small(todo, folder, ranks)
        # The last stage is resumed first: it has started from the models of the earlier ones as they are.
        for stages in (small, {step: _longer(step, small[step]) for step in reversed(small)}):
            began = time.monotonic()
            _run(stages, run_all)
            if stages is small:
                took = console.duration(time.monotonic() - began)
                console.say(f"rehearsal: the first half took {took}; each stage goes on from its checkpoint now")
            for step in stages:
                _require_whole(step, folder / STAGES[step].name)
        report.write(report.ReportConfig(runs=(str(folder),)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.say(f"rehearsal: passed in {time.monotonic() - start:.0f} s; now the run")


def _run(small: dict[int, StageOptions], run_all: RunAll) -> None:
    """Raises: SystemExit with the status of the stage that failed."""
    with console.silent():
        failed = run_all(small)
    if failed is not None:
        step, status = failed
        console.say(f"rehearsal: {STAGES[step].name} failed ({status.cause}); nothing of the run has started")
        raise SystemExit(int(status) if status > 0 else 128 - status)


def _short(options: Any) -> bool:
    """Whether a stage is known to have no more steps than its rehearsal and what follows it."""
    if hasattr(options, "total_episodes"):
        return bool(options.total_episodes <= 2 * STEPS * options.batch_size)
    rows = options.max_train_rows
    return rows is not None and bool(rows * options.num_train_epochs <= 2 * STEPS * options.batch_size)


def _require_whole(step: int, directory: Path) -> None:
    """Raises: UserError for what a stage has lost without being ended by it: a tracker, a model card, a number of the
    result; or for a policy that cannot be loaded."""
    manifest, results = read_manifest(directory), STAGES[step].report.results
    warnings = read_stage(directory, STAGES[step]).of_kind("warning")
    lost = [row["advice"] for row in warnings if row["name"] == LEFT_OUT]
    lost += [
        f"{model} has no model card" for model in manifest["models"] if not (directory / model / CARD[0]).is_file()
    ]
    lost += [f"{x.metric} is no finite number" for x in results if manifest["metrics"].get(x.metric, 0.0) is None]
    if lost:
        raise UserError(f"rehearsal: {directory.name}: {'; '.join(lost)}; nothing of the run has started")
    for name in STAGES[step].policies:
        if name in manifest["models"]:
            load_plainly(transformers.AutoModelForCausalLM, str(directory / name))


def in_small(todo: Mapping[int, StageOptions], folder: Path, ranks: int) -> dict[int, StageOptions]:
    """The options of each stage for a rehearsal in `folder`."""
    inputs = {step: _inputs(step, options, todo, folder) for step, options in todo.items()}
    paths = list(dict.fromkeys(path for existing, _ in inputs.values() for path in existing.values()))
    whole = any(is_adapter(Path(resolve(path))) for path in paths)
    if whole:
        console.say("rehearsal: with whole models, because one is an adapter on another")
    small = {path: path if whole else write_shallow(path, folder / f"model-{i}") for i, path in enumerate(paths)}
    changes: dict[int, Tree] = {
        step: _changes(step, todo[step], ranks) | {name: small[path] for name, path in existing.items()} | planned
        for step, (existing, planned) in inputs.items()
    }
    return {
        step: options.model_copy(update=changes[step] | {"output_dir": str(folder)}) for step, options in todo.items()
    }


def _inputs(
    step: int, options: StageOptions, todo: Mapping[int, StageOptions], folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """The models that a stage starts from, by option: those that exist, and those that an option names and a stage of
    `todo` makes, in `folder`. Without an option the stage finds the latter as in the run, and a critic where it starts
    from another role's model."""
    output, makers = Path(options.output_dir).resolve(), {STAGES[maker].name: "" for maker in todo}
    existing, planned = {}, {}
    for role in load(step).named_roles(options):
        if not role.inputs:
            continue
        part = role.start or role.part
        if planned_start(role.path, options.output_dir, makers) is None:
            existing[part.option] = resolve_model_path(role.path, *part.folders)
        elif getattr(options, part.option) is not None:
            planned[part.option] = str(folder / Path(role.path).resolve().relative_to(output))
    return existing, planned


def _changes(step: int, options: Any, ranks: int) -> Tree:
    """Options for two steps, with an evaluation, a checkpoint and an export after each."""
    changes: Tree = {
        "report_to": tuple(map(_in_project, options.report_to)),
        "save_every": 1,
        "keep_last_checkpoint": True,
        "export_every": options.export_every and 1,
        "max_eval_rows": min(options.max_eval_rows, max(EVAL_ROWS, ranks)),
        "overwrite": False,
    }
    if step < 3:
        rows = max(STEPS, STEPS * options.batch_size - 1)  # the last batch of an epoch is smaller
        return changes | {"max_train_rows": rows, "num_train_epochs": 1, "eval_every": "1"}
    return changes | {
        "max_train_rows": options.batch_size,
        "total_episodes": STEPS * options.batch_size,
        "critic_warmup_iterations": min(options.critic_warmup_iterations, STEPS - 1),
        "critic_pretraining_epochs": min(options.critic_pretraining_epochs, 1),
        "eval_every": 1,
        "eval_samples": min(options.eval_samples, max(EVAL_ROWS, ranks)),
    }


def _longer(step: int, options: Any) -> Any:
    """The options with which a finished stage goes on."""
    if step < 3:
        return options.model_copy(update={"num_train_epochs": options.num_train_epochs + 1})
    return options.model_copy(update={"total_episodes": options.total_episodes + options.batch_size})


def _in_project(tracker: str) -> str:
    """The tracker with the project FOLDER, if it names another."""
    name, values = plugins.parse_spec(tracker)
    return plugins.spec(name, **values | {"project": FOLDER}) if "project" in values else tracker


def write_shallow(path: str, folder: Path) -> str:
    """Write a model with the tokenizer and the config of the model at `path`, but few layers and random weights."""
    config = with_layers(load_config(path), LAYERS)
    names = config.architectures or ["AutoModelForCausalLM"]
    model_class: Any = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    build(config, dtype=config.dtype).save_pretrained(folder)
    load_tokenizer(resolve(path)).save_pretrained(folder)
    return str(folder)
