"""`rlhf report RUN [RUN ...]`: one page on what runs did and whether it worked; every chain writes one at its end."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import jinja2
from pydantic import Field

from rlhf import console
from rlhf.chain.stages import STAGES
from rlhf.config import Config, parser
from rlhf.config.declaration import Declaration
from rlhf.errors import UserError
from rlhf.storage import manifests

REPORT = "report.html"
FAILURES = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, jinja2.TemplateError,
)  # fmt: skip
"""what a page on damaged or foreign files may raise"""
EVALUATION = b'{"kind": "eval", '
"""how the row of an evaluation begins in metrics.jsonl"""
POLL_S = 10.0
"""between two looks for new evaluations while a run is going"""
SHARE = 0.01
"""of the time, at most, the page of a run that is going is written"""


class ReportConfig(Config):
    """The runs to report on."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...] = Field((), max_length=8)
    """output directories of up to eight runs, which are drawn into the same figures"""
    output: str | None = None
    """the file to write; by default RUN/report.html, of several runs report.html in the current directory"""


def write(options: ReportConfig, going: bool = False) -> Path:
    """Write the report, and return its path. going: the page says so, and reloads itself

    Raises: UserError for a path without a run, damaged or foreign files, or an output that cannot be written.
    """
    from rlhf.report.write import write_report  # here: it imports torch

    output = Path(options.output or (Path(options.runs[0]) / REPORT if len(options.runs) == 1 else REPORT))
    try:
        write_report(options.runs, output, [*STAGES.values()], going)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); name another file with --output") from None
    except UserError:
        raise
    except FAILURES as error:
        raise UserError(
            f"{' '.join(options.runs)}: no report can be made of the files there ({type(error).__name__}: {error}); "
            "expected those of a run, unchanged"
        ) from error
    return output


@contextlib.contextmanager
def written_while_going(output_dir: str) -> Iterator[None]:
    """While the block runs its stages, write the report after each evaluation, in a thread of this process."""
    console.say(f"report: {Path(output_dir) / REPORT}, after each evaluation")
    ended = threading.Event()
    thread = threading.Thread(target=_write_after_evaluations, args=(Path(output_dir), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_after_evaluations(directory: Path, ended: threading.Event) -> None:
    files = [directory / stage.name / manifests.METRICS for stage in STAGES.values()]
    sizes = {file: file.stat().st_size if file.exists() else 0 for file in files}
    pause = POLL_S
    while not ended.wait(pause):
        is_due = False
        for file in filter(Path.exists, files):
            with file.open("rb") as opened:
                opened.seek(sizes[file])
                added = opened.read()
            sizes[file] += len(added)
            is_due = is_due or EVALUATION in added
        begin = time.monotonic()
        if is_due:
            with contextlib.suppress(UserError):  # the report at the end says it
                write(ReportConfig(runs=(str(directory),)), going=True)
        pause = max(POLL_S, (time.monotonic() - begin) / SHARE)


def write_at_end(output_dir: str, judged: Sequence[Declaration] = tuple(STAGES.values())) -> str:
    """Write the report of a chain that has ended. Returns what to print: the verdict on the last of the stages `judged`
    and the report's path, or a warning with the reason."""
    from rlhf.report.records import read_runs  # here: they import torch
    from rlhf.report.verdict import judge

    try:
        path = write(ReportConfig(runs=(output_dir,)))
    except UserError as error:
        return f"warning: {error}"
    [run] = read_runs((output_dir,), judged)
    return f"\n{judge(run).sentence}\nreport: {path}"


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf report") -> int:
    """Exit code 2 for a path without a run."""
    words = console.words(argv)
    options = parser.parse(ReportConfig, words, program, "Write one page on what runs did and whether it worked.")
    if not options.runs:
        raise UserError("rlhf report: no run is named; expected the --output-dir of one or more runs")
    console.loading(program, words)
    print(write(options))
    return 0
