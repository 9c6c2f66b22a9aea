"""What was run, with what, for how long, and what became of every row of the data."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf import rewards
from rlhf.config import Tree
from rlhf.config.secrets import masked
from rlhf.console import duration, size
from rlhf.report.records import RunRecord, StageRecord

OUTCOMES = {"train": "used for training", "evaluation": "held out for evaluation"}
"""words for two outcomes of data.json; the others are words already"""


Fact = tuple[str, str]
"""name and value: a line of a table"""


@dataclass(frozen=True, slots=True)
class DataAccount:
    """The rows that a stage has read of all its data paths."""

    stage: str
    rows: int
    outcomes: tuple[tuple[str, int, float], ...]
    """(what became of them, rows, their share)"""
    sources: tuple[tuple[str, int, int, int], ...]
    """(data path, rows read, rows to train on, tokens of these)"""
    shortened: int


def stage_facts(stage: StageRecord) -> list[Fact]:
    """Time, hardware and models of a stage."""
    manifest = stage.manifest or {}
    facts = [("time", f"{duration(stage.seconds)}, {stage.steps:,} steps" + ("" if manifest else ", unfinished"))]
    peaks = [float(row["peak_memory_gb"]) for row in stage.values("peak_memory_gb")]
    if peaks:
        facts.append(("peak memory", f"{size(1e9 * max(peaks))} of one process"))
    hardware = manifest.get("hardware", {})
    if hardware:
        facts.append(("hardware", _hardware(hardware)))
    for name, source in manifest.get("inputs", {}).items():
        path = str(source["path"])
        own = f"{stage.directory.parent.resolve()}/"  # another stage of the same run
        facts.append((name.replace("_", " "), path.removeprefix(own).removeprefix(f"{stage.directory.parent}/")))
    if manifest.get("models"):
        facts.append(("wrote", ", ".join(f"{stage.directory.name}/{folder}" for folder in manifest["models"])))
    if (answers := stage.directory / rewards.ANSWERS).is_dir():
        requests, tokens = rewards.cost(answers)
        stored = sum(row[rewards.CACHED] for row in stage.values(rewards.CACHED))
        facts.append(("judge", f"{requests:,} requests, {tokens:,} tokens, {stored:,.0f} more answers from the disk"))
    if best := manifest.get("metrics", {}).get("eval_best_step"):
        facts.append(("best evaluation", f"after step {best:,.0f}"))
    return facts


def _hardware(hardware: Mapping[str, object]) -> str:
    """`2 processes on NVIDIA H200`"""
    processes = hardware.get("processes", 1)
    return f"{processes} process{'es' if processes != 1 else ''} on {hardware.get('device')}"


def all_options(stage: StageRecord) -> str:
    """All options as YAML, without secrets."""
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in masked(stage.config).items())


def versions(runs: Sequence[RunRecord]) -> list[Fact]:
    """Versions of the libraries; where runs or stages differ, all of them."""
    by_library: dict[str, dict[str, None]] = {}
    for run in runs:
        for stage in run.stages:
            for library, version in (stage.manifest or {}).get("versions", {}).items():
                by_library.setdefault(library, {})[str(version)] = None
    return [(library, " and ".join(different)) for library, different in by_library.items()]


def data_account(stage: StageRecord) -> DataAccount | None:
    """The rows of data.json; None without that file."""
    if stage.data is None:
        return None
    sources = stage.data.get("sources", [])
    total: Counter[str] = Counter()
    for source in sources:
        total.update(source.get("outcomes", {}))
    rows = sum(source.get("rows", 0) for source in sources)
    train: Tree = stage.data.get("train", {})
    counts = zip(sources, train.get("rows_by_source", []), train.get("tokens_by_source", []), strict=False)
    return DataAccount(
        stage=stage.directory.name,
        rows=rows,
        outcomes=tuple((OUTCOMES.get(name, name), n, n / max(1, rows)) for name, n in total.most_common()),
        sources=tuple((str(s.get("data_path")), int(s.get("rows", 0)), int(n), int(tokens)) for s, n, tokens in counts),
        shortened=int(train.get("shortened", 0)),
    )
