"""The right result in a response: numbers as GSM8K writes them, or text, against a column of the data."""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from data.sources import files
from rlhf import rewards
from rlhf.errors import UserError
from rlhf.rewards._comparisons import choice, f1, normalized_text, words
from rlhf.rewards._numbers import number
from tests.rlhf.rewards.responses import context, rollout, samples


def scores(
    spec: str, responses: list[str], cells: list[Any], column: str = "answer", ended: bool = True
) -> list[float]:
    r = replace(rollout(), ended=torch.full((3,), ended))
    rows = tuple(replace(row, columns={column: cell}) for row, cell in zip(r.rows, cells, strict=True))
    s = replace(samples(replace(r, rows=rows)), responses=tuple(responses), answers=tuple(responses))
    last_match: list[float] = rewards.open_source(spec, context(Path()))(s).tolist()
    return last_match


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 48/2 = 24 clips, 72 in all.", "72"),
        ("It costs $1,234.50.", "1234.5"),
        ("-5", "-5"),
        ("-$5", "-5"),
        ("\N{MINUS SIGN}3 degrees", "-3"),
        ("1,000,000", "1000000"),
        (r"\boxed{1{,}234{,}567}", "1234567"),
        (r"$-18,\!000$", "-18000"),
        ("10% of .5", "0.5"),
        ("12.", "12"),
        ("\N{FULLWIDTH DIGIT SEVEN}\N{FULLWIDTH DIGIT TWO}", "72"),
        ("\uff11\uff0c\uff12\uff13\uff14\uff0e\uff15", "1234.5"),  # full width, as a Chinese keyboard writes it
        ("\u7b54\u6848\u662f\uff0d\uff15", "-5"),  # "the answer is", without a space
        ("\u7b54\u6848\u662f-5", "-5"),
        ("\u7b54\u3048\u306f-5", "-5"),  # Japanese
        ("\uff08701\u5e74-762\u5e74\uff09", "762"),  # a range of years
        ("\u67093\uff0c400", "400"),  # a Chinese sentence's comma
        ("€ 20", "20"),
        ("007", "7"),
        ("1 000", "1000"),
        (r"10\,000", "10000"),
        ("1e5", "100000"),
        ("-2.5E-3 m", "-0.0025"),
        ("3/4", "0.75"),
        ("-1/8.", "-0.125"),
        ("2 1/2 cups", "2.5"),
        (r"$\frac{3}{4}$", "0.75"),
        (r"-\dfrac{3}{4}", "-0.75"),
        (r"\boxed{\frac{-3}{4}}", "-0.75"),
        (r"\tfrac34", "0.75"),
        (r"-2\frac{1}{2}", "-2.5"),
        (r"50\%", "50"),
        ("$1,000.00", "1000"),
        (r"-\$5", "-5"),
        ("In 2020, 100 came", "100"),
        ("it pays $7,200/year, or 14000 a year", "14000"),
        ("up at 9 a.m.", "9"),
        ("1200/240 = 5 m/s", "5"),
        ("11 m&m packs", "11"),
        ("A) 72", "72"),
        ("**Answer:** 72", "72"),
        ("<<48+24=72>>72", "72"),
        # as the results of MATH write them
        (r"\frac 59", "0.5555555555555555555555555556"),
        (r"\frac{5} {8}", "0.625"),
        (r"\cfrac{5}{8}", "0.625"),
        (r"15\mbox{ cm}^2", "15"),
        (r"15\text{ square inches}", "15"),
        ("a field of 15 m^2.", "15"),
        ("- 3", "-3"),
        (r"so $x = \boxed{-3}$.", "-3"),
        (r"90^\circ", "90"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        (r"\$18.90", "18.9"),
        (r"$2x + 3 = 10$, hence $x=3.5$.", "3.5"),
    ],
)
def test_the_last_number(text: str, expected: str) -> None:
    assert number(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "none", "...", "- $ ,", "3/0"])
def test_no_number(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        r"\sqrt{2}", r"\sqrt2", r"3\sqrt{13}", r"the answer is $\sqrt{2}$.", "√2", "(3, 2)", "(3,2)",
        r"\left( 3, \frac{\pi}{2} \right)", r"\left(\frac{3}{5},\frac{8}{3}\right)", "[0,1)", "[-2, 7]",
        r"(-\infty, 5]", "1,-2", "1, -2", "3, 5, 7", "x^2+1", "x^{2}", "x²+1", "2k+2", "6 - 5i", "5i", "2x", r"2\pi",
        r"\frac{\pi}{2}", r"\frac{12}{n}", r"\frac{10}{\pi}", "52_8", "2516_8", "10^5", r"2^{10}", r"\log_2 8",
        r"\binom{4}{2}", "3 + 4", r"3 \cdot 4", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"1 \pm 2",
        "x \\in \\{1, 2\\}", "between 3-4", "(7)-2", "one of 1,2,3", "2,3456", "in 2020 100 came", "on 7/8/2024",
        r"\frac{1}{2}-3", "10:30", "\uff082\uff09-5", "$2k per month",
    ],
)  # fmt: skip
def test_a_part_of_an_expression_is_no_result(text: str) -> None:
    assert number(text) is None


def test_gsm8k() -> None:
    cells = ["48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72", "#### 1,200", "5 - 7 = -2\n#### -2"]
    assert scores("match", ["24 + 48 = 72", "$1200.00", "it is -2"], cells) == [1.0, 1.0, 1.0]
    assert scores("match", ["72 and then 73", "12", "2"], cells) == [0.0, 0.0, 0.0]
    assert scores("match,right=2,wrong=-0.5", ["72", "", "nothing"], cells) == [2.0, -0.5, -0.5]
    thirds = ["1/3", r"\frac{2}{6}", "0.333"]
    assert scores("match", thirds, [r"#### \frac13"] * 3) == [1.0, 1.0, 0.0]


def test_the_last_number_of_a_cut_response_is_no_result() -> None:
    assert scores("match", ["72"] * 3, ["72"] * 3, ended=False) == [0.0] * 3
    assert scores("match,pattern='#### (.+)'", ["#### 72", "72", ""], ["72"] * 3, ended=False) == [1.0, 0.0, 0.0]


def test_a_pattern_does_not_find_a_result_in_a_thought() -> None:
    s = samples(replace(rollout(), rows=tuple(replace(row, columns={"answer": "7"}) for row in rollout().rows)))
    s = replace(
        s, responses=("<think>it is 7", "<think>it is 7</think>it is 8", "it is 7"), answers=("", "it is 8", "it is 7")
    )
    assert rewards.open_source("match,pattern=is (.+)", context(Path()))(s).tolist() == [0.0, 0.0, 1.0]


def test_gsm8k_as_its_file_is_read(tmp_path: Path) -> None:
    """Its answer is the response of a demonstration, or a column where only the prompt is named."""
    record = {"question": "48/2 + 48?", "answer": "48/2 + 48 = 72\n#### 72"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(record))
    for options in ({}, {"shape": "prompt", "prompt": "question"}):
        (row,) = files.build(files.Config(**options), str(tmp_path / "gsm8k.jsonl")).rows("ppo")
        r = replace(rollout(), rows=(row,) * 3, ended=torch.ones(3, dtype=torch.bool))  # type: ignore[arg-type]
        s = replace(samples(r), responses=("72", "7", "#### 72"), answers=("72", "7", "#### 72"))
        assert rewards.open_source("match", context(Path()))(s).tolist() == [1.0, 0.0, 1.0]


def test_a_pattern_says_what_counts() -> None:
    spec = r"match,column=gold,pattern=answer is\s*(\S+)"
    assert scores(spec, ["the answer is 7, not 8", "7", "answer is 1; answer is 7"], [7, 7, 7.0], "gold") == [1, 0, 1]
    assert scores("match", ["100000000000000000000", "20", "5"], [1e20, 1e20, 5.0]) == [1, 0, 1]
    assert scores("match,pattern='#### (.+)'", ["#### 4\n5", "4", "####4"], [4] * 3) == [1, 0, 0]
    boxed = r"match,pattern='\\boxed{([^}]*)}'"
    assert scores(boxed, [r"\boxed{3} or 4", "3", r"\boxed{} 3"], ["3"] * 3) == [1, 0, 0]


def test_a_result_inside_a_column_as_in_the_data_of_verl() -> None:
    cells = [{"style": "rule", "ground_truth": truth} for truth in ("7", "#### 8", "9")]
    for column in ("", ",column=reward_model.ground_truth"):
        assert scores(f"match{column}", ["7", "8", "8"], cells, "reward_model") == [1, 1, 0]
    with pytest.raises(UserError, match=r"no row has a column 'reward_model.truth'; have reward_model"):
        scores("match,column=reward_model.truth", ["7"] * 3, cells, "reward_model")


def test_text_but_for_case_and_space() -> None:
    assert scores("match,compare=text", [" New  york\n", "York", "new york."], ["New York"] * 3) == [1, 0, 0]
    either = [["Paris", "Paname"]] * 3
    assert scores("match,compare=text", ["paname", "paris", "lutece"], either) == [1, 1, 0]
    assert scores("match,compare=text,pattern='[A-E]'", ["A, no: B", "B or C", "none"], ["B"] * 3) == [1, 0, 0]
    first = r"match,compare=text,column_pattern='^(\w+)'"
    assert scores(first, ["yes", "Yes", "no"], ["yes, because"] * 3) == [1, 1, 0]
    assert normalized_text(" \n ") is None


def test_a_source_of_the_user_checks_its_rows(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "from rlhf.config import Config as Base\nfrom rlhf.errors import UserError\n"
        "class Config(Base):\n    least: int = 1\ndef build(config, context): ...\n"
        "def check_rows(config, rows):\n    if len(rows) < config.least:\n        raise UserError(f'{len(rows)}')\n"
        "    1 / config.least\n"
    )
    rows = iter(rollout().rows)
    with pytest.raises(UserError, match=r"^3$"):
        rewards.check_rows(f"{source},least=4", rows)
    rewards.check_rows(f"{source},least=3", rollout().rows)
    with pytest.raises(UserError, match=r"check_rows: .*mine\.py:9: in check_rows: ZeroDivisionError: "):
        rewards.check_rows(f"{source},least=0", rollout().rows)
    rewards.check_rows("length,target=3", rollout().rows)


@pytest.mark.parametrize(
    ("spec", "cells", "parts"),
    [
        ("match,column=gold", ["1"] * 3, ["no row has a column 'gold'", "have answer"]),
        ("match", ["1", "none", "1"], ["column 'answer'", "got 'none'", "no number"]),
        ("match", ["1", None, "1"], ["got 'None'", "no number"]),
        ("match", ["1", float("nan"), "1"], ["got 'nan'", "no number"]),
        ("match", ["1", [], "1"], ["got '[]'"]),
        ("match,column_pattern=x", ["1"] * 3, ["got '1'", "column_pattern"]),
        ("match,pattern=(", ["1"] * 3, ["pattern: Input should be a valid regular expression"]),
        ("match,pattern=#### (.+)", ["1"] * 3, ["pattern", "valid"]),
    ],
)
def test_mistakes_are_one_line(spec: str, cells: list[Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        scores(spec, ["1"] * 3, cells)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("the answer is (C).", "C"),
        ("Answer: D", "D"),
        ("**Answer: A**", "A"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{E}}", "E"),
        ("(A) is wrong, so (B)", "B"),
        ("C) Paris", "C"),
        ("C. Paris is a city", "C"),
        ("I think\n**D**", "D"),
        ("A bird in the hand", None),
        ("I do not know", None),
        ("Plan B failed", None),
        ("the answer is Bob's", None),
        ("", None),
    ],
)
def test_the_last_choice_of_a_text(text: str, expected: str | None) -> None:
    assert choice(text) == expected


def test_words_as_squad_compares_them() -> None:
    """Worked by hand from the paper's rules: 2 of 3 words of the result and 2 of 4 right ones are common."""
    assert words("The  Eiffel Tower, (in) PARIS!") == ("eiffel", "tower", "in", "paris")
    assert words("so <answer>a cat</answer> or <answer>An owl.</answer> it is") == ("owl",)
    assert words("the, a!") is None
    assert f1(("cat", "sat", "up"), ("cat", "sat", "on", "mat")) == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5))
    assert f1(("cat", "cat"), ("cat",)) == pytest.approx(2 / 3) and f1(("x",), ("y",)) == 0


@pytest.mark.parametrize(
    ("compare", "responses", "cells", "expected"),
    [
        ("choice", ["so (B)", "no idea", "Answer: B"], ["B", "A", ["A", "C"]], [1, 0, 0]),
        ("words", ["the Eiffel tower!", "tower", "Paris."], ["Eiffel Tower", "bridge", ["Rome", "paris"]], [1, 0, 1]),
        ("f1", ["the Eiffel tower!", "a tower", "Rome"], ["Eiffel Tower", "Tower Bridge", "Paris"], [1, 2 / 3, 0]),
        (
            "math",
            [r"so $\frac{1}{\sqrt{2}}$", r"\boxed{(3, 4)}", "$x + 1$"],
            [r"\frac{\sqrt{2}}{2}", "(3,4)", "$x + 2$"],
            [1, 1, 0],
        ),
    ],
)  # fmt: skip
def test_other_comparisons(compare: str, responses: list[str], cells: list[Any], expected: list[float]) -> None:
    assert scores(f"match,compare={compare}", responses, cells) == pytest.approx(expected)


def test_a_part_of_a_right_result_has_its_part_of_the_score() -> None:
    spec = "match,compare=f1,right=2,wrong=-1"
    assert scores(spec, ["owl", "a grey owl", "cat"], ["owl"] * 3) == pytest.approx([2, 2 / 3 * 3 - 1, -1])


def test_a_result_that_the_comparison_cannot_read_is_told_while_data_are_read() -> None:
    for compare, cell in (("choice", "Paris"), ("words", "the"), ("math", "")):
        with pytest.raises(UserError, match=f"there is no {compare} to compare"):
            scores(f"match,compare={compare}", ["x"] * 3, [cell] * 3)
