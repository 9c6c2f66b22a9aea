"""`rlhf diff RUN RUN`: the first thing that makes two runs differ, and everything else that does.

A stage is compared in the order in which a run meets things: what it was given comes before what it computed, so that
the first difference is a cause. Two numbers differ by rounding if they are no farther apart than one step of the run's
dtype and one unit of the sixth digit, the last that metrics.jsonl has, of the largest value that the metric has in
either run: a KL near 0 is the difference of large numbers. Training amplifies what begins as rounding.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rlhf import console
from rlhf.chain.options import SECTIONS, ChainConfig
from rlhf.chain.stages import STAGES
from rlhf.config import Config, Tree, parser
from rlhf.config.secrets import masked
from rlhf.errors import UserError
from rlhf.report.records import StageRecord, number, read_stage
from rlhf.storage import manifests

NO_NUMBERS = (
    "kind", "step", "seconds", "forward_seconds", "tokens_per_second", "peak_memory", "request", "cached_answers",
)  # fmt: skip
"""how the columns of metrics.jsonl begin that no result is in"""
STEPS = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""of a dtype: between 1 and the next number"""
SIXTH_DIGIT = 1e-5
SPLITS = {"train": "to train on", "evaluation": "held out"}


class DiffConfig(Config):
    """The two runs."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...] = Field((), max_length=2)
    """output directories of two runs, or of one of their stages each; finished or not"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A stage in two runs."""

    stage: str
    last: int
    """the last step of both"""
    count: int
    """numbers that both have"""
    lines: list[str]
    """what differs and can change results by more than rounding, in the order in which a run meets it"""
    is_finished: bool
    """in both runs"""


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf diff") -> int:
    """Exit code 1 if the runs differ, 2 for a user's mistake."""
    options = parser.parse(DiffConfig, console.words(argv), program, "Say what makes two runs differ, the first first.")
    if len(options.runs) != 2:
        raise UserError("rlhf diff: expected two runs, the --output-dir of both, or one of their stages")
    first, second = (recorded_stages(Path(run)) for run in options.runs)
    common = [step for step in first if step in second]
    if not common:
        names = " and ".join(", ".join(s.directory.name for s in stages.values()) for stages in (first, second))
        raise UserError(f"{' and '.join(options.runs)}: got {names}, expected a stage that both have")
    compared = [compare(step, first[step], second[step]) for step in common]
    console.say(verdict(compared))
    for each in compared:
        differences = f"{each.stage}, to step {each.last}: {len(each.lines) or 'no'} differences"
        console.say("\n  ".join([differences, *each.lines]))
    return int(any(each.lines for each in compared))


def verdict(compared: Sequence[Comparison]) -> str:
    """What differs first, in one sentence."""
    for each in compared:
        if each.lines:
            return f"The first difference is in {each.stage}: {each.lines[0]}."
    count = sum(each.count for each in compared)
    if all(each.is_finished for each in compared):
        return f"The same to the last bit: {count:,} numbers, and the weights of all models."
    return f"The same as far as both are recorded: {count:,} numbers."


def recorded_stages(run: Path) -> dict[int, StageRecord]:
    """The stages of a run that have recorded anything, or the one that it is. Raises: UserError without any."""
    folders = {step: run if run.resolve().name == each.name else run / each.name for step, each in STAGES.items()}
    records = {step: read_stage(folder, STAGES[step]) for step, folder in folders.items() if folder.is_dir()}
    stages = {step: record for step, record in records.items() if record.rows}
    if not stages:
        raise UserError(f"{run}: no stage has recorded metrics there; expected the --output-dir of a run, or a stage")
    return stages


def compare(step: int, first: StageRecord, second: StageRecord) -> Comparison:
    """Compare a stage of two runs."""
    options: Any = ChainConfig.model_fields[SECTIONS[step]].annotation
    inputs = _unlike(_inputs(first, options), _inputs(second, options))
    count, last, unequal = compare_numbers(first, second)
    lines = [*inputs, *unequal, *_unlike(_weights(first), _weights(second))]
    is_finished = first.manifest is not None and second.manifest is not None
    return Comparison(STAGES[step].name, last, count, lines, is_finished)


def _unlike(facts: dict[str, Tree], other_facts: dict[str, Tree]) -> Iterator[str]:
    """A line for each difference. What one of the two runs has not recorded is none, nor is another path of the same
    model."""
    digests, other_digests = (each.get("starting weights", {}) for each in (facts, other_facts))
    same_models = [name for name, digest in digests.items() if digest and other_digests.get(name) == digest]
    for kind, values in facts.items():
        for name in dict.fromkeys([*values, *other_facts[kind]]):
            one, other = values.get(name), other_facts[kind].get(name)
            if one != other and name not in same_models and (kind == "options" or None not in (one, other)):
                yield f"{kind}: {name}: {_shown(one)} and {_shown(other)}"


def _inputs(stage: StageRecord, options: type[Config]) -> dict[str, Tree]:
    """What a stage was given, by kind: of its manifest, or of its newest checkpoint if it is unfinished."""
    newest = sorted(stage.directory.glob(f"{manifests.CHECKPOINTS}/step-*/{manifests.MANIFEST}"))[-1:]
    manifest: Tree = stage.manifest or (manifests.parse(newest[0])[0] if newest else {})
    config = options.model_construct().model_dump(mode="json") | masked(manifest.get("config") or stage.config)
    inside = json.dumps(options.of_results(config)).replace(f'"{config["output_dir"]}/', '"')
    inputs: Tree = manifest.get("inputs", {})
    models = [entry["path"] for entry in inputs.values()]
    return {
        "versions": manifest.get("versions", {}),
        "hardware": manifest.get("hardware", {}),
        "options": {name: value for name, value in json.loads(inside).items() if not name.endswith("data_path")},
        "files": {name: digest for name, digest in manifest.get("user_files", {}).items() if name not in models},
        "rows": _rows(stage.data or {}, config["data_seed"]),
        "template": manifest.get("template", {}),
        "tokenizer": {"vocabulary, splits and added tokens": manifest.get("tokenizer")},
        "starting weights": {name: entry.get("weights") for name, entry in inputs.items()},
        "random draws": {"generators before the first step": manifest.get("random_generators")},
    }


def _weights(stage: StageRecord) -> dict[str, Tree]:
    """The digests of the weights that a stage has saved."""
    files: Tree = (stage.manifest or {}).get("files", {})
    return {"weights": {name: x["sha256"] for name, x in files.items() if name.endswith(manifests.WEIGHTS)}}


def _rows(report: Tree, seed: int) -> Tree:
    """The number and the digests of the rows of each split. The digests of another data_seed are others."""
    return {
        f"{title}, data_seed {seed}": f"{split['rows']} rows, content {split['as_a_set']}, order {split['in_order']}"
        for name, title in SPLITS.items()
        if "as_a_set" in (split := report.get(name, {}))
    }


def compare_numbers(first: StageRecord, second: StageRecord) -> tuple[int, int, list[str]]:
    """How many numbers both stages have, and to which step; a line on those that are not equal."""
    rows, other_rows = (
        {(int(row["step"]), str(row["kind"])): row for kind in ("train", "eval") for row in stage.of_kind(kind)}
        for stage in (first, second)
    )
    common = sorted(rows.keys() & other_rows.keys(), key=lambda key: (key[0], key[1] == "eval"))
    named = [
        (name, key[0], rows[key][name], other_rows[key][name])
        for key in common
        for name in rows[key]
        if name in other_rows[key] and not name.startswith(NO_NUMBERS)
    ]
    last = common[-1][0] if common else 0
    unequal = [each for each in named if each[2] != each[3]]
    if not unequal:
        return len(named), last, []
    every = [*rows.values(), *other_rows.values()]
    largest = {name: max(abs(number(row, name) or 0.0) for row in every) for name in {each[0] for each in unequal}}
    dtype = str((first.manifest or {}).get("hardware", {}).get("dtype"))
    tolerance = SIXTH_DIGIT + STEPS.get(dtype, STEPS["fp32"])
    beyond = (
        f"by more than rounding explains from step {step} on ({name})"
        for name, step, one, other in unequal
        if None in (one, other) or abs(one - other) > tolerance * largest[name]
    )
    name, step, one, other = unequal[0]
    explained = next(beyond, "by no more than rounding explains")
    return len(named), last, [f"numbers: from step {step} on ({name} is {one} and {other}), {explained}"]


def _shown(value: object) -> str:
    """A value, and of digests the beginnings."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,52}\b", r"\1", text)
