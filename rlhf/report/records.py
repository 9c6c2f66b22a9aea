"""A run as its files have it. Every file may be missing or cut short: an unfinished run has a report too."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlhf.config import Tree
from rlhf.config.declaration import Declaration
from rlhf.config.yaml_files import from_yaml
from rlhf.errors import UserError
from rlhf.storage import disk, manifests

Row = Tree
"""of metrics.jsonl and the other files of JSON lines"""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """The files of one stage."""

    declaration: Declaration
    directory: Path
    rows: tuple[Row, ...]
    """of metrics.jsonl"""
    manifest: Tree | None
    """None: unfinished"""
    config: Tree
    data: Tree | None
    samples: tuple[Row, ...]
    """held-out responses of the last evaluation"""
    pair_scores: Tree | None

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of one kind: train, eval or warning."""
        return [row for row in self.rows if row.get("kind") == kind]

    def values(self, metric: str) -> list[Row]:
        """The rows of metrics that have a number for `metric`."""
        return [row for row in self.rows if row.get("kind") != "warning" and _is_number(row.get(metric))]

    @property
    def seconds(self) -> float:
        """From the opening of metrics.jsonl to its last row, over all processes that continued it."""
        return max((float(row.get("seconds", 0.0)) for row in self.rows), default=0.0)

    @property
    def steps(self) -> int:
        """The number of the last step that is recorded."""
        return max((int(row.get("step", 0)) for row in self.of_kind("train")), default=0)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run and its stages, in the order of the chain; stages that have recorded nothing are left out."""

    name: str
    path: Path
    stages: tuple[StageRecord, ...]

    def stage(self, name: str) -> StageRecord | None:
        """The stage of that name, if the run has it."""
        return next((stage for stage in self.stages if stage.declaration.name == name), None)


def read_runs(paths: Sequence[str], declarations: Sequence[Declaration]) -> list[RunRecord]:
    """The runs in output directories. A run's name is its path without what all paths begin with.

    Raises: UserError for a directory without a stage that has recorded anything.
    """
    directories = [Path(path) for path in dict.fromkeys(paths)]
    base = os.path.commonpath([directory.resolve().parent for directory in directories])
    return [_read_run(str(path.resolve().relative_to(base)), path, declarations) for path in directories]


def _read_run(name: str, path: Path, declarations: Sequence[Declaration]) -> RunRecord:
    stages = [read_stage(path / each.name, each) for each in declarations if (path / each.name).is_dir()]
    recorded = tuple(stage for stage in stages if stage.rows)
    if not recorded:
        folders = ", ".join(each.name for each in declarations)
        raise UserError(
            f"{path}: no stage has recorded metrics there; expected the --output-dir of a run, with one of {folders} "
            "and its metrics.jsonl"
        )
    return RunRecord(name, path, recorded)


def read_stage(directory: Path, declaration: Declaration) -> StageRecord:
    """The files of a stage. Raises: UserError if a later version of this program has written them."""
    manifest = _json(directory / manifests.MANIFEST)
    version = (manifest or {}).get("metrics_version", manifests.METRICS_VERSION)
    if version != manifests.METRICS_VERSION:
        raise UserError(
            f"{directory}: metrics.jsonl has version {version}, expected {manifests.METRICS_VERSION}; "
            "read it with the version of this program that wrote it"
        )
    samples = disk.json_lines(directory / declaration.report.samples) if declaration.report.samples else []
    last = samples[-1].get("iteration") if samples else None
    return StageRecord(
        declaration=declaration,
        directory=directory,
        rows=tuple(disk.json_lines(directory / manifests.METRICS)),
        manifest=manifest,
        config=_yaml(directory / manifests.RUN_CONFIG),
        data=_json(directory / "data.json"),
        samples=tuple(row for row in samples if row.get("iteration") == last),
        pair_scores=_json(directory / declaration.report.pair_scores) if declaration.report.pair_scores else None,
    )


def _json(path: Path) -> Tree | None:
    """The object in a file; None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _yaml(path: Path) -> Tree:
    """The options in a file; none if there is no such file or it cannot be read."""
    try:
        value = from_yaml(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    except (yaml.YAMLError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(row: Row, name: str) -> float | None:
    """A number of a row; None if it has none."""
    value = row.get(name)
    return float(value) if value is not None and _is_number(value) else None


def before_and_after(samples: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """(before, after) of each held-out response that has both numbers."""
    pairs = [(number(row, f"{name}_before"), number(row, name)) for row in samples] if name else []
    return [(old, new) for old, new in pairs if old is not None and new is not None]
