"""Trees of messages: flat and nested, in any order, with messages left out."""

import gzip
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from data.read.records import Phase, Skipped
from rlhf.plugins import build
from rlhf.types import Message, Row

SHARED = Path(__file__).parents[4] / "shared/data/oasst-en-trees"


def say(*turns: str) -> tuple[Message, ...]:
    """Turns of user and assistant by turns."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(turns))


def rows(folder: Path, spec: str, phase: Phase, *records: dict[str, Any]) -> list[Row | Skipped]:
    (folder / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(build("data.sources", spec, str(folder / "x.jsonl")).rows(phase))


def pairs(result: list[Row | Skipped]) -> list[tuple[str | None, str | None] | str]:
    return [(row.response, row.rejected) if isinstance(row, Row) else row.reason for row in result]


def message(name: str, above: str | None, rank: int | None = None, **more: Any) -> dict[str, Any]:
    """A flat message; names that begin with p are the prompter's. The text is the name in capitals."""
    role = "prompter" if name.startswith("p") else "assistant"
    return {"message_id": name, "parent_id": above, "role": role, "text": name.upper(), "rank": rank, **more}


TREE = [
    message("a2", "p1", 2),
    message("p1", None),
    message("a0", "p1", 0),
    message("p2", "a0"),
    message("a1", "p1", 1),
    message("b0", "p2", 0),
    message("p3", "a2"),
]
"""p1 with three ranked replies; below the best p2 with one, below the worst p3 with none."""


def test_a_tree_in_any_order(tmp_path: Path) -> None:
    result = rows(tmp_path, "oasst1", "reward", *TREE)
    assert pairs(result) == [("A0", "A1"), ("A0", "A2"), ("A1", "A2"), "only one response", (None, None)]
    rest = {"group": "P1"}
    assert rows(tmp_path, "oasst1", "sft", *TREE) == [
        Row(say("P1"), "A0", **rest, columns={"message_id": "p1"}),
        Row(say("P1", "A0", "P2"), "B0", **rest, columns={"message_id": "p2"}),
        Row(say("P1", "A2", "P3"), **rest, columns={"message_id": "p3"}),
    ]
    prompts = [row.prompt for row in rows(tmp_path, "oasst1", "ppo", *TREE) if isinstance(row, Row)]
    assert prompts == [say("P1"), say("P1", "A0", "P2"), say("P1", "A2", "P3")]


def test_messages_left_out_take_what_hangs_on_them(tmp_path: Path) -> None:
    spoiled = [{**one, "deleted": one["message_id"] == "a0"} for one in TREE]
    result = pairs(rows(tmp_path, "oasst1", "reward", *spoiled))
    assert result == ["deleted message", ("A1", "A2"), "no first message above it", (None, None)]
    spoiled = [{**one, "review_result": one["message_id"] != "p1", "lang": "en"} for one in TREE]
    result = pairs(rows(tmp_path, "oasst1,lang=en", "reward", *spoiled))
    assert Counter(map(str, result)) == {
        "message failed review": 1,
        "reply to no prompt": 3,
        "no first message above it": 2,
    }
    result = pairs(rows(tmp_path, "oasst1,lang=ja", "reward", *spoiled[2:4]))
    assert result == ["message not in language ja"] * 2


def test_replies_without_a_rank(tmp_path: Path) -> None:
    root = message("p1", None)
    some = [root, message("a0", "p1", 1), message("a1", "p1"), message("a2", "p1", 0)]
    assert pairs(rows(tmp_path, "oasst1", "reward", *some)) == ["reply without a rank", ("A2", "A0")]
    none = [root, message("a0", "p1"), message("a1", "p1")]
    assert pairs(rows(tmp_path, "oasst1", "reward", *none)) == ["tie"]
    assert pairs(rows(tmp_path, "oasst1", "sft", *none)) == [("A0", None)]


def test_invalid_trees(tmp_path: Path) -> None:
    twice = rows(tmp_path, "oasst1", "sft", message("p1", None), message("p1", None))
    assert twice[0] == Skipped(f"{tmp_path / 'x.jsonl'}:2: message_id: got 'p1' again, expected each id once", bad=True)
    circle = [message("p1", "a1"), message("a1", "p1"), message("p2", "p2")]
    assert pairs(rows(tmp_path, "oasst1", "sft", *circle)) == ["no first message above it"] * 2


def nested(name: str) -> dict[str, Any]:
    own = next(one for one in TREE if one["message_id"] == name)
    return {**own, "replies": [nested(one["message_id"]) for one in TREE if one["parent_id"] == name]}


def test_an_exported_tree_is_the_same_tree(tmp_path: Path) -> None:
    exported = {"message_tree_id": "p1", "tree_state": "ready_for_export", "prompt": nested("p1")}
    for phase in ("sft", "reward", "ppo"):
        tree, flat = (rows(tmp_path, "oasst1", phase, *records) for records in ([exported], TREE))
        assert sorted(map(repr, tree)) == sorted(map(repr, flat))


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data is not here")
def test_real_trees() -> None:
    source = build("data.sources", "oasst1", str(SHARED))
    count: Counter[str] = Counter()

    def walk(node: dict[str, Any]) -> None:
        replies = [one for one in node["replies"] if one["review_result"] is not False and not one["deleted"]]
        if node["role"] == "prompter":
            ranks = [one["rank"] for one in replies if one.get("rank") is not None]
            count["prompts"] += 1
            count["answered"] += bool(replies)
            count["pairs"] += sum(one != other for one, other in combinations(ranks, 2))
        for one in replies:
            walk(one)

    with gzip.open(SHARED / "en_100_tree.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            walk(json.loads(line)["prompt"])
    result = {phase: [row for row in source.rows(phase) if isinstance(row, Row)] for phase in ("sft", "reward", "ppo")}
    assert sum(row.rejected is not None for row in result["reward"]) == count["pairs"] > 300
    assert sum(row.response is not None for row in result["sft"]) == count["answered"]
    assert len(result["ppo"]) == count["prompts"]
    assert not [row for phase in result for row in source.rows(phase) if isinstance(row, Skipped) and row.bad]
