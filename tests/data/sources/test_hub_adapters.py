"""What each dataset of the hub says, worked by hand: who is preferred, what is a tie, how its text is written."""

import gzip
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from data.read.dialogues import parse_transcript
from data.read.records import Phase, Skipped, Unusable
from data.sources import _parsers as parsers
from data.sources import _table
from rlhf.errors import UserError
from rlhf.plugins import build
from rlhf.types import Message, Row

SHARED = Path(__file__).parents[4] / "shared/data"
HH, TREES = SHARED / "hh-rlhf", SHARED / "oasst-en-trees"


def say(*turns: str) -> tuple[Message, ...]:
    """Turns of user and assistant by turns."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(turns))


def messages_of(*turns: str) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in say(*turns)]


def rows(folder: Path, spec: str, phase: Phase, *records: dict[str, Any]) -> list[Row | Skipped]:
    (folder / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(build("data.sources", spec, str(folder / "x.jsonl")).rows(phase))


def pairs(result: list[Row | Skipped]) -> list[tuple[str | None, str | None] | str]:
    return [(row.response, row.rejected) if isinstance(row, Row) else row.reason for row in result]


# --- whole dialogues


def transcript(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {text}" for i, text in enumerate(turns))


def test_the_turns_of_a_transcript() -> None:
    text = "\n\nHuman: One?\n\nHuman: two \n\nAssistant: Three.\nAs in Human: four\n\nAssistant:"
    assert parse_transcript(text, "f:1") == say("One?\n\ntwo", "Three.\nAs in Human: four")
    for other in ("", "Hello", "\n\nAssistant: Hi", "Note\n\nHuman: Hi"):
        with pytest.raises(UserError, match=r"f:1: chosen: got text that begins .*expected a dialogue"):
            parsers.hh_rlhf({"chosen": other, "rejected": ""}, "f:1")


@pytest.mark.parametrize(
    ("chosen", "rejected", "row"),
    [
        (("A", "B", "C", "D"), ("A", "B", "C", "E"), Row(say("A", "B", "C"), "D", "E", "A")),
        (("A", "B"), ("C", "D"), Row(say("A"), "B", None, "A")),  # no common prompt: no pair
        (("A",), ("A", "D"), Row(say("A"), group="A")),
    ],
)
def test_hh_rlhf(chosen: tuple[str, ...], rejected: tuple[str, ...], row: Row) -> None:
    assert parsers.hh_rlhf({"chosen": transcript(*chosen), "rejected": transcript(*rejected)}, "f:1") == row


@pytest.mark.skipif(not HH.is_dir(), reason="real data is not here")
def test_real_rows_of_hh_rlhf_are_all_pairs() -> None:
    result: list[Any] = list(build("data.sources", "hh_rlhf", str(HH)).rows("reward"))
    assert len(result) == 3109
    assert all(row.rejected is not None and row.prompt[-1].role == "user" for row in result)
    assert all("\n\nHuman:" not in message.content for row in result for message in row.prompt)


# --- dialogues with the prompt split off


def test_a_prompt_that_opens_the_response() -> None:
    prompt = "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: C?\n\nAssistant:"
    row = parsers.rm_static({"prompt": prompt, "chosen": " D. ", "rejected": " E."}, "f:1")
    assert row == Row(say("A?", "B.", "C?"), "D.", "E.", "A?")


def test_a_prompt_with_words_of_the_assistant_is_left_out() -> None:
    record = {"prompt": "\n\nHuman: A?\n\nAssistant: Well,", "chosen": " D.", "rejected": " E."}
    with pytest.raises(Unusable, match="prompt does not end in the user's turn"):
        parsers.rm_static(record, "f:1")


def test_responses_with_their_marker() -> None:
    record = {"prompt": "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: C?\n\n", "chosen": "Assistant: D. Assistant: too."}
    row = parsers.rm_static({**record, "rejected": "Assistant: E."}, "f:1", "Assistant:")
    assert row == Row(say("A?", "B.", "C?"), "D. Assistant: too.", "E.", "A?")
    with pytest.raises(UserError, match=r"f:1: rejected: got text that begins 'E\.', expected 'Assistant: \.\.\.'"):
        parsers.rm_static({**record, "rejected": "E."}, "f:1", "Assistant:")


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        ("USER: A? ASSISTANT:", say("A?")),
        ("USER: A? ASSISTANT: B. USER: C?\nASSISTANT:", say("A?", "B.", "C?")),
        ("Be kind. USER: A? ASSISTANT:", (Message("system", "Be kind."), *say("A?"))),
        ("USER: Is SUPERUSER: a word? ASSISTANT:", say("Is SUPERUSER: a word?")),
    ],
)
def test_vicuna_turns(prompt: str, turns: tuple[Message, ...]) -> None:
    assert parsers.sharegpt_vicuna({"prompt": prompt, "label": " Z "}, "f:1") == Row(
        turns, "Z", None, next(turn.content for turn in turns if turn.role == "user")
    )


def test_vicuna_text_without_a_turn() -> None:
    with pytest.raises(UserError, match=r"f:1: prompt: got text that begins 'Hello', expected 'USER:"):
        parsers.sharegpt_vicuna({"prompt": "Hello", "label": "Z"}, "f:1")


# --- pairs with a label


def test_shp_by_label_and_ratio(tmp_path: Path) -> None:
    record = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_ratio": 2.0}
    records = [record, {**record, "labels": 0}, {**record, "score_ratio": 1.9}]
    assert pairs(rows(tmp_path, "shp", "reward", *records)) == [("a", "b"), ("b", "a"), "score ratio below 2"]
    assert pairs(rows(tmp_path, "shp,min_score_ratio=1.5", "reward", *records))[2] == ("a", "b")
    with pytest.raises(UserError, match=r"min_score_ratio: .*got 0\.5"):
        rows(tmp_path, "shp,min_score_ratio=0.5", "reward")
    assert parsers.shp({**record, "domain": "d", "post_id": "p", "score_A": 9}, "f:1", 2.0).columns == {
        "domain": "d",
        "post_id": "p",
        "score_ratio": 2.0,
    }


def test_the_two_labels_of_safe_rlhf() -> None:
    record = {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 0, "safer_response_id": 1}
    assert parsers.safe_rlhf(record, "f:1", "better").response == "a"
    assert parsers.safe_rlhf(record, "f:1", "safer").response == "b"
    with pytest.raises(UserError, match=r"f:1: safer_response_id: got 2, expected 0 or 1"):
        parsers.safe_rlhf({**record, "safer_response_id": 2}, "f:1", "safer")


def test_webgpt_scores_and_citations(tmp_path: Path) -> None:
    record = {"question": {"full_text": "q"}, "answer_0": "Up [1]. Down[2][3] and [4, 5], see list[i].", "score_0": 1}
    other = {"answer_1": "Left [1]", "score_1": -1.0}
    clean = "Up. Down and, see list[i]."
    assert parsers.webgpt({**record, **other}, "f:1").responses == ((clean, 1.0), ("Left", -1.0))
    tie = {**record, **other, "score_1": 1}
    assert pairs(rows(tmp_path, "webgpt", "reward", {**record, **other}, tie)) == [(clean, "Left"), "tie"]
    assert len(rows(tmp_path, "webgpt", "ppo", tie)) == 1


def test_arena_votes(tmp_path: Path) -> None:
    record = {"conversation_a": messages_of("q", "a"), "conversation_b": messages_of("q", "b")}
    later = {
        "conversation_a": messages_of("q", "a", "then?", "x"),
        "conversation_b": messages_of("q", "b", "then?", "y"),
    }
    same = {
        "conversation_a": messages_of("q", "a", "then?", "x"),
        "conversation_b": messages_of("q", "a", "then?", "y"),
    }
    votes = [{**record, "winner": winner} for winner in ("model_a", "model_b", "tie", "tie (bothbad)")]
    result = rows(tmp_path, "chatbot_arena", "reward", *votes, {**later, "winner": "model_a"})
    assert pairs(result) == [("a", "b"), ("b", "a"), "tie", "tie", "dialogues differ before the last turn"]
    row = parsers.chatbot_arena({**same, "winner": "model_b"}, "f:1")
    assert row == Row(say("q", "a", "then?"), "y", "x", "q")
    parts = [[{"type": "text", "text": m["content"], "image": None}] for m in record["conversation_a"]]
    newer = [{**m, "content": part} for m, part in zip(record["conversation_a"], parts, strict=True)]
    pair = {"conversation_a": newer, "conversation_b": record["conversation_b"]}
    assert parsers.chatbot_arena({**pair, "winner": "model_a"}, "f:1") == Row(say("q"), "a", "b", "q")
    with pytest.raises(Unusable, match="tie"):
        parsers.chatbot_arena({**pair, "winner": "both_bad"}, "f:1")
    newer[0]["content"] = [*parts[0], {"type": "image", "image": "x"}]
    with pytest.raises(Unusable, match="an image in the dialogue"):
        parsers.chatbot_arena({**pair, "winner": "model_a"}, "f:1")
    with pytest.raises(Unusable, match="does not end in the assistant's turn"):
        parsers.chatbot_arena({**record, "conversation_b": messages_of("q"), "winner": "model_a"}, "f:1")


def test_ultrafeedback_pairs_and_splits(tmp_path: Path) -> None:
    record = {
        "chosen": messages_of("q", "a"),
        "rejected": messages_of("q", "b"),
        "score_chosen": 7.0,
        "score_rejected": 7.0,
    }
    assert pairs(rows(tmp_path, "ultrafeedback", "reward", record)) == ["tie"]
    assert pairs(rows(tmp_path, "ultrafeedback", "sft", record)) == [("a", None)]
    with pytest.raises(Unusable, match="differ before the last turn"):
        parsers.ultrafeedback({**record, "rejected": messages_of("other", "b")}, "f:1")
    assert _table.SPLITS == {"sft": "train_sft", "reward": "train_prefs", "ppo": "train_gen"}


# --- ratings and ranks


def test_helpsteer_gathers_consecutive_responses(tmp_path: Path) -> None:
    ratings = (("p", "a", 1), ("p", "b", 3), ("p", "c", 3), ("q", "d", 2), ("p", "e", 0))
    records = [{"prompt": p, "response": r, "helpfulness": h, "verbosity": 4 - h} for p, r, h in ratings]
    result = pairs(rows(tmp_path, "helpsteer", "reward", *records))
    assert result == [("b", "a"), ("c", "a"), "only one response", "only one response"]
    assert pairs(rows(tmp_path, "helpsteer", "sft", *records)) == [("b", None), ("d", None), ("e", None)]
    result = pairs(rows(tmp_path, "helpsteer,attribute=verbosity", "reward", *records))
    assert result[:2] == [("a", "b"), ("a", "c")]


def test_helpsteer_goes_on_after_a_bad_row(tmp_path: Path) -> None:
    records = [{"prompt": "p", "response": r, "helpfulness": h} for r, h in (("a", 1), ("b", None), ("c", 3))]
    result = pairs(rows(tmp_path, "helpsteer", "reward", *records))
    assert result == [f"{tmp_path / 'x.jsonl'}:2: helpfulness: got null, expected a number", ("c", "a")]


def test_helpsteer_turns() -> None:
    words = "One\n two\n<extra_id_1>Assistant\nThree\n\n<extra_id_1>User\n  Four\n"
    record = {"response": "c", "helpfulness": 1}
    assert parsers.helpsteer({**record, "prompt": words}, "f:1", "helpfulness").prompt == say(
        "One\n two", "Three\n", "  Four\n"
    )
    assert parsers.helpsteer({**record, "prompt": "c#"}, "f:1", "helpfulness").prompt == say("c#")
    with pytest.raises(Unusable, match="prompt does not end in the user's turn"):
        parsers.helpsteer({**record, "prompt": "a\n<extra_id_1>Assistant\nb"}, "f:1", "helpfulness")


def test_helpsteer2_preference_takes_one_split(tmp_path: Path) -> None:
    marks = (("train", -3), ("train", 0), ("val", 1), ("validation", 2))
    records = [
        {"split": split, "prompt": "p", "response_1": "one", "response_2": "two", "preference_strength": strength}
        for split, strength in marks
    ]
    path = "helpsteer2_preference"
    assert pairs(rows(tmp_path, path, "reward", *records)) == [("one", "two"), "tie", *["of split val"] * 2]
    result = pairs(rows(tmp_path, f"{path},part=validation", "reward", *records))
    assert result == ["of split train"] * 2 + [("two", "one")] * 2


@pytest.mark.parametrize(("preference", "expected"), [(-1, ("one", "two")), (2, ("two", "one")), (0, "tie")])
def test_helpsteer3_preference(tmp_path: Path, preference: int, expected: object) -> None:
    record = {
        "context": messages_of("a", "b", "c"),
        "response1": "one",
        "response2": "two",
        "overall_preference": preference,
    }
    result = rows(tmp_path, "helpsteer3", "reward", record)
    assert pairs(result) == [expected]
    assert isinstance(result[0], Skipped) or result[0].prompt == say("a", "b", "c")


# --- several languages


def test_miracl_without_passages(tmp_path: Path) -> None:
    passage = {"docid": "1", "title": "t", "text": "good"}
    record = {"query": "q", "positive_passages": [passage, {**passage, "text": "more"}], "negative_passages": []}
    assert pairs(rows(tmp_path, "miracl", "reward", record)) == ["only one response"]
    assert pairs(rows(tmp_path, "miracl", "sft", record)) == [("good", None)]
    with pytest.raises(Unusable, match="no positive passage"):
        parsers.miracl({**record, "positive_passages": []}, "f:1")


def test_mkqa_takes_the_first_answer_in_text() -> None:
    every = [{"type": "x", "text": None}, {"type": "date", "text": "b", "aliases": ["c", "b"]}, {"text": "d"}]
    record = {"example_id": 5, "queries": {"ja": "q", "ko": "k"}, "answers": {"ja": every, "ko": every[:1]}}
    row = parsers.mkqa(record, "f:1", "ja")
    assert row == Row(say("q"), "b", None, "q", {"example_id": 5, "answers": ["b", "c", "d"]})
    with pytest.raises(Unusable, match="no short answer"):
        parsers.mkqa(record, "f:1", "ko")
    with pytest.raises(UserError, match=r"f:1: queries: no column 'zh_tw'; have ja, ko"):
        parsers.mkqa(record, "f:1", "zh_tw")


@pytest.mark.parametrize(
    ("source", "record", "reason"),
    [
        ("hc3_chinese", {"question": "q", "human_answers": []}, "no human answer"),
        ("qag_jaquad", {"questions": [], "paragraph": "p"}, "no question"),
    ],
)
def test_empty_lists_are_named(tmp_path: Path, source: str, record: dict[str, Any], reason: str) -> None:
    assert rows(tmp_path, source, "sft", record) == [Skipped(reason)]


# --- what is read on the hub


def test_parts_of_the_hub_that_are_read_unasked(tmp_path: Path) -> None:
    two = build("data.sources", "helpsteer2_preference", "nvidia/HelpSteer2")
    assert (two.config.data_dir, two.config.subset, two.config.split) == ("preference", None, None)
    assert build("data.sources", "helpsteer2_preference,data_dir=x", "nvidia/HelpSteer2").config.data_dir == "x"
    assert build("data.sources", "helpsteer3", "").config.subset == "preference"
    assert build("data.sources", "helpsteer3,subset=edit", "").config.subset == "edit"
    (tmp_path / "x.jsonl").write_text("")
    assert build("data.sources", "helpsteer3", str(tmp_path / "x.jsonl")).config.subset is None


# --- trees of messages: flat and nested, in any order, with messages left out


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


@pytest.mark.skipif(not TREES.is_dir(), reason="real data is not here")
def test_real_trees() -> None:
    source = build("data.sources", "oasst1", str(TREES))
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

    with gzip.open(TREES / "en_100_tree.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            walk(json.loads(line)["prompt"])
    result = {phase: [row for row in source.rows(phase) if isinstance(row, Row)] for phase in ("sft", "reward", "ppo")}
    assert sum(row.rejected is not None for row in result["reward"]) == count["pairs"] > 300
    assert sum(row.response is not None for row in result["sft"]) == count["answered"]
    assert len(result["ppo"]) == count["prompts"]
    assert not [row for phase in result for row in source.rows(phase) if isinstance(row, Skipped) and row.bad]
