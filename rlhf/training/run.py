"""The run of one stage: its directory, process group, metrics, checkpoints, and the manifest of its result.

with open_run(...) as run:
    run.describe(data, tokenizer)             # rows, and why others were dropped
    run.resume(state)                         # from the newest checkpoint, if there is one
    run.run_loop(steps, total, shown)         # records, warns, saves; ends the process after a signal
    run.finish({"model": save}, metrics)      # models and manifest: from here on the stage is finished
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from rlhf import console, errors
from rlhf.config import Tree, parser
from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import NonFiniteError, is_skipped
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.hub.untrusted import PlainErrors
from rlhf.launch.supervisor import LAUNCHER, NON_FINITE
from rlhf.report.card import FAILURES, write_card
from rlhf.report.records import read_stage
from rlhf.storage import disk, manifests
from rlhf.text.tokenizer import describe_template, digest_without_template
from rlhf.training import (
    checkpoints,
    hardware,
    logs,
    progress,
    random_sources,
    record,
    reporting,
    stage_process,
)
from rlhf.training.checkpoints import Resumable
from rlhf.training.progress import StageStatus
from rlhf.training.signals import CODES, Ending
from rlhf.types import Metrics

EXPORTS = "exports"
"""The folder of a stage with the models of `--export-every`."""


ROWS = ("micro_batch_size", "eval_batch_size", "rollout_batch_size")
"""options that bound the rows of one pass"""
SHOWN = 160
"""characters that are shown of another library's message"""


class Monitor(Protocol):
    """Checks the metrics of each step, and returns warnings: notices with a name, numbers and advice."""

    def check(self, step: int, metrics: Metrics, /) -> Iterable[Any]: ...


class Run:
    """What a stage needs beside its algorithm: directory, metrics, checkpoints, resuming, and the result."""

    def __init__(
        self, declaration: Declaration, options: RunOptions, status: StageStatus, inputs: Mapping[str, str]
    ) -> None:
        self._declaration, self.stage = declaration, declaration.name
        self._logs = (manifests.METRICS, *declaration.logs)
        # Overwriting happens once: it is not a property of the result.
        self.options = options.model_copy(update={"overwrite": False, "allow_config_change": False})
        self.directory = Path(options.output_dir) / self.stage
        self._inputs = inputs
        # What is loaded, not what is on the disk when a checkpoint is saved.
        self._input_records = {name: progress.input_record(path) for name, path in inputs.items()}
        self._user_files = progress.user_files(options, inputs) if collectives.is_main() else {}
        if status == "extended":
            checkpoints.newest(self.directory)  # a finished stage stays as it is if there is nothing to extend it from
        if collectives.is_main():
            disk.remove(self.directory / manifests.MANIFEST)
            for folder in declaration.models:
                disk.recover(self.directory / folder)
            checkpoints.sweep(self.directory, everything=status not in ("interrupted", "extended"))
            disk.write_text(self.directory / manifests.RUN_CONFIG, parser.to_yaml(self.options))
        collectives.barrier()
        self._checkpoint = checkpoints.newest(self.directory)
        self._state = Resumable({}, {}, self._logs)
        self.step = self.done
        self.peak_memory_gb = 0.0
        if self._checkpoint is not None:
            for change in progress.versions_changed(self._checkpoint.manifest):
                console.say(f"note: {self._checkpoint.folder} was written with another version: {change}")
        for option in options.idle():
            console.say(f"note: {self.stage}: no effect: {option}")
        reporter = None
        (self.directory / stage_process.traceback_file()).unlink(missing_ok=True)  # of an earlier process
        if collectives.is_main():
            recorded = reporting.rows_after(self.directory / manifests.METRICS, self.done)
            logs.cut(self.directory, self._logs, self._checkpoint.manifest["logs"] if self._checkpoint else {})
            reporter = reporting.Reporter(self.directory, self.options, self.done, recorded)
        collectives.barrier()
        self.recorder = record.Recorder(self.directory, self.done, reporter)
        self._ending, self.holding = Ending(), contextlib.ExitStack()  # holding: stores signals until `finish` is done
        self.manifest: Tree = {}  # what is known before the end

    @property
    def done(self) -> int:
        """Steps (of a stage with rollouts: iterations) done before this process began."""
        return 0 if self._checkpoint is None else self._checkpoint.step

    def describe(self, data: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Print the number of rows, of dropped rows and why, and notes on the data; write the full report to data.json.

        Raises: UserError if the ranks do not have the same rows.
        """
        self.manifest |= {
            "template": describe_template(tokenizer),
            "tokenizer": digest_without_template(tokenizer),
            "data": {s["data_path"]: s["fingerprint"] for s in data.report["sources"]}
            | data.report.get("read_too", {}),
        }
        if self._checkpoint is not None:
            progress.require_same_data(self._checkpoint.manifest, self.manifest["data"])
        summary = (sorted(self.manifest["data"].items()), len(data.train), len(data.evaluation))
        for rank, other_summary in enumerate(collectives.gather_objects(summary)):
            if other_summary != summary:
                raise UserError(
                    f"{self.stage}: rank {rank} has other data than rank {collectives.rank()}: {other_summary[1:]} "
                    f"rows against {summary[1:]}; a path must have the same content on every host, and return the "
                    "same rows every time"
                )
        if collectives.is_main():
            disk.write_json(self.directory / "data.json", data.report)
            unreadable = [message for source in data.report["sources"] for message in source["bad"]]
            report = self.directory / "bad_rows.txt"
            report.unlink(missing_ok=True)  # of an earlier run, whose data has been corrected since
            if unreadable:
                report.write_text("\n".join(unreadable) + "\n", encoding="utf-8")
        dropped = ", ".join(f"{count} {reason}" for reason, count in data.train.dropped.items())
        elements = data.train.batch_elements  # fewer than rows where pairs are of ranked lists
        console.say(
            f"{self.stage}: {len(data.train)} rows to train on"
            + (f" in {elements} batch elements" if elements != len(data.train) else "")
            + f", {len(data.evaluation)} held out"
            + (f"; dropped {dropped}" if dropped else "")
        )
        for note in progress.notes_on(data, self.directory):
            console.say(f"{self.stage}: {note}")

    def resume(self, state: Resumable) -> None:
        """Restore `state` from the newest checkpoint, if there is one; `run_loop` will save the same state."""
        self._state = Resumable(state.numbers, state.tensors, self._logs)
        self.manifest["random_generators"] = random_sources.digest()
        if self._checkpoint is not None:
            self._checkpoint.restore(self._state, self.options.seed)
            console.say(f"{self.stage}: resumes after step {self.done}, from {self._checkpoint.folder}")

    def with_exports(self, steps: Iterable[Metrics], save: Callable[[Path], None]) -> Iterator[Metrics]:
        """Yield `steps`; after each `export_every`th step `save` writes a model into EXPORTS. All ranks together.

        First remove exports of later steps, left by an earlier run or written after the checkpoint.
        """
        every = self.options.export_every
        if collectives.is_main():
            for folder in (self.directory / EXPORTS).glob("step-*"):
                number = folder.name.removeprefix("step-")
                if number.isdecimal() and int(number) > self.done:  # a user may have renamed others
                    shutil.rmtree(folder)
        collectives.barrier()
        for step, metrics in enumerate(steps, start=self.done + 1):
            if every is not None and step % every == 0:
                with self._staged(f"{EXPORTS}/step-{step:08d}") as staging:
                    save(staging)
                collectives.barrier()
            yield metrics

    def run_loop(
        self, steps: Iterable[Metrics], total: int, shown: Sequence[str], monitor: Monitor | None = None
    ) -> None:
        """Run the training loop `steps`, which begins after step `done`, under a progress bar.

        Print the warnings of `monitor`. Write checkpoints when they are due. When a signal asks any rank to end, write
        a checkpoint after the current step and end the process. After the last step `holding` stores signals until the
        stage has its result.
        shown: metrics on the progress bar
        Raises: NonFiniteError if every step was skipped.
        """
        last_save, saved_step = time.monotonic(), self.done
        every = self.options.save_every
        loop = self.recorder.follow(self._with_rank_numbers(steps), total, self.stage, shown)
        end_signal, learned = None, self.done > 0
        ending = self.holding.enter_context(self._ending)
        with contextlib.closing(loop):  # a closed bar frees its line
            for step, metrics in enumerate(loop, start=self.done + 1):
                self.step = step
                learned |= not is_skipped(metrics)
                for notice in monitor.check(step, metrics) if monitor is not None else ():
                    self.recorder.warn(step, notice.name, notice.numbers, notice.advice)
                overdue = collectives.is_main() and time.monotonic() - last_save > 60 * self.options.save_minutes
                last = step == total and self.options.keep_last_checkpoint
                end_signal, due = ending.across_ranks(overdue or last or (every is not None and step % every == 0))
                if end_signal or due:
                    self._save_checkpoint()
                    last_save, saved_step = time.monotonic(), step
                if end_signal:
                    break
            if self.options.keep_last_checkpoint and saved_step < self.step:  # ended early, before `total`
                self._save_checkpoint()
        if end_signal:
            newest = checkpoints.describe_newest(self.directory)
            self._leave(end_signal, f"after step {self.step}; {newest}; the same command resumes")
        if not learned and self.step:
            raise NonFiniteError(f"all {self.step} steps were skipped (see the warnings), so nothing was learned")

    def _save_checkpoint(self) -> None:
        """Of the present step."""
        failure = checkpoints.save(self.directory, self.step, self._state, self._provenance(), self.options.keep)
        if failure is not None:
            last = checkpoints.describe_newest(self.directory)
            console.say(f"warning, step {self.step}: no checkpoint, {failure}; {last}")

    def record_evaluation(self, metrics: Metrics) -> None:
        """Record the metrics of an evaluation after the steps so far; before the first step it is step 0."""
        self.recorder.write("eval", self.step, metrics)

    def _with_rank_numbers(self, steps: Iterable[Metrics]) -> Iterator[Metrics]:
        """Add to each step's metrics the peak memory of a rank so far, and with several ranks the forward seconds of
        the slowest and the fastest one: all ranks wait for the slowest.
        """
        engines = [resumable for resumable in self._state.tensors.values() if isinstance(resumable, Engine)]
        for metrics in steps:
            own_seconds = sum(engine.forward_s for engine in engines)
            for engine in engines:
                engine.forward_s = 0.0
            slowest, fastest, peak = collectives.max_over_ranks([own_seconds, -own_seconds, _peak_bytes()])
            self.peak_memory_gb = peak / 1e9
            several = {"forward_seconds_slowest": slowest, "forward_seconds_fastest": -fastest}
            times = several if collectives.world_size() > 1 else {}
            yield {**metrics, **times, "peak_memory_gb": self.peak_memory_gb}

    def leave_after_signal(self) -> None:
        """End the process of a finished stage if a signal came after its last step: the next stage must not begin."""
        end_signal, _ = self._ending.across_ranks(due=False)
        if end_signal:
            self._leave(end_signal, "after the last step; the stage is finished")

    def _leave(self, end_signal: signal.Signals, state: str) -> NoReturn:
        self.recorder.close()
        # A launcher sends SIGTERM whatever it has received, and names that itself.
        cause = "stopped" if LAUNCHER in os.environ else end_signal.name
        stage_process.give_up(f"{self.stage}: {cause} {state}", CODES[end_signal])

    def save(self, folder: str, save: Callable[[Path], None]) -> None:
        """Write a model into its folder, and replace the old one; the folder appears complete or not at all."""
        with self._staged(folder) as staging:
            save(staging)
        collectives.barrier()

    def finish(
        self,
        models: Mapping[str, Callable[[Path], None]],
        metrics: Metrics,
        state: Mapping[str, object] | None = None,
    ) -> None:
        """Write each model into its folder, then the manifest; then remove the checkpoints, except the last one with
        `keep_last_checkpoint`.

        state: what was learned beside the weights, written to state.json
        Raises: UserError if a file cannot be written, for example because the disk is full; the stage is unfinished.
        """
        for folder, save in models.items():
            self.save(folder, save)
        if collectives.is_main():
            with _disk_errors(self.directory):
                if state is not None:
                    disk.write_json(self.directory / "state.json", state)
                for folder in {*self._declaration.models} - {*models}:  # of a run with other options
                    shutil.rmtree(self.directory / folder, ignore_errors=True)
                logs.sync(self.directory, self._logs)
                self._write_manifest([*models], metrics)
                checkpoints.sweep(self.directory, everything=True, keep=int(self.options.keep_last_checkpoint))
        collectives.barrier()
        console.say(f"{self.stage}: {console.metrics_line(self._declaration.report.first(metrics))}")
        console.say(f"{self.stage}: wrote {', '.join(str(self.directory / folder) for folder in models)}")

    def _write_manifest(self, models: list[str], metrics: Metrics) -> None:
        manifest = self._provenance() | {
            "models": models,
            "metrics": disk.json_value(dict(metrics)),
            "metrics_version": manifests.METRICS_VERSION,
            "world_size": collectives.world_size(),
            "files": manifests.file_digests(self.directory, models),
        }
        manifests.write_manifest(self.directory / manifests.MANIFEST, manifest)

    def _provenance(self) -> Tree:
        """The provenance of the result and of each checkpoint: inputs, options, library versions, hardware."""
        return self.manifest | {
            "stage": self.stage,
            "inputs": self._input_records,
            "user_files": self._user_files,
            "config": self.options.model_dump(mode="json"),
            "versions": manifests.versions(),
            "hardware": hardware.describe(self.options),
        }

    @contextlib.contextmanager
    def _staged(self, folder: str) -> Iterator[Path]:
        """The same staging directory on every rank; rank 0 creates and renames it. Raises: UserError, disk full."""
        final = self.directory / folder
        with _disk_errors(final):
            if collectives.is_main():
                with disk.atomic_directory(final) as staging:
                    yield staging
                    self._write_card(staging, folder)
            else:
                yield final.with_name(f".tmp-{final.name}")

    def _write_card(self, model: Path, folder: str) -> None:
        """Write the model card. A model without one is better than none, so only a failing disk is an error."""
        changed, free = parser.changed(self.options, type(self.options)()), self.options.declared("FREE")
        of_results = {name: value for name, value in changed.items() if name not in free}
        try:
            stage = read_stage(self.directory, self._declaration)
            write_card(model, stage, folder, self._inputs, of_results)
        except FAILURES as error:
            console.say(f"warning: {self.directory / folder}: no model card ({type(error).__name__}: {error})")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Errors of a disk that is full, whichever library reports them, become a UserError that names the path."""
    try:
        with PlainErrors():
            yield
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ValueError) and "os error" not in str(error):  # tokenizers knows no OSError
            raise
        raise UserError(f"{path}: cannot be written ({error}); free space there and run again") from None


def _peak_bytes() -> float:
    """Peak memory of this process: on a GPU what torch has allocated there, otherwise all of the process."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def out_of_memory(error: BaseException, options: RunOptions) -> str:
    """One line for the user: the library's message, and the options of the stage that take less memory."""
    library = (str(error).splitlines() or [type(error).__name__])[0][:SHOWN]
    lower = [name for name in ROWS if name in type(options).model_fields]
    rows = ", ".join(f"--{name.replace('_', '-')}" for name in lower)
    return (
        f"out of memory ({library}); lower {rows} or the length of a row, or try --gradient-checkpointing, "
        "--offload-optimizer or, with several processes, --zero-stage 3"
    )


@contextlib.contextmanager
def open_run(
    declaration: Declaration, options: RunOptions, status: StageStatus, inputs: Mapping[str, str]
) -> Iterator[Run]:
    """The run of one stage in its process group, with seeded random generators and a locked directory.

    status: of the stage; inputs: paths of the models it starts from, by option
    Too many non-finite steps in a row end the process with code 3 and one line. A lack of memory ends it with code 1,
    and one line names options that need less.
    Raises: UserError if another process runs the stage there.
    """
    stage, replace = declaration.name, options.overwrite or status == "extended"
    directory = Path(options.output_dir) / stage
    with collectives.process_group(options.timeout_s), progress.locked_directory(directory, replace):
        random_sources.begin(options)
        hardware.say_accelerator()
        run = Run(declaration, options, status, inputs)
        try:
            yield run
            run.leave_after_signal()
        except NonFiniteError as error:
            run.recorder.close()  # a rank of several ends at once in give_up
            stage_process.give_up(f"error: {stage}: {error}", NON_FINITE)
        except (RuntimeError, MemoryError) as error:
            if not errors.is_out_of_memory(error):
                raise
            run.recorder.close()
            stage_process.give_up(f"error: {stage}: rank {collectives.rank()}: {out_of_memory(error, options)}", 1)
        finally:
            run.holding.close()
            run.recorder.close()
