"""What must hold of every run, whatever it has learned: each number with its bounds, read from the run's own files."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf.pages.numbers import short
from rlhf.report.records import RunRecord, StageRecord, number


@dataclass(frozen=True, slots=True)
class Checked:
    """An invariant, the number that the run has, and whether it lies within the bounds."""

    stage: str
    title: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high

    @property
    def bounds(self) -> str:
        """`0`, `0 to 0.001`, `0.01 or more`."""
        if self.low == self.high:
            return short(self.low)
        return f"{short(self.low)} {'or more' if self.high == float('inf') else f'to {short(self.high)}'}"


def invariants(run: RunRecord) -> list[Checked]:
    """Those of the stages as they declare them, and those of every stage."""
    return [checked for stage in run.stages for checked in (*_declared(stage), *_common(stage))]


def _declared(stage: StageRecord) -> Iterator[Checked]:
    name = stage.directory.name
    for each in stage.declaration.report.invariants:
        if not each.runs.include(stage.config):
            continue
        rows = [row for row in stage.values(each.metric) if row.get("kind") == each.kind]
        value = number(rows[-1 if each.at_end else 0], each.metric) if rows else None
        if value is not None and not (each.at_end and stage.manifest is None):
            exact = each.coarse is None or _dtype(stage) == "fp32"
            yield Checked(name, each.title, value, each.low, each.high if exact else float(each.coarse or 0.0))


def _dtype(stage: StageRecord) -> object:
    """In which the stage computed; `auto` if it is unfinished, or an earlier version has not recorded it."""
    hardware = (stage.manifest or {}).get("hardware")
    recorded = hardware.get("dtype") if isinstance(hardware, dict) else None
    return recorded or stage.config.get("dtype")


def _common(stage: StageRecord) -> Iterator[Checked]:
    """The losses are numbers, and no stage trains on the prompts of another."""
    name, losses = stage.directory.name, stage.declaration.losses
    steps = [row for row in stage.of_kind("train") if not row.get("skipped")]
    yield Checked(
        name, "steps with a loss that is not finite", sum(row.get(x, 0) is None for row in steps for x in losses), 0, 0
    )
    if stage.data is not None and "cut_alike" in stage.data.get("train", {}):
        title = "training rows whose prompt may belong to another stage"
        yield Checked(name, title, stage.data["train"]["cut_alike"], 0, 0)
