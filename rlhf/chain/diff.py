"""`rlhf diff RUN RUN`: the first thing that makes two runs differ, and everything else that does."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rlhf import console
from rlhf.chain.options import SECTIONS, ChainConfig
from rlhf.chain.stages import STAGES
from rlhf.config import Config, parser
from rlhf.errors import UserError
from rlhf.report.differences import KINDS, Comparison, Difference, Numbers, compare
from rlhf.report.records import StageRecord, read_stage

WIDTH = 32
"""characters of a value that are shown"""
CONTEXT = 6
"""of these, before the first that differs in the other run"""
NO_EFFECT = "without an effect on results beyond rounding"


class DiffConfig(Config):
    """The two runs."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...] = Field((), max_length=2)
    """output directories of two runs, or of one of their stages each; finished or not"""


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf diff") -> int:
    """Exit code 1 if the runs differ, 2 for a user's mistake."""
    options = parser.parse(DiffConfig, console.words(argv), program, "Say what makes two runs differ, the first first.")
    if len(options.runs) != 2:
        raise UserError("rlhf diff: expected two runs, the --output-dir of both, or one of their stages")
    first, second = (_stages(Path(run)) for run in options.runs)
    common = [step for step in first if step in second]
    if not common:
        names = " and ".join(", ".join(s.directory.name for s in stages.values()) for stages in (first, second))
        raise UserError(f"{' and '.join(options.runs)}: got {names}, expected a stage that both have")
    compared = [compare(first[step], second[step], _options(step)) for step in common]
    console.say(verdict(compared))
    rows = [("", *options.runs), *table(compared)]
    widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
    for row in rows if len(rows) > 1 else ():
        console.say(f"{row[0]:<{widths[0]}}{row[1]:<{widths[1]}}{row[2]}".rstrip())
    console.say("numbers")
    for each in compared:
        console.say(f"  {each.stage}: {_numbers(each.numbers)}")
    for kinds in dict.fromkeys(each.not_recorded for each in compared if each.not_recorded):
        stages = ", ".join(each.stage for each in compared if each.not_recorded == kinds)
        console.say(f"not recorded in both runs, so not compared: {', '.join(kinds)} ({stages})")
    for run, those, others in zip(options.runs, (first, second), (second, first), strict=True):
        for step in [step for step in those if step not in others]:
            console.say(f"{those[step].directory.name} is only in {run}")
    return int(any(each.matters for comparison in compared for each in comparison.differences))


def _stages(run: Path) -> dict[int, StageRecord]:
    """The stages of a run that have recorded anything, or the one that it is. Raises: UserError without any."""
    folders = {step: run if run.resolve().name == each.name else run / each.name for step, each in STAGES.items()}
    records = {step: read_stage(folder, STAGES[step]) for step, folder in folders.items() if folder.is_dir()}
    stages = {step: record for step, record in records.items() if record.rows}
    if not stages:
        raise UserError(f"{run}: no stage has recorded metrics there; expected the --output-dir of a run, or a stage")
    return stages


def _options(step: int) -> type[Config]:
    section: Any = ChainConfig.model_fields[SECTIONS[step]].annotation
    return section


def verdict(compared: Sequence[Comparison]) -> str:
    """What differs first, in one sentence."""
    differences = [each for comparison in compared for each in comparison.differences if each.matters]
    if not differences:
        count = sum(comparison.numbers.count for comparison in compared)
        if all(comparison.is_finished for comparison in compared):
            return f"The same to the last bit: {count:,} numbers, and the weights of all models."
        ends = ", ".join(f"{each.stage} to step {each.numbers.last}" for each in compared)
        return f"The same as far as both are recorded: {count:,} numbers, {ends}."
    first = differences[0]
    if first.kind == "numbers":
        [numbers] = [each.numbers for each in compared if each.stage == first.stage]
        return f"Nothing that is recorded differs before the numbers: {first.stage}: {_numbers(numbers)}."
    if first.kind == "weights":
        return f"Every number is equal in the six digits that are recorded, and the weights differ: {first.stage}."
    stages = [each.stage for each in differences if _key(each) == _key(first)]
    one, other = _shown(*first.values)
    return f"The first difference is in the {first.kind} of {', '.join(stages)}: {first.name}: {one} and {other}."


def table(compared: Sequence[Comparison]) -> Iterator[tuple[str, str, str]]:
    """Everything that differs, by kind: its name, and the values of both runs."""
    differences = [each for comparison in compared for each in comparison.differences if each.kind != "numbers"]
    stages: dict[Any, list[str]] = {}
    for each in differences:
        stages.setdefault(_key(each), []).append(each.stage)
    for kind in (*KINDS, NO_EFFECT):
        rows = {_key(each): each for each in differences if (each.kind if each.matters else NO_EFFECT) == kind}
        if rows:
            yield kind, "", ""
        for key, each in rows.items():
            where = "" if len(stages[key]) == len(compared) else f", {' and '.join(stages[key])}"
            yield f"  {each.name}{where}", *_shown(*each.values)


def _numbers(numbers: Numbers) -> str:
    """How far the numbers of a stage are equal."""
    if numbers.first is None:
        return f"{numbers.count:,} numbers are equal, to step {numbers.last}"
    first, beyond = numbers.first, numbers.beyond_rounding
    text = f"equal up to step {first.step - 1}; " if first.step else ""
    text += f"at step {first.step} {first.metric} is {first.values[0]} and {first.values[1]}"
    if beyond is None:
        return f"{text}, and no number is farther apart than rounding explains"
    if beyond == first:
        return f"{text}, more than rounding explains"
    values = f"{beyond.metric} is {beyond.values[0]} and {beyond.values[1]}"
    return f"{text}; from step {beyond.step} on more than rounding explains ({values})"


def _key(difference: Difference) -> tuple[str, str, str]:
    return difference.kind, difference.name, str(difference.values)


def _shown(*values: object) -> tuple[str, str]:
    """Two values, of long ones the part from where they differ, and the beginnings of digests."""
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    one, other = (re.sub(r"^([0-9a-f]{12})[0-9a-f]{20,52}$", r"\1", text) for text in texts)
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0) - CONTEXT
    cut = start > 0 and max(len(one), len(other)) > WIDTH
    texts = [f"...{text[start:]}" if cut else text for text in (one, other)]
    one, other = (text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..." for text in texts)
    return one, other
