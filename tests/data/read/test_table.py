"""Records become rows through an adapter's `parse`; every record is accounted for."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from data.read.paths import TableConfig
from data.read.records import Phase, Record, Skipped, Unusable
from data.read.table import NO_COUNTERPART, Labelled, Parsed, Ranked, Table, phase_rows, ranked_rows
from rlhf.errors import UserError
from rlhf.types import Message, Row

PROMPT = (Message("user", "q"),)
OTHER = (Message("user", "other"),)
PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")


@dataclass
class Listed:
    """A reader over a list, which records the requested splits."""

    entries: list[Any]
    splits: list[str] = field(default_factory=list)

    def records(self, split: str, config: TableConfig) -> Iterator[tuple[str, Record | Skipped]]:
        self.splits.append(split)
        return ((f"f:{i + 1}", record) for i, record in enumerate(self.entries))

    def fingerprint(self, split: str, config: TableConfig) -> str:
        return f"{split} {config.streaming}"


def parse(record: Record, location: str) -> Parsed:
    if record["kind"] == "bad":
        raise UserError(f"{location}: bad")
    if record["kind"] == "tie":
        raise Unusable("tie")
    return Row(PROMPT, record["kind"])


def test_every_record_gives_a_row_or_why_there_is_none() -> None:
    result = [{"kind": "a"}, {"kind": "bad"}, Skipped("f:3: broken", bad=True), {"kind": "tie"}]
    table = Table(Listed(result), TableConfig(), parse)
    for phase in PHASES:
        assert list(table.rows(phase)) == [
            Row(PROMPT, "a"),
            Skipped("f:2: bad", bad=True),
            Skipped("f:3: broken", bad=True),
            Skipped("tie"),
        ]
        assert [row.location for row in table.rows(phase)] == ["f:1", "", "", "f:4"]  # of the others the reason says it


def test_rows_come_while_records_are_read() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield {"kind": "a"}

    table = Table(Listed(endless()), TableConfig(streaming=True), parse)  # type: ignore[arg-type]
    assert table.streaming
    assert next(table.rows("reward")) == Row(PROMPT, "a")


def test_each_phase_has_its_split_unless_the_user_names_one() -> None:
    path = Listed([])
    table = Table(path, TableConfig(), parse, splits={"sft": "train_sft"})
    for phase in PHASES:
        list(table.rows(phase))
    assert path.splits == ["train_sft", "train", "train"]
    assert table.fingerprint("sft") == "train_sft False"
    named = Table(path, TableConfig(split="test"), parse, splits={"sft": "train_sft"})
    list(named.rows("sft"))
    assert path.splits[-1] == "test"


def test_ranked_responses() -> None:
    ranked = Ranked(PROMPT, (("worst", -1.0), ("best", 2.5), ("good", 1.0), ("as good", 1.0)), "g", {"x": 1})
    assert list(ranked_rows(ranked, "sft", "7")) == [Row(PROMPT, "best", None, "g", {"x": 1})]
    assert list(ranked_rows(ranked, "ppo", "7")) == [Row(PROMPT, None, None, "g", {"x": 1})]
    pairs = [
        ("as good", "worst"),
        ("best", "as good"),
        ("best", "good"),
        ("best", "worst"),
        ("good", "worst"),
    ]
    rows = [Row(PROMPT, *pair, "g", {"x": 1}, "7") for pair in pairs]
    assert sorted(ranked_rows(ranked, "reward", "7"), key=str) == sorted(rows, key=str)
    named = replace(ranked, location="f:3")
    assert {row.location for phase in PHASES for row in ranked_rows(named, phase, "7")} == {"f:3"}


def test_each_ranked_list_has_a_name_of_its_own_and_a_single_pair_none() -> None:
    three, two = (Ranked(PROMPT, tuple((str(i), float(i)) for i in range(count))) for count in (3, 2))
    rows = list(phase_rows([three, Skipped("tie"), two, three], "reward"))
    names = [row.ranking for row in rows if isinstance(row, Row)]
    assert [bool(name) for name in names] == [True] * 3 + [False] + [True] * 3
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("responses", "reasons"),
    [
        ((), ("no response", "no response")),
        ((("one", 1.0),), (None, "only one response")),
        ((("one", 1.0), ("two", 1.0)), (None, "tie")),
    ],
)
def test_ranked_responses_that_make_no_pair(responses: Any, reasons: tuple[str | None, str]) -> None:
    for phase, reason in zip(("sft", "reward"), reasons, strict=True):
        (row,) = ranked_rows(Ranked(PROMPT, responses), phase, "0")  # type: ignore[arg-type]
        assert (row.reason if isinstance(row, Skipped) else None) == reason


def labelled(text: str, prompt: tuple[Message, ...] = PROMPT) -> Labelled:
    return Labelled(prompt, text, text.startswith("good"), "g", {"of": text}, f"at {text}")


def test_labelled_responses() -> None:
    items = [labelled("good 1"), labelled("bad 1", OTHER), labelled("bad 2"), Skipped("tie"), labelled("good 2")]
    assert list(phase_rows(items, "sft")) == [
        Row(PROMPT, "good 1", None, "g", {"of": "good 1"}),
        Skipped("labelled bad"),
        Skipped("labelled bad"),
        Skipped("tie"),
        Row(PROMPT, "good 2", None, "g", {"of": "good 2"}),
    ]
    assert [row.prompt for row in phase_rows(items, "ppo") if isinstance(row, Row)] == [PROMPT, OTHER, PROMPT, PROMPT]
    assert list(phase_rows(items, "reward")) == [
        Skipped("tie"),
        Row(PROMPT, "good 1", "bad 2", "g", {"of": "good 1"}),  # after all have been read
        Row(PROMPT, "good 2", "bad 2", "g", {"of": "good 2"}),
        Skipped(NO_COUNTERPART),
    ]
    assert [row.location for row in phase_rows(items, "reward")] == ["", "at good 1", "at good 2", "at bad 1"]


def test_the_rarer_label_repeats_in_turn() -> None:
    items = [labelled("bad 1"), labelled("good 1"), labelled("bad 2"), labelled("bad 3"), labelled("good 2")]
    pairs = [(row.response, row.rejected) for row in phase_rows(items, "reward") if isinstance(row, Row)]
    assert pairs == [("good 1", "bad 1"), ("good 2", "bad 2"), ("good 1", "bad 3")]
