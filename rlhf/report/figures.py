"""The figures of a report: curves of every stage, reward against KL, score histograms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf.config.declaration import Curve, Declaration, Frontier
from rlhf.pages.charts import COLOURS, MOST_POINTS, Chart, Point, Series, histogram
from rlhf.pages.numbers import short
from rlhf.report.meanings import Meaning, read_meanings
from rlhf.report.records import RunRecord, StageRecord, number

Stages = Sequence[tuple[int, str, StageRecord]]
"""(colour, name of the run, its record of one stage)"""
FEWEST_OF_A_LINE = 5
"""evaluations; of fewer, a line between two would look like a measured course"""
HELD_OUT = "held out"


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart, and what its metrics mean."""

    chart: Chart
    terms: tuple[Meaning, ...] = ()


def stages_of(runs: Sequence[RunRecord], declaration: Declaration) -> Stages:
    """The records of one stage in all runs that have it."""
    recorded = [(n % COLOURS, run.name, run.stage(declaration.name)) for n, run in enumerate(runs)]
    return [(colour, name, stage) for colour, name, stage in recorded if stage is not None]


def curves(stages: Stages, declaration: Declaration, x_name: str = "step") -> list[Figure]:
    """The curves of a stage that change, one line for each run and metric."""
    meanings = read_meanings(declaration.report.section)
    points = MOST_POINTS // max(1, len(stages))
    figures = []
    for curve in declaration.report.curves:
        series = [each for stage in stages for each in _lines(curve, stage, len(stages) > 1)]
        if not any(len(each.points) > 1 for each in series) or len({p.y for s in series for p in s.points}) == 1:
            continue
        terms = tuple(meanings[name] for name in curve.metrics if name in meanings)
        holds = all(curve.level_in.include(record.config) for _, _, record in stages)
        unit = terms[0].unit if terms else ""
        unit = "" if unit in curve.title.lower() else unit
        if curve.lowest is not None and any(p.y < curve.lowest for s in series for p in s.points):
            unit = "; ".join(filter(None, (unit, f"triangles: below {short(curve.lowest)}")))
        level = curve.level if holds else None
        chart = Chart(curve.title, x_name, tuple(series), unit, level, lowest=curve.lowest, most_points=points)
        figures.append(Figure(chart, terms))
    return figures


def _lines(curve: Curve, stage: tuple[int, str, StageRecord], several: bool) -> Iterable[Series]:
    colour, run, record = stage
    for index, metric in enumerate(curve.metrics):
        points = [
            Point(float(row.get("step", 0)), float(row[metric]), y_half=number(row, f"{metric}_ci95"))
            for row in record.values(metric)
        ]
        name = _line_name(metric, curve.metrics)
        if points:
            lone = name == HELD_OUT or len(points) < FEWEST_OF_A_LINE
            yield Series(
                f"{run} {name}" if several else name, tuple(points), colour if several else index % COLOURS,
                "line" if not metric.startswith("eval_") else "marks" if lone else "dotted",
            )  # fmt: skip


def _line_name(metric: str, metrics: Sequence[str]) -> str:
    """What distinguishes a metric from the others of its figure."""
    if len(metrics) == 1:
        return metric
    if metric.startswith("eval_") and metric.removeprefix("eval_") in metrics:
        return HELD_OUT
    if f"eval_{metric}" in metrics:
        return "training"
    words = [each.split("_") for each in metrics]
    common = {word for word in words[0] if all(word in other for other in words)}
    return " ".join(word for word in metric.split("_") if word not in common) or metric.replace("_", " ")


def frontiers(stages: Stages, declaration: Declaration) -> list[Figure]:
    """Reward against distance from the reference."""
    points = MOST_POINTS // max(1, len(stages))
    figures = []
    for frontier in declaration.report.frontiers:
        series = [each for stage in stages for each in _frontier_lines(frontier, stage, len(stages) > 1)]
        if any(len(each.points) > 1 for each in series):
            kl = "KL, nats per response"
            chart = Chart(frontier.title, kl, tuple(series), wide=True, most_points=points)
            figures.append(Figure(chart))
    return figures


def _frontier_lines(frontier: Frontier, stage: tuple[int, str, StageRecord], several: bool) -> Iterable[Series]:
    colour, run, record = stage
    for index, (distance, reward, name) in enumerate(frontier.lines):
        points = tuple(
            Point(
                float(row[distance]),
                float(row[reward]),
                number(row, f"{distance}_ci95"),
                number(row, f"{reward}_ci95"),
            )
            for row in record.values(reward)
            if number(row, distance) is not None
        )
        if points:
            few = name == HELD_OUT and len(points) < FEWEST_OF_A_LINE
            label = f"{run} {name}" if several else name
            yield Series(label, points, colour if several else index, "marks" if few else "path")


def pair_scores(stages: Stages) -> list[Figure]:
    """The histogram of each reward model that has written its held-out scores."""
    figures = []
    for _, run, record in stages:
        scores = record.pair_scores or {}
        groups = [(side, n, [*map(float, scores.get(side, ()))]) for n, side in enumerate(("chosen", "rejected"))]
        title = "Scores of held-out pairs" + (f", {run}" if len(stages) > 1 else "")
        chart = histogram(title, "score", groups, wide=True)
        figures += [] if chart is None else [Figure(chart)]
    return figures
