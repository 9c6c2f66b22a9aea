"""The figures of a report: curves of every stage, reward against KL, score histograms, calibration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rlhf.config import Tree
from rlhf.config.declaration import Curve, Declaration, Frontier
from rlhf.maths import preferences
from rlhf.maths.intervals import Interval
from rlhf.pages.charts import COLOURS, MOST_POINTS, Chart, Mark, Point, Series, is_smoothed
from rlhf.pages.histogram import histogram
from rlhf.report.meanings import Meaning, read_meanings
from rlhf.report.records import RunRecord, StageRecord, number

Stages = Sequence[tuple[int, str, StageRecord]]
"""(colour, name of the run, its record of one stage)"""


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
    """The curves of a stage that have something to show, one line for each run and metric."""
    meanings = read_meanings(declaration.report.section)
    points = MOST_POINTS // max(1, len(stages))
    figures = []
    for curve in declaration.report.curves:
        series = [each for stage in stages for each in _lines(curve, stage, len(stages) > 1)]
        if not any(len(each.points) > 1 for each in series) or constant_value(series) is not None:
            continue
        terms = tuple(meanings[name] for name in curve.metrics if name in meanings)
        holds = all(curve.level_in.include(record.config) for _, _, record in stages)
        marks = (Mark(*curve.level, horizontal=True),) if curve.level and holds else ()
        unit = terms[0].unit if terms else ""
        unit = "" if unit in curve.title.lower() else unit
        chart = Chart(curve.title, x_name, tuple(series), unit, marks, most_points=points)
        figures.append(Figure(chart, terms))
    return figures


def constants(stages: Stages, declaration: Declaration) -> list[tuple[str, float]]:
    """(metric, value) of the curves that never change, for which `curves` draws no figure."""
    values = []
    for curve in declaration.report.curves:
        value = constant_value([each for stage in stages for each in _lines(curve, stage, len(stages) > 1)])
        if value is not None:
            values.append((curve.metrics[0], value))
    return values


def constant_value(series: Sequence[Series]) -> float | None:
    """The only value of all points; None if there are several."""
    values = {point.y for each in series for point in each.points}
    return values.pop() if len(values) == 1 else None


def _lines(curve: Curve, stage: tuple[int, str, StageRecord], several: bool) -> Iterable[Series]:
    colour, run, record = stage
    for index, metric in enumerate(curve.metrics):
        points = [
            Point(float(row.get("step", 0)), float(row[metric]), y_half=number(row, f"{metric}_ci95"))
            for row in record.values(metric)
        ]
        name = _line_name(metric, curve.metrics)
        if points:
            own_colour = colour if several else index % COLOURS
            yield Series(
                f"{run} {name}" if several else name, tuple(points), own_colour, dots=metric.startswith("eval_")
            )


def _line_name(metric: str, metrics: Sequence[str]) -> str:
    """What distinguishes a metric from the others of its figure."""
    if len(metrics) == 1:
        return metric
    if metric.startswith("eval_") and metric.removeprefix("eval_") in metrics:
        return "held out"
    if f"eval_{metric}" in metrics:
        return "training"
    words = [each.split("_") for each in metrics]
    common = {word for word in words[0] if all(word in other for other in words)}
    return " ".join(word for word in metric.split("_") if word not in common) or metric.replace("_", " ")


def frontiers(stages: Stages, declaration: Declaration) -> list[Figure]:
    """Reward against distance from the reference, with the iterations at which an alarm began."""
    points = MOST_POINTS // max(1, len(stages))
    figures = []
    for frontier in declaration.report.frontiers:
        series = [each for stage in stages for each in _frontier_lines(frontier, stage, len(stages) > 1)]
        marks = tuple(mark for _, _, record in stages for mark in _alarms(frontier, record))
        if any(len(each.points) > 1 for each in series):
            bold = any(map(is_smoothed, series))
            caption = "Thin: each iteration, in order. Bold: running mean." if bold else ""
            chart = Chart(
                frontier.title,
                "KL, nats per response",
                tuple(series),
                "",
                marks,
                caption,
                wide=True,
                most_points=points,
            )
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
                f"iteration {row.get('step')}",
            )
            for row in record.values(reward)
            if number(row, distance) is not None
        )
        if points:
            yield Series(f"{run} {name}" if several else name, points, colour if several else index, "path")


def _alarms(frontier: Frontier, record: StageRecord) -> Iterable[Mark]:
    """The KL at each iteration at which an alarm began."""
    names = record.declaration.report.alarms
    distances = {row.get("step"): row for row in record.values(frontier.lines[0][0])}
    for row in record.of_kind("warning"):
        distance = number(distances.get(row.get("step"), {}), frontier.lines[0][0])
        if row.get("name") in names and distance is not None:
            yield Mark(distance, f"{str(row['name']).replace('_', '-')}, iteration {row.get('step')}")


def reward_model(stages: Stages) -> list[Figure]:
    """The histogram and calibration of each reward model that has written its held-out scores."""
    figures = []
    for _, run, record in stages:
        scores = record.pair_scores
        if scores is None or not scores.get("chosen"):
            continue
        suffix = f", {run}" if len(stages) > 1 else ""
        groups = [(side, index, [float(v) for v in scores[side]]) for index, side in enumerate(("chosen", "rejected"))]
        chart = histogram(f"Scores of held-out pairs{suffix}", "score", groups, wide=True)
        figures += [Figure(chart)] if chart is not None else []
        figures.append(Figure(calibration(scores, f"Calibration{suffix}")))
    return figures


def calibration(scores: Tree, title: str = "Calibration") -> Chart:
    """Predicted against observed accuracy: pairs in bins of sigmoid(|chosen - rejected|), the share in the right order.

    A model of Bradley and Terry that is calibrated, P(preferred) = sigmoid(score difference), lies on the diagonal.
    """
    gaps = _gaps(scores)
    bins = preferences.calibration(gaps)
    points = [_share_point(each.predicted, each.observed, each.pairs) for each in bins]
    return Chart(
        title, "predicted share in the right order", (Series("observed", tuple(points), 0, "dots"),), "observed",
        caption="On the diagonal sigmoid(score difference) is that share (Bradley-Terry). Mean distance from it: "
        f"{preferences.calibration_error(bins):.3f} ({len(gaps)} pairs).",
        x_range=(0.5, 1.0), y_range=(0.0, 1.05), diagonal=True, wide=True,
    )  # fmt: skip


def _gaps(scores: Tree) -> torch.Tensor:
    return torch.tensor(scores["chosen"], dtype=torch.float64) - torch.tensor(scores["rejected"]).double()


def _share_point(x: float, share: Interval, pairs: int) -> Point:
    return Point(x, share.mean, label=f"{pairs} pairs", y_bounds=(share.low, share.high))
