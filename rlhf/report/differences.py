"""What makes two runs differ, in the order in which a run meets it. Torch-free.

A stage is compared kind by kind (KINDS): what it was given comes before what it computed, so that the first difference
is a cause. Two numbers differ by rounding if they are no farther apart than one step of the run's dtype and one unit of
the sixth digit, the last that metrics.jsonl has, of the largest value that the metric has in either run: a KL near 0 is
the difference of large numbers. Training amplifies what begins as rounding.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config import Config, Tree
from rlhf.config.foreign_options import gone
from rlhf.config.secrets import masked
from rlhf.report.records import StageRecord, number
from rlhf.storage import manifests

KINDS = (
    "versions", "hardware", "options", "files", "rows", "template", "tokenizer", "starting weights", "random draws",
    "numbers", "weights",
)  # fmt: skip
"""in the order of a run"""
CAUSES = tuple(kind for kind in KINDS if kind not in ("rows", "numbers", "weights"))
"""kinds of what a stage was given, but for rows"""
NO_NUMBERS = (
    "kind", "step", "seconds", "forward_seconds", "tokens_per_second", "peak_memory", "request", "cached_answers",
)  # fmt: skip
"""how the columns of metrics.jsonl begin that no result is in"""
STEPS = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""of a dtype: between 1 and the next number"""
SIXTH_DIGIT = 1e-5
SPLITS = {"train": "to train on", "evaluation": "held out"}


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that two runs do not have alike."""

    stage: str
    kind: str
    name: str
    values: tuple[object, object]
    matters: bool = True
    """whether results can differ by more than rounding because of it"""


@dataclass(frozen=True, slots=True)
class Parting:
    """A number that both runs have and that is not equal."""

    metric: str
    step: int
    values: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """How the numbers of metrics.jsonl compare that both stages have."""

    count: int
    last: int
    """the last step of both"""
    first: Parting | None
    """the first that is not equal"""
    beyond_rounding: Parting | None
    """the first that differs by more than rounding"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A stage in two runs."""

    stage: str
    differences: tuple[Difference, ...]
    """in the order of KINDS"""
    numbers: Numbers
    not_recorded: tuple[str, ...]
    """kinds that one of the two, or both, has not recorded"""
    is_finished: bool
    """whether both are"""


def compare(first: StageRecord, second: StageRecord, options: type[Config]) -> Comparison:
    """Compare a stage of two runs. options: the class of its options, for those that an older run did not have"""
    name, facts = first.directory.name, [_facts(stage, options) for stage in (first, second)]
    numbers = compare_numbers(first, second)
    differences = [*_rows(first, second, facts[0]["data"], facts[1]["data"])]
    same_rows = not any(each.matters for each in differences)
    missing = [] if facts[0]["data"] and facts[1]["data"] else ["rows"]
    for kind in CAUSES:
        one, other = (fact[kind] for fact in facts)
        if not (one and other):
            missing.append(kind)
            continue
        for part in dict.fromkeys([*one, *other]):
            values = one.get(part), other.get(part)
            if values[0] != values[1] and (kind == "options" or None not in values):  # else one has not recorded it
                matters = kind != "options" or _matters(part, options, same_rows, facts)
                differences.append(Difference(name, kind, part, values, matters))
    if numbers.first is not None:
        differences.append(Difference(name, "numbers", numbers.first.metric, numbers.first.values))
    differences += _saved_weights(first, second)
    differences.sort(key=lambda each: KINDS.index(each.kind))
    is_finished = first.manifest is not None and second.manifest is not None
    return Comparison(name, tuple(differences), numbers, tuple(missing), is_finished)


def _facts(stage: StageRecord, options: type[Config]) -> dict[str, Tree]:
    """What a stage was given, by kind: of its manifest, or of its newest checkpoint if it is unfinished."""
    defaults = dict(gone()) | options.model_construct().model_dump(mode="json")
    newest = sorted(stage.directory.glob(f"{manifests.CHECKPOINTS}/step-*/{manifests.MANIFEST}"))[-1:]
    manifest: Tree = stage.manifest or (manifests.parse(newest[0])[0] if newest else {})
    config = defaults | masked(manifest.get("config") or stage.config)
    inputs: Tree = manifest.get("inputs", {})
    models = [entry["path"] for entry in inputs.values()]
    tokenizer, draws = manifest.get("tokenizer"), manifest.get("random_generators")
    return {
        "versions": manifest.get("versions", {}),
        "hardware": manifest.get("hardware", {}),
        "options": dict(_flat(config, str(config.get("output_dir", "")))),
        "files": {"": None} | {name: x for name, x in manifest.get("user_files", {}).items() if name not in models},
        "template": manifest.get("template", {}),
        "tokenizer": {} if tokenizer is None else {"vocabulary, splits and added tokens": tokenizer},
        "starting weights": {name: entry["weights"] for name, entry in inputs.items() if entry.get("weights")},
        "random draws": {} if draws is None else {"generators before the first step": draws},
        "data": manifest.get("data")
        or {s["data_path"]: s["fingerprint"] for s in (stage.data or {}).get("sources", [])},
    }


def _flat(config: Mapping[str, Any], output_dir: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Options by dotted name, with paths in the output directory relative to it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, output_dir, f"{prefix}{name}.")
        elif prefix + name != "output_dir":
            text = json.dumps(value, ensure_ascii=False)
            yield prefix + name, json.loads(text.replace(f'"{output_dir}/', '"')) if output_dir else value


def _matters(name: str, options: type[Config], same_rows: bool, facts: Sequence[Mapping[str, Tree]]) -> bool:
    """Whether an option that differs can change results. The name of a file or model with the same content cannot."""
    if name.endswith("data_path"):
        return not same_rows
    weights = [fact["starting weights"].get(name) for fact in facts]
    if None not in weights:
        return weights[0] != weights[1]
    return name.partition(".")[0] not in options.declared("FREE") or name.endswith(".quantize")


def _rows(first: StageRecord, second: StageRecord, data: Tree, other_data: Tree) -> Iterator[Difference]:
    """How the rows differ: those that a stage has used, by their digests; without these the content of its files."""
    stage, another_seed = first.directory.name, first.config.get("data_seed") != second.config.get("data_seed")
    splits = [[(each.data or {}).get(split, {}) for split in SPLITS] for each in (first, second)]
    recorded = all("as_a_set" in split for run in splits for split in run)
    differ = False
    for title, one, other in zip(SPLITS.values(), *splits, strict=True):
        if recorded and one["in_order"] != other["in_order"]:
            differ, (change, key) = True, _change_of_rows(one, other)
            change = "of another data_seed" if another_seed else change  # it is part of the digests
            yield Difference(stage, "rows", f"{title}: {change}", (one[key], other[key]))
    if differ or [*data.values()] == [*other_data.values()]:
        return
    for path in dict.fromkeys([*data, *other_data]):
        if data.get(path) != other_data.get(path):
            name = f"content of {path}" + (", though not of its rows here" if recorded else "")
            yield Difference(stage, "rows", name, (data.get(path), other_data.get(path)), not recorded)


def _change_of_rows(one: Tree, other: Tree) -> tuple[str, str]:
    """What has changed, and the number or digest that shows it."""
    if one["as_a_set"] == other["as_a_set"]:
        return "another order", "in_order"
    if one["rows"] == other["rows"]:
        return "as many, other text", "as_a_set"
    return "more" if one["rows"] < other["rows"] else "fewer", "rows"


def compare_numbers(first: StageRecord, second: StageRecord) -> Numbers:
    """Compare the numbers that both stages have, in the order in which they were measured."""
    rows, others = (
        {(int(row["step"]), str(row["kind"])): row for kind in ("train", "eval") for row in stage.of_kind(kind)}
        for stage in (first, second)
    )
    common = sorted(rows.keys() & others.keys(), key=lambda key: (key[0], key[1] == "eval"))
    named = [
        (name, key[0], (rows[key][name], others[key][name]))
        for key in common
        for name in rows[key]
        if name in others[key] and not name.startswith(NO_NUMBERS)
    ]
    unequal = [Parting(*each) for each in named if each[2][0] != each[2][1]]
    every = [*rows.values(), *others.values()]
    largest = {name: max(abs(number(row, name) or 0.0) for row in every) for name in {each.metric for each in unequal}}
    dtype = str((first.manifest or {}).get("hardware", {}).get("dtype"))
    tolerance = SIXTH_DIGIT + STEPS.get(dtype, STEPS["fp32"])
    beyond = (
        each
        for each in unequal
        if None in each.values or abs(each.values[0] - each.values[1]) > tolerance * largest[each.metric]
    )
    return Numbers(len(named), common[-1][0] if common else 0, next(iter(unequal), None), next(beyond, None))


def _saved_weights(first: StageRecord, second: StageRecord) -> Iterator[Difference]:
    """The files of weights whose bits differ."""
    files, other_files = ((stage.manifest or {}).get("files", {}) for stage in (first, second))
    for name in [name for name in files if name in other_files]:
        values = files[name]["sha256"], other_files[name]["sha256"]
        if name.endswith(manifests.WEIGHTS) and values[0] != values[1]:
            yield Difference(first.directory.name, "weights", name, values)
