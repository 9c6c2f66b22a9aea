"""Shares, order and proportions, by content alone."""

import random
import re

import numpy as np
import pytest

from data.config import DataOptions
from data.prepare.split import (
    PHASES,
    blend,
    group_of,
    normalise,
    order_by_group,
    share_of_points,
    text_digest,
)
from rlhf.types import Message, Row
from tests.support.texts import share_of


@pytest.mark.parametrize(
    "text",
    [
        "What is a fox?",
        "  what is\ta  FOX",
        "What is a fox?!",
        "“What is a fox?”",
        "ＷＨＡＴ is a fox",
        "what, is - a fox...",
    ],
)
def test_near_duplicates_are_one_group(text: str) -> None:
    assert normalise(text) == "what is a fox"
    assert group_of(Row((Message("user", text),))) == "what is a fox"


def test_ascii_texts_have_the_words_of_the_regular_expression() -> None:
    draw = random.Random(0)
    texts = ["".join(map(chr, draw.choices(range(128), k=draw.randrange(12)))) for _ in range(3000)]
    for text in [*texts, *map(chr, range(128))]:
        lower = text.casefold()
        assert normalise(text) == " ".join(re.findall(r"\w+", lower) or lower.split())


def test_different_texts_stay_apart() -> None:
    texts = ["a fox", "afox", "a fix", "?!", "?", "狐", "狐狸", "", "1 2", "12", "été", "ete"]
    assert len({normalise(text) for text in texts}) == len(texts)


def test_the_group_decides_else_the_prompt_else_the_response() -> None:
    prompt = (Message("user", "x"),)
    assert group_of(Row(prompt, "r", group="Some group")) == "some group"
    assert group_of(Row(prompt, "r", group=" ")) == "x"
    assert group_of(Row((), "a response")) == "a response"
    assert group_of(Row((), None)) == group_of(Row((), " ")) == ""
    assert group_of(Row((Message("user", "a"), Message("assistant", "b")), "c")) == "a"


def test_eval_data_path_replaces_the_evaluation_share() -> None:
    rows = [Row((Message("user", str(i)),)) for i in range(300)]
    options = DataOptions(eval_fraction=0.5, eval_data_path=("x.jsonl",))
    assert {share_of(row, options) for row in rows} == set(PHASES)


def test_the_edges_of_the_shares() -> None:
    options = DataOptions(eval_fraction=0.25, data_split=(1, 0, 3))
    assert share_of_points(2**62 - 2**12, 0, options) == "evaluation"
    assert share_of_points(2**62, 0, options) == "sft"
    assert share_of_points(2**63, 2**62 - 2**12, options) == "sft"
    assert share_of_points(2**63, 2**62, options) == "ppo"
    assert share_of_points(2**64 - 1, 2**64 - 1, options) == "ppo"


def test_another_seed_makes_another_order_of_the_rows_of_a_group() -> None:
    assert text_digest("a", 0) == text_digest("a", 0) != text_digest("a", 1)
    assert 2**60 < max(text_digest(str(i), 0) for i in range(99)) < 2**64


def test_order_by_hand() -> None:
    groups = np.array([7, 3, 7, 3, 5, 7], dtype=np.uint64)
    digests = np.array([30, 9, 10, 8, 1, 20], dtype=np.uint64)
    # One of every group first, by group: row 3 of group 3, 4 of 5, 2 of 7; then the second ones; then the third.
    assert order_by_group(groups, digests).tolist() == [3, 4, 2, 1, 5, 0]
    assert order_by_group(groups[:0], digests[:0]).tolist() == []


def test_order_does_not_depend_on_where_rows_stand() -> None:
    random = np.random.default_rng(0)
    groups, digests = random.integers(0, 40, 200).astype(np.uint64), random.permutation(200).astype(np.uint64)
    moved = random.permutation(200)
    first = [(groups[i], digests[i]) for i in order_by_group(groups, digests)]
    assert [(groups[moved][i], digests[moved][i]) for i in order_by_group(groups[moved], digests[moved])] == first


def test_proportions_by_hand() -> None:
    assert blend([50, 50], [1, 1], budget=None).tolist() == [[source, row] for row in range(50) for source in (0, 1)]
    # Four rows are 1/8, 3/8, 5/8 and 7/8 of the way, one is 1/2.
    assert blend([1, 4], [1, 4], budget=None).tolist() == [[1, 0], [1, 1], [0, 0], [1, 2], [1, 3]]
    assert blend([3, 9], [1, 3], budget=None).tolist() == [
        [1, 0], [0, 0], [1, 1], [1, 2], [1, 3], [0, 1], [1, 4], [1, 5], [1, 6], [0, 2], [1, 7], [1, 8],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "weights", "budget", "takes"),
    [
        ([100, 100], [0.7, 0.3], 10, [7, 3]),
        ([100, 100], [70, 30], 10, [7, 3]),
        ([100, 100], [0.7, 0.3], None, [99, 43]),  # 142 = 100 / 0.7 rows: no row of the first twice
        ([2, 100], [0.5, 0.5], 20, [10, 10]),
        ([50, 50, 50], [1, 1, 1], 100, [34, 33, 33]),
        ([1000, 10], [1, 0.01], None, [1000, 10]),
    ],
)
def test_proportions(counts: list[int], weights: list[float], budget: int | None, takes: list[int]) -> None:
    picks = blend(counts, weights, budget)
    assert np.bincount(picks[:, 0], minlength=len(counts)).tolist() == takes
    for source, count in enumerate(counts):
        numbers = picks[picks[:, 0] == source, 1].tolist()
        assert numbers == [i % count for i in range(len(numbers))]
    share = np.cumsum(picks[:, 0] == 0) / (1 + np.arange(len(picks)))
    assert abs(share[len(share) // 2 :] - takes[0] / sum(takes)).max() < 2 / len(picks) + 0.05
