"""`rlhf report RUN [RUN ...]`: one page on what runs did and whether it worked; every chain writes one at its end."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import jinja2
from pydantic import Field

from rlhf import console
from rlhf.chain.stages import STAGES
from rlhf.config import Config, parser
from rlhf.config.declaration import Declaration
from rlhf.errors import UserError

REPORT = "report.html"
FAILURES = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, jinja2.TemplateError,
)  # fmt: skip
"""what a page on damaged or foreign files may raise"""


class ReportConfig(Config):
    """The runs to report on."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...] = Field((), max_length=8)
    """output directories of up to eight runs, which are drawn into the same figures"""
    output: str | None = None
    """the file to write; by default RUN/report.html, of several runs report.html in the current directory"""


def write(options: ReportConfig) -> Path:
    """Write the report, and return its path.

    Raises: UserError for a path without a run, damaged or foreign files, or an output that cannot be written.
    """
    from rlhf.report.write import write_report  # here: it imports torch

    output = Path(options.output or (Path(options.runs[0]) / REPORT if len(options.runs) == 1 else REPORT))
    try:
        write_report(options.runs, output, [*STAGES.values()])
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
