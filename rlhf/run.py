"""One stage's run: its directory, its process group, its record, and the manifest that says it is finished."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf import checkpoint, config, dist, record
from rlhf.config import UserError
from rlhf.options import RunOptions
from rlhf.types import Metrics

C = TypeVar("C", bound=RunOptions)


class Run:
    """What a stage needs besides its method: a place to write, a recorder, and the end."""

    def __init__(self, stage: str, options: RunOptions) -> None:
        self.stage = stage
        self.options = options
        self.directory = Path(options.output_dir) / stage
        if dist.is_main():
            (self.directory / checkpoint.MANIFEST).unlink(missing_ok=True)
            (self.directory / checkpoint.RUN_CONFIG).write_text(config.to_yaml(options), encoding="utf-8")
        self.recorder = record.Recorder(self.directory, options.report_to)

    def describe(self, train: Any, evaluation: Any) -> None:
        """Say how many rows there are, and which were dropped and why."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in train.dropped.items())
        record.say(
            f"{self.stage}: {len(train)} rows to train on, {len(evaluation)} held out"
            + (f"; dropped {dropped}" if dropped else "")
        )

    def follow(self, steps: Iterable[Metrics], total: int, shown: Sequence[str]) -> None:
        """Run the training loop `steps` to its end under the bar."""
        for _ in self.recorder.follow(steps, total, self.stage, shown):
            pass

    def finish(self, models: dict[str, Callable[[Path], None]], inputs: dict[str, str], metrics: Metrics) -> None:
        """Write each model into its folder, then the manifest. `inputs` names the places the stage started from."""
        for folder, save in models.items():
            with self._appearing(folder) as staging:
                save(staging)
        self.recorder.write("eval", 0, metrics)
        if dist.is_main():
            manifest = {
                "stage": self.stage,
                "inputs": {n: {"place": p, "manifest_sha256": checkpoint.manifest_digest(p)} for n, p in inputs.items()},
                "models": list(models),
                "metrics": metrics,
                "config": self.options.model_dump(mode="json"),
                "versions": checkpoint.versions(),
                "world_size": dist.world_size(),
                "files": checkpoint.file_digests(self.directory, list(models)),
            }
            checkpoint.write_json(self.directory / checkpoint.MANIFEST, manifest)
        dist.barrier()
        record.say(f"{self.stage}: {record.metrics_line(metrics)}")
        record.say(f"{self.stage}: wrote {', '.join(str(self.directory / folder) for folder in models)}")

    @contextlib.contextmanager
    def _appearing(self, folder: str) -> Iterator[Path]:
        """The same staging directory on every rank; rank 0 makes it and renames it."""
        final = self.directory / folder
        if dist.is_main():
            with checkpoint.appearing(final) as staging:
                yield staging
        else:
            yield final.with_name(f".tmp-{folder}")


@contextlib.contextmanager
def open_run(stage: str, options: RunOptions) -> Iterator[Run]:
    """The run of one stage inside its process group, with every random source seeded."""
    with dist.process_group():
        torch.manual_seed(options.seed)
        run = Run(stage, options)
        try:
            yield run
        finally:
            run.recorder.close()


def require_writable(options: RunOptions, stage: str) -> None:
    """Make the stage's directory. Raises: UserError if nothing can be written there."""
    directory = Path(options.output_dir) / stage
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"--output-dir {options.output_dir}: cannot write there ({error.strerror}); name another") from None


def stage_main(cls: Callable[[], type[C]], stage: str, description: str, run: Callable[[C], Any]) -> int:
    """The command line of one stage: parse the options of `cls()`, run, and say a user's mistake in one line."""

    def main() -> None:
        options = config.parse(cls(), sys.argv[1:], f"python -m {stage}", description)
        require_writable(options, stage)
        record.quiet_libraries()
        run(options)

    code = config.run_as_user(main)
    sys.stdout.flush()
    return code


