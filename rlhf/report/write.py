"""The page of one or several runs."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.declaration import Declaration
from rlhf.console import duration
from rlhf.pages import page
from rlhf.pages.charts import COLOURS, Chart, histogram
from rlhf.report import facts, figures, seal
from rlhf.report.figures import Figure
from rlhf.report.groups import Groups, groups
from rlhf.report.invariants import Checked, invariants
from rlhf.report.meanings import Meaning, read_meanings
from rlhf.report.records import Row, RunRecord, read_runs
from rlhf.report.samples import SampleTable, sample_table
from rlhf.report.taught import Taught, taught
from rlhf.report.verdict import Change, Verdict, changes, judge

TEMPLATE = Path(__file__).parent / "report.html.jinja"
SHOWN_SAMPLES = 20
"""rows of the sample table before the button for more"""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run at the top of the page."""

    run: RunRecord
    colour: int
    verdict: Verdict
    changes: tuple[tuple[str, tuple[Change, ...]], ...]
    """(stage, its results)"""
    groups: tuple[tuple[str, Groups], ...]
    """(stage, its groups of held-out rows), of stages that have some"""
    invariants: tuple[Checked, ...]
    taught: tuple[Taught, ...]
    seal: str
    """that `rlhf verify` has computed its numbers again, if it has"""

    @property
    def duration(self) -> str:
        """The time of all stages."""
        return duration(sum(stage.seconds for stage in self.run.stages))


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The figures of a stage in all runs."""

    name: str
    title: str
    wide: tuple[Figure, ...]
    """reward against KL, scores of pairs"""
    curves: tuple[Figure, ...]


WarningRow = tuple[str, str, Row, Meaning | None]
"""(run, stage, its row of metrics.jsonl, what it means)"""


def write_report(paths: Sequence[str], output: Path, declarations: Sequence[Declaration], going: bool = False) -> None:
    """Write the report on the runs in `paths` to the file `output`.

    declarations: of the stages, in their order; going: the page says that the run goes on, and reloads itself
    Raises: UserError for a path without a run; OSError.
    """
    page.write(output, render_report(read_runs(paths, declarations), declarations, going))


def render_report(runs: Sequence[RunRecord], declarations: Sequence[Declaration], going: bool = False) -> str:
    """The HTML of the report."""
    declared = [each for each in declarations if any(run.stage(each.name) for run in runs)]
    by_stage = {each.name: figures.stages_of(runs, each) for each in declared}
    samples = sample_table([stage for each in declared for stage in by_stage[each.name]])
    stage_figures = [_stage_figures(by_stage[each.name], each) for each in declared]
    sections = [("verdict", "Verdict"), *((each.name, each.title) for each in stage_figures[::-1])]
    sections += [("samples", "Samples")] if samples.samples else []
    sections += [("warnings", "Warnings"), ("data", "Data"), ("run", "What was run")]
    title = ", ".join(run.name for run in runs)
    return page.render(
        TEMPLATE,
        title=f"{title}: report",
        heading=title,
        going=f"{time.strftime('%Y-%m-%d %H:%M:%S')}, after {_progress(runs)}" if going else "",
        sections=sections,
        footer="Written by rlhf report. Intervals are 95 %. Every number is in metrics.jsonl and manifest.json of its "
        "stage. Times exclude starting Python and reading the data.",
        summaries=[_summary(run, number % COLOURS) for number, run in enumerate(runs)],
        stages=stage_figures[::-1],
        samples=samples,
        sample_figures=_sample_figures(samples),
        shown_samples=SHOWN_SAMPLES,
        warnings=[*_warnings(runs)],
        accounts=[(run.name, [facts.data_account(stage) for stage in run.stages]) for run in runs],
        facts=[
            (run.name, [(s.directory.name, facts.stage_facts(s), facts.all_options(s)) for s in run.stages])
            for run in runs
        ],
        versions=facts.versions(runs),
    )


def _progress(runs: Sequence[RunRecord]) -> str:
    """The last step that is recorded of the newest stage."""
    stage = runs[-1].stages[-1]
    return f"{'iteration' if stage.declaration.report.samples else 'step'} {stage.steps} of {stage.directory.name}"


def _summary(run: RunRecord, colour: int) -> RunSummary:
    by_stage = tuple((stage.directory.name, tuple(changes(stage))) for stage in reversed(run.stages))
    by_group = [(stage.directory.name, groups(stage)) for stage in reversed(run.stages)]
    samples = [row for stage in run.stages for row in stage.samples]
    return RunSummary(
        run=run,
        colour=colour,
        verdict=judge(run),
        changes=by_stage,
        groups=tuple((name, table) for name, table in by_group if table),
        invariants=tuple(invariants(run)),
        taught=tuple(taught(samples)),
        seal=seal.describe(run.path),
    )


def _stage_figures(stages: figures.Stages, declaration: Declaration) -> StageFigures:
    x_name = "iteration" if declaration.report.samples else "step"
    return StageFigures(
        name=declaration.name,
        title=declaration.report.section.partition(", ")[2].capitalize() or declaration.name,
        wide=(*figures.frontiers(stages, declaration), *figures.pair_scores(stages)),
        curves=tuple(figures.curves(stages, declaration, x_name)),
    )


def _sample_figures(samples: SampleTable) -> list[Chart]:
    """Histograms of each number of the responses before and after, of one run."""
    if len({sample.run for sample in samples.samples}) != 1:
        return []
    charts = []
    for index, label in enumerate(samples.columns):
        numbers = [sample.numbers[index] for sample in samples.samples]
        groups = [
            ("before", 7, [each.before for each in numbers if each.before is not None]),
            ("after", 0, [each.after for each in numbers if each.after is not None]),
        ]
        chart = histogram(f"{label.capitalize()} of the responses", label, groups)
        charts += [chart] if chart is not None else []
    return charts


def _warnings(runs: Sequence[RunRecord]) -> Iterable[WarningRow]:
    meanings = read_meanings("Warnings of step 3")  # some have the name of a metric
    for run in runs:
        for stage in run.stages:
            for row in stage.of_kind("warning"):
                yield run.name, stage.directory.name, row, meanings.get(str(row.get("name")))
