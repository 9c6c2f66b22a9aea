"""Rows that are equal, contradict each other, or hardly differ: counted and named by file and line."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataOptions
from data.dataset import Recipe, open_datasets
from data.prepare.gather import TABLE
from data.prepare.repetition import ALIKE, CONTRADICTORY, EQUAL, compare_sides, repetitions
from data.prepare.split import PHASES, text_digest
from data.preview import command as preview
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.support import tiny


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> Row:
    return Row((Message("user", prompt),), chosen, rejected, **more)


def table_of(rows: list[Row]) -> np.ndarray:
    table = np.zeros(len(rows), TABLE)
    for entry, row in zip(table, rows, strict=True):
        entry["digest"] = text_digest(repr(row), 0)
        entry["pair"], entry["swapped"], entry["alike"] = compare_sides(row)
    return table


def test_counts_beside_a_comparison_of_all_texts() -> None:
    drawn = random.Random(0)
    texts = ("a", "A ", "b", "c", "", "b  b", "B\nb")
    rows = [pair(drawn.choice("pq"), drawn.choice(texts), drawn.choice(texts)) for _ in range(60)]
    found = repetitions(table_of(rows))
    every = range(len(rows))
    assert found[EQUAL].tolist() == [i for i in every if rows[i] in rows[:i]]
    opposite = [pair(row.prompt[0].content, row.rejected or "", row.response or "") for row in rows]
    assert found[CONTRADICTORY].tolist() == [i for i in every if opposite[i] in rows and opposite[i] != rows[i]]
    alike = {frozenset(("a", "A ")), frozenset(("b  b", "B\nb"))}
    assert found[ALIKE].tolist() == [i for i in every if {rows[i].response, rows[i].rejected} in alike]
    assert all(map(len, found.values()))


@pytest.mark.parametrize(
    ("sides", "alike"),
    [(("Straße", " strasse"), True), (("ß", "SS\t"), True), (("it is", "itis"), False), (("", " "), True)],
)
def test_case_and_white_space_of_sides(sides: tuple[str, str], alike: bool) -> None:
    for chosen, rejected in (sides, sides[::-1]):
        assert compare_sides(pair("p", chosen, rejected))[2] == alike
        assert not compare_sides(pair("p", chosen, rejected, response_keys={"thinking": "so"}))[2]


def test_a_prompt_is_all_its_messages() -> None:
    first = Row((Message("user", "a"), Message("assistant", "b"), Message("user", "c")), "x", "y")
    second = Row((Message("user", "a"), Message("assistant", "other"), Message("user", "c")), "y", "x")
    assert not len(repetitions(table_of([first, second]))[CONTRADICTORY])


PAIRS = (("w1", "w2", "w3"), ("w4", "w5", "w6"), ("w1", "w3", "w2"), ("w4", "w5", "w6"), ("w7", "w8", "w8 "))
"""the first contradicts the third, the second equals the fourth, the sides of the last differ in a space"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    names = ("prompt", "chosen", "rejected")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in PAIRS))
    return "x.jsonl"


def test_what_the_report_says_of_each_phase(file: str) -> None:
    tokenizer = prepare_tokenizer(tiny.tokenizer(), "plain")
    equal, contradictory = {"rows": 1, "locations": [f"{file}:4"]}, {"rows": 2, "locations": [f"{file}:1", f"{file}:3"]}
    alike = {"rows": 1, "locations": [f"{file}:5"]}
    expected = {
        "sft": {EQUAL: equal},
        "reward": {EQUAL: equal, CONTRADICTORY: contradictory, ALIKE: alike},
        "ppo": {},
    }
    for phase in PHASES:
        shares: Any = tuple(float(name == phase) for name in PHASES)
        options = DataOptions(
            data_path=(file,), data_split=shares, data_cache="cache", eval_fraction=0.0, max_dropped=1.0
        )
        assert open_datasets(options, Recipe(phase), tokenizer).report["repeated"] == expected[phase]


def test_the_preview_has_a_line_for_each_that_there_is(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("words.yaml").write_text("tokenizer:\n  words: [" + ", ".join(f"w{i}" for i in range(9)) + "]\n")
    line = f"--data-path {file} --model words.yaml --chat-template plain --phases reward --rows 0 --data-cache cache"
    words = [*line.split(), "--data-split", "0,1,0", "--eval-fraction", "0"]
    assert preview.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    for reason, count, shown in ((EQUAL, 1, "4"), (CONTRADICTORY, 2, "1 3"), (ALIKE, 1, "5")):
        (counted,) = (row for row in printed if row.startswith(reason) and row.endswith("%"))
        assert counted.removeprefix(reason).split() == [str(count), f"{count / 5:.1%}"]
        assert f"{reason}: {', '.join(f'{file}:{number}' for number in shown.split())}" in printed
    lines = Path(file).read_text().splitlines()
    Path(file).write_text("\n".join(lines[:2]))
    assert preview.main(words) == 0
    assert not any(reason in capsys.readouterr().out for reason in (EQUAL, CONTRADICTORY, ALIKE))
