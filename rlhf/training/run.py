"""One stage's run: its directory, its process group, its record, and the manifest that says it is finished."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from rlhf import console, errors
from rlhf.config import parser
from rlhf.config.declaration import Declaration
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.engine.nonfinite import NonFiniteError, save_batch
from rlhf.engine.training import Engine
from rlhf.errors import UserError
from rlhf.hub.untrusted import PlainErrors
from rlhf.launch.supervisor import NON_FINITE
from rlhf.storage import disk, manifests
from rlhf.text.tokenizer import describe_template
from rlhf.training import (
    checkpoints,
    logs,
    out_of_memory,
    progress,
    record,
    reporting,
    saving,
    spikes,
    stage_process,
)
from rlhf.training.checkpoints import Resumable
from rlhf.training.progress import Standing
from rlhf.training.signals import CODES, Ending
from rlhf.types import Metrics

EXPORTS = "exports"
"""The folder of a stage with the models of `--export-every`."""
BAD_BATCH = "bad_batch"
"""The folder of a stage in which the batch lies that ended the run."""


class Watching(Protocol):
    """Looks at the metrics of each step, and says what has set in: notices with a name, numbers and advice."""

    def look(self, step: int, metrics: Metrics, /) -> Iterable[Any]: ...


class Run:
    """What a stage needs besides its method: a place to write, a recorder, checkpoints to go on from, and the end."""

    def __init__(
        self, declaration: Declaration, options: RunOptions, found: Standing, inputs: Mapping[str, str]
    ) -> None:
        self._declaration, self.stage = declaration, declaration.name
        self._logs = (manifests.METRICS, *declaration.logs)
        # Overwriting is for once, and no property of the result.
        self.options = options.model_copy(update={"overwrite": False, "allow_config_change": False})
        self.directory = Path(options.output_dir) / self.stage
        self._inputs = inputs
        if collectives.is_main():
            disk.remove(self.directory / manifests.MANIFEST)
            for folder in declaration.models:
                disk.recover(self.directory / folder)
            shutil.rmtree(self.directory / BAD_BATCH, ignore_errors=True)
            checkpoints.sweep(self.directory, everything=found not in ("interrupted", "extended"))
            disk.write_text(self.directory / manifests.RUN_CONFIG, parser.to_yaml(self.options))
        collectives.barrier()
        self._found = checkpoints.newest(self.directory)
        self._state = checkpoints.Resumable({}, {})
        self._spikes = spikes.Spikes(declaration.losses)
        self.step = self.done
        self.models: list[str] = []
        if self._found is not None:
            self.models = list(self._found.manifest["models"])
            for change in progress.versions_changed(self._found.manifest):
                console.say(f"note: {self._found.folder} was written with another version: {change}")
        reporter = None
        if collectives.is_main():
            recorded = reporting.rows_after(self.directory / manifests.METRICS, self.done)
            logs.cut(self.directory, self._logs, self._found.manifest["logs"] if self._found else {})
            reporter = reporting.Reporter(self.directory, self.options, self.done, recorded)
        collectives.barrier()
        self.saver = saving.Saver(self.directory, options, self._logs)
        self.recorder = record.Recorder(self.directory, self.done, reporter)
        self.manifest: dict[str, Any] = {}  # what is known before the end
        self.tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def done(self) -> int:
        """Steps (of a stage with rollouts: iterations) done before this process began."""
        return 0 if self._found is None else self._found.step

    def describe(self, data: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Say how many rows there are, which were dropped and why, what was cut, and what other stages have; the whole
        account goes to data.json.

        Raises: UserError if the ranks do not have the same rows.
        """
        self.tokenizer = tokenizer
        self.manifest |= {
            "template": describe_template(tokenizer),
            "data": {source["data_path"]: source["fingerprint"] for source in data.report["sources"]},
        }
        said = (sorted(self.manifest["data"].items()), len(data.train), len(data.evaluation))
        for rank, other in enumerate(collectives.gather_objects(said)):
            if other != said:
                raise UserError(
                    f"{self.stage}: rank {rank} found other data than rank {collectives.rank()}: {other[1:]} rows "
                    f"against {said[1:]}; a place must hold the same on every host, and give the same rows every time"
                )
        if collectives.is_main():
            disk.write_json(self.directory / "data.json", data.report)
            bad = [message for source in data.report["sources"] for message in source["bad"]]
            report = self.directory / "bad_rows.txt"
            report.unlink(missing_ok=True)  # an earlier run's, of data that was mended since
            if bad:
                report.write_text("\n".join(bad) + "\n", encoding="utf-8")
        dropped = ", ".join(f"{count} {reason}" for reason, count in data.train.dropped.items())
        elements = data.train.batch_elements  # fewer than rows where pairs are of ranked lists
        console.say(
            f"{self.stage}: {len(data.train)} rows to train on"
            + (f" in {elements} batch elements" if elements != len(data.train) else "")
            + f", {len(data.evaluation)} held out"
            + (f"; dropped {dropped}" if dropped else "")
        )
        for note in data.notes:
            console.say(f"{self.stage}: {note}")

    def go_on(self, state: Resumable) -> None:
        """Set everything to what it was at the newest checkpoint, if there is one; `follow` will save the same things.

        Raises: UserError if there is no room for checkpoints.
        """
        self._state = Resumable({**state.numbers, "spikes": self._spikes}, state.tensors)
        checkpoints.require_room(self.directory, (self.options.keep + 1) * self._state.size())
        self._warn_of_rates()
        if self._found is not None:
            self._found.restore(self._state, self.options.seed)
            console.say(f"{self.stage}: goes on after step {self.done}, from {self._found.folder}")

    def _warn_of_rates(self) -> None:
        for name, value in self.options:
            if name.endswith("learning_rate") and value == 0:
                console.say(f"warning: --{name.replace('_', '-')} 0: what it is for does not change")

    def exporting(self, steps: Iterable[Metrics], save: Callable[[Path], None]) -> Iterator[Metrics]:
        """Pass `steps` on; after each `export_every`th of them `save` writes a model into EXPORTS. All ranks together.

        Exports of steps that are not done, of an earlier run or after the checkpoint, are removed first.
        """
        every = self.options.export_every
        if collectives.is_main():
            for folder in (self.directory / EXPORTS).glob("step-*"):
                if int(folder.name[5:]) > self.done:
                    shutil.rmtree(folder)
        collectives.barrier()
        for step, metrics in enumerate(steps, start=self.done + 1):
            if every is not None and step % every == 0:
                with self._appearing(f"{EXPORTS}/step-{step:08d}") as staging:
                    save(staging)
                collectives.barrier()
            yield metrics

    def follow(self, steps: Iterable[Metrics], total: int, shown: Sequence[str], watch: Watching | None = None) -> None:
        """Run the training loop `steps`, those after `done`, to its end under the bar; warn of what `watch` sees, and
        where a loss spikes.

        Checkpoints are written when they are due. When the process, or any other rank's, is asked to end, one is
        written after the present step, and it ends.
        """
        saved = time.monotonic()
        every = self.options.save_every
        watched = self.recorder.follow(self._with_spread(steps), total, self.stage, shown)
        asked = None
        with Ending() as ending, contextlib.closing(watched):  # closed, the bar leaves its line to what is said next
            for step, metrics in enumerate(watched, start=self.done + 1):
                self.step = step
                found = self._spikes.look(metrics)
                if found is not None:
                    self.recorder.warn(step, spikes.NAME, found, spikes.ADVICE)
                for notice in watch.look(step, metrics) if watch is not None else ():
                    self.recorder.warn(step, notice.name, notice.numbers, notice.advice)
                late = collectives.is_main() and time.monotonic() - saved > 60 * self.options.save_minutes
                last = step == total and self.options.keep_last_checkpoint
                asked, due = ending.heard(late or last or (every is not None and step % every == 0))
                if asked or due:
                    self.saver.save(step, self._state, self._about() | {"models": [*self.models]})
                    saved = time.monotonic()
                else:
                    self.saver.look()
                if asked:
                    break
            self.saver.wait()
        if asked:
            self._leave(self.step, asked)

    def evaluated(self, metrics: Metrics) -> None:
        """Record what the model does on held-out rows after the steps so far; before the first it is step 0."""
        self.recorder.write("eval", self.step, metrics)

    def _with_spread(self, steps: Iterable[Metrics]) -> Iterator[Metrics]:
        """Beside each step's metrics, where there are several ranks, how long the passes of the slowest and of the
        fastest took: the others wait for the slowest."""
        engines = [part for part in self._state.tensors.values() if isinstance(part, Engine)]
        for metrics in steps:
            mine = sum(engine.forward_s for engine in engines)
            for engine in engines:
                engine.forward_s = 0.0
            if collectives.world_size() == 1:
                yield metrics
                continue
            slowest, fastest = collectives.max_over_ranks([mine, -mine])
            yield {**metrics, "forward_seconds_slowest": slowest, "forward_seconds_fastest": -fastest}

    def _leave(self, step: int, asked: signal.Signals) -> NoReturn:
        self.recorder.close()
        stage_process.give_up(
            f"{self.stage}: {asked.name} after step {step}; {self.saver.last()}; the same command goes on",
            CODES[asked],
        )

    def save(self, folder: str, save: Callable[[Path], None]) -> None:
        """Write a model into its folder, in place of what it had; the folder appears whole or not at all."""
        try:
            with PlainErrors(), self._appearing(folder) as staging:
                save(staging)
        except (OSError, SafetensorError, ValueError) as error:
            if isinstance(error, ValueError) and "os error" not in str(error):  # tokenizers knows no OSError
                raise
            raise UserError(
                f"{self.directory / folder}: cannot be written ({error}); make room there and run again"
            ) from None
        collectives.barrier()
        if folder not in self.models:
            self.models.append(folder)

    def finish(
        self,
        models: Mapping[str, Callable[[Path], None]],
        metrics: Metrics,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write each model into its folder, then the manifest; checkpoints go, but for the last one with
        `keep_last_checkpoint`. `state`, what was learned beside weights, goes to state.json.

        Raises: UserError if the disk is full, say; the stage is then unfinished.
        """
        try:
            for folder, save in models.items():
                self.save(folder, save)
            if collectives.is_main():
                if state is not None:
                    disk.write_json(self.directory / "state.json", state)
                for folder in {*self._declaration.models} - {*self.models}:  # of a run with other options
                    shutil.rmtree(self.directory / folder, ignore_errors=True)
                logs.sync(self.directory, self._logs)
                self._write_manifest(metrics)
                checkpoints.sweep(self.directory, everything=True, but=int(self.options.keep_last_checkpoint))
        except OSError as error:
            raise UserError(f"{self.directory}: cannot be written ({error}); make room there and run again") from error
        collectives.barrier()
        console.say(f"{self.stage}: {console.metrics_line(metrics)}")
        console.say(f"{self.stage}: wrote {', '.join(str(self.directory / folder) for folder in self.models)}")

    def _write_manifest(self, metrics: Metrics) -> None:
        manifest = self._about() | {
            "models": self.models,
            "metrics": metrics,
            "world_size": collectives.world_size(),
            "files": manifests.file_digests(self.directory, self.models),
        }
        manifests.write_manifest(self.directory / manifests.MANIFEST, manifest)

    def _about(self) -> dict[str, Any]:
        """What the result, and each checkpoint, came from."""
        places = self._inputs.items()
        return self.manifest | {
            "stage": self.stage,
            "inputs": {n: {"place": p, "manifest_sha256": manifests.manifest_digest(p)} for n, p in places},
            "config": self.options.model_dump(mode="json"),
            "versions": manifests.versions(),
        }

    @contextlib.contextmanager
    def _appearing(self, folder: str) -> Iterator[Path]:
        """The same staging directory on every rank; rank 0 makes it and renames it."""
        final = self.directory / folder
        if collectives.is_main():
            with disk.atomic_directory(final) as staging:
                yield staging
        else:
            yield final.with_name(f".tmp-{final.name}")


@contextlib.contextmanager
def open_run(
    declaration: Declaration, options: RunOptions, found: Standing, inputs: Mapping[str, str]
) -> Iterator[Run]:
    """The run of one stage inside its process group, with every random source seeded, in a directory of its own.

    `found`: how far it has come; `inputs` names the places it starts from.
    Numbers that are not finite, too many in a row, end the process with code 3 and one line; the batch is kept. So does
    a lack of memory, with code 1 and what needs less.
    Raises: UserError if another process runs the stage there.
    """
    replace, stage = options.overwrite or found == "extended", declaration.name
    with collectives.process_group(options.timeout_s), _alone(Path(options.output_dir) / stage, replace):
        torch.manual_seed(options.seed)
        run = Run(declaration, options, found, inputs)
        try:
            yield run
        except NonFiniteError as error:
            kept = ""
            if error.batch is not None:
                kept = f"; it lies in {run.directory / BAD_BATCH}"
                try:
                    save_batch(run.directory / BAD_BATCH, error, run.tokenizer)
                except OSError as full:
                    kept = f"; it could not be written ({full})"
                collectives.barrier()
            run.recorder.close()  # a rank of several ends at once in give_up
            stage_process.give_up(f"error: {stage}: {error}{kept}", NON_FINITE)
        except (RuntimeError, MemoryError) as error:
            if not errors.is_out_of_memory(error):
                raise
            ranks = collectives.rank(), collectives.world_size()
            advice = out_of_memory.lack_of_memory(error, options, declaration.phases, *ranks)
            run.recorder.close()
            stage_process.give_up(f"error: {stage}: {advice}", 1)
        finally:
            run.saver.close()
            run.recorder.close()


@contextlib.contextmanager
def _alone(directory: Path, replace: bool) -> Iterator[None]:
    """The directory, made by rank 0 and held by it for all.

    Raises: UserError if another process has it, or has finished the stage since we looked.
    """
    with contextlib.ExitStack() as stack:
        refusal = None
        if collectives.is_main():
            try:
                stack.enter_context(manifests.locked(directory))
                if (directory / manifests.MANIFEST).exists() and not replace:
                    refusal = f"{directory}: another process has just finished it; nothing is left to do here"
            except UserError as error:
                refusal = str(error)
        refusal = collectives.gather_objects(refusal)[0]
        if refusal is not None:
            raise UserError(refusal)
        yield
