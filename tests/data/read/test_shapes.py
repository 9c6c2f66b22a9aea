"""Every shape of columns that users bring, and what becomes of it: the rows were worked out by hand."""

from typing import Any

import pytest

from data.prepare.split import PHASES
from data.read.records import Unusable
from data.read.shapes import SHAPES, Shape, match_shape
from data.read.table import Labelled, Ranked, Unanswered, phase_rows
from data.sources.files import parse
from rlhf.types import Message, Row

ASK = {"role": "user", "content": "q"}
ONE = {"role": "assistant", "content": "good"}
TWO = {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "s"}
MORE = [ASK, ONE, {"role": "user", "content": "and then?"}]


def dialogue(*turns: str) -> tuple[Message, ...]:
    """`u: text`, `a: text`, `s: text` as messages."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return tuple(Message(roles[turn[0]], turn[3:]) for turn in turns)


def shared(values: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages as ShareGPT writes them."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[value["role"]], "value": value["content"]} for value in values]


Q = dialogue("u: q")
LONG = dialogue("u: q", "a: good", "u: and then?")
PAIR = Row(Q, "good", "bad", "q")

RECORDS: dict[str, tuple[dict[str, Any], Row | Ranked | Labelled]] = {
    "a pair of strings": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    "a pair of messages": ({"prompt": [ASK], "chosen": [ONE], "rejected": [TWO]}, PAIR),
    "the prompt repeated in both": ({"prompt": "q", "chosen": [ASK, ONE], "rejected": [ASK, TWO]}, PAIR),
    "the prompt repeated in other case": ({"prompt": " Q\n", "chosen": [ASK, ONE], "rejected": [ASK, TWO]}, PAIR),
    "the prompt repeated as messages": ({"prompt": [ASK], "chosen": [ASK, ONE], "rejected": [ASK, TWO]}, PAIR),
    "a system prompt, the rest in both": (
        {"prompt": [SYSTEM, ASK], "chosen": [ONE], "rejected": [TWO]},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q"),
    ),
    "a system prompt that the sides leave out": (
        {"prompt": [SYSTEM, ASK], "chosen": [ASK, ONE], "rejected": [ASK, TWO]},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q"),
    ),
    "a system prompt in the sides alone": (
        {"prompt": [ASK], "chosen": [SYSTEM, ASK, ONE], "rejected": [SYSTEM, ASK, TWO]},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q"),
    ),
    "a system prompt in a column of its own": (
        {"system": "s", "prompt": [ASK], "chosen": [ASK, ONE], "rejected": [ASK, TWO]},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q"),
    ),
    "a prompt before sides that go on with an answer": (
        {"prompt": "q", "chosen": [ONE, MORE[2], ONE], "rejected": [ONE, MORE[2], TWO]},
        Row(LONG, "good", "bad", "q"),
    ),
    "several responses on one side": (
        {"prompt": "q", "chosen": ["good"], "rejected": ["bad", [TWO], "worse"], "subset": "x", "id": 7},
        Ranked(Q, (("good", 1.0), ("bad", 0.0), ("bad", 0.0), ("worse", 0.0)), "q", {"subset": "x", "id": 7}),
    ),
    "several responses beside one": (
        {"question": "q", "chosen": ["good", "fine"], "rejected": "bad"},
        Ranked(Q, (("good", 1.0), ("fine", 1.0), ("bad", 0.0)), "q"),
    ),
    "two texts that begin alike, of a subset": (
        {"chosen": "it is good", "rejected": "it is bad", "subset": "x"},
        Row(dialogue("u: it is"), " good", " bad", "it is", {"subset": "x"}),
    ),
    "two texts whose beginning ends in half a word": (
        {"chosen": "The sky is blue, I think", "rejected": "The sky is black", "margin": 2},
        Row(dialogue("u: The sky is"), " blue, I think", " black", "The sky is", {"margin": 2.0}),
    ),
    "two texts in lines": (
        {"chosen": "Q: sky?\n\nA: blue", "rejected": "Q: sky?\n\nB"},
        Row(dialogue("u: Q: sky?"), "\n\nA: blue", "\n\nB", "Q: sky?"),
    ),
    "two texts, one of which goes on": (
        {"chosen": "The sky is blue", "rejected": "The sky is"},
        Row(dialogue("u: The sky is"), " blue", "", "The sky is"),
    ),
    "a pair without a prompt": ({"chosen": [*MORE, ONE], "rejected": [*MORE, TWO]}, Row(LONG, "good", "bad", "q")),
    "a pair after a conversation": (
        {"conversations": shared(MORE), "chosen": shared([ONE])[0], "rejected": shared([TWO])[0]},
        Row(LONG, "good", "bad", "q"),
    ),
    "a vote for the first": (
        {"prompt": "q", "response_a": "good", "response_b": "bad", "preference": "a"},
        PAIR,
    ),
    "a vote for the second": (
        {"prompt": [SYSTEM, ASK], "response_a": "bad", "response_b": [ONE], "preference": " B ", "id": 7},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q", {"id": 7}),
    ),
    "a pair after messages": ({"messages": MORE, "chosen": "good", "rejected": TWO}, Row(LONG, "good", "bad", "q")),
    "a pair after messages that repeat it": (
        {"prompt": "q", "chosen": [ASK, ONE], "rejected": [ASK, TWO], "messages": [ASK, ONE]},
        Row(Q, "good", "bad", "q", {"messages": [ASK, ONE]}),
    ),
    "a pair after a context": (
        {
            "context": [{"from": "user", "content": "q"}],
            "chosen": [{"from": "assistant", "content": "good"}],
            "rejected": [{"from": "assistant", "content": "bad"}],
        },
        PAIR,
    ),
    "a pair for an instruction": (
        {"instruction": "do", "input": "this", "chosen": "good", "rejected": "bad"},
        Row(dialogue("u: do\nthis"), "good", "bad", "do\nthis"),
    ),
    "a pair for a question, with a system message": (
        {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
        Row(dialogue("s: s", "u: q"), "good", "bad", "q"),
    ),
    "a pair with a response that repeats it": (
        {"prompt": "q", "response": "good", "chosen": "good", "rejected": "bad"},
        Row(PAIR.prompt, "good", "bad", "q", {"response": "good"}),
    ),
    "a dialogue as prompt": (
        {"prompt": "\n\nHuman: q\n\nAssistant: a\n\nHuman: b\n\nAssistant:", "chosen": " good ", "rejected": " bad"},
        Row(dialogue("u: q", "a: a", "u: b"), "good", "bad", "q"),
    ),
    "a dialogue whose responses name the speaker": (
        {"prompt": "\n\nHuman: q\n\n", "chosen": "Assistant: good", "rejected": "Assistant: bad"},
        PAIR,
    ),
    "a dialogue on one line": (
        {"prompt": " Human: q Assistant: a\n\nb Human: c Assistant:", "chosen": " good", "rejected": " bad"},
        Row(dialogue("u: q", "a: a\n\nb", "u: c"), "good", "bad", "q"),
    ),
    "a prompt that only mentions speakers": (
        {"prompt": "Human: a species. Assistant: a job.", "response": " good"},
        Row(dialogue("u: Human: a species. Assistant: a job."), " good", None, "Human: a species. Assistant: a job."),
    ),
    "prompt and completion": (
        {"prompt": "q\n\nTL;DR:", "completion": " good"},
        Row(dialogue("u: q\n\nTL;DR:"), " good", None, "q\n\nTL;DR:"),
    ),
    "prompt and completion as messages": ({"prompt": [ASK], "completion": [ONE]}, Row(Q, "good", None, "q")),
    "prompt and response": ({"prompt": "q", "response": "good"}, Row(Q, "good", None, "q")),
    "question and answer": ({"question": "q", "answer": "good"}, Row(Q, "good", None, "q")),
    "messages": ({"messages": [SYSTEM, *MORE, ONE]}, Row(dialogue("s: s") + LONG, "good", None, "q")),
    "messages beside their prompt and rendering": (
        {"prompt": "q", "messages": [ASK, ONE], "text": "Q: q A: good"},
        Row(Q, "good", None, "q", {"prompt": "q", "text": "Q: q A: good"}),
    ),
    "messages that end with the user": (
        {"messages": MORE},
        Unanswered(Row(LONG, None, None, "q"), Row(Q, "good", None, "q")),
    ),
    "messages of an assistant alone": ({"messages": [ONE]}, Row((), "good")),
    "messages with {from, content}": (
        {"messages": [{"from": "user", "content": "q"}, {"from": "assistant", "content": "good"}]},
        Row(Q, "good", None, "q"),
    ),
    "messages of one speaker in a row": (
        {"messages": [ASK, {"role": "user", "content": "more"}, ONE]},
        Row(dialogue("u: q\n\nmore"), "good", None, "q\n\nmore"),
    ),
    "conversations": ({"conversations": shared([*MORE, ONE])}, Row(LONG, "good", None, "q")),
    "conversations with a system column": (
        {"conversations": shared([ASK, ONE]), "system": "s"},
        Row(dialogue("s: s", "u: q"), "good", None, "q"),
    ),
    "other names of roles": (
        {
            "conversations": [
                {"role": "Human", "content": "q"},
                {"from": "bot", "value": "a"},
                {"from": "prompter", "value": "b"},
                {"from": "model", "value": "good"},
            ]
        },
        Row(dialogue("u: q", "a: a", "u: b"), "good", None, "q"),
    ),
    "instruction and output": (
        {"instruction": "do", "input": "", "output": "good"},
        Row(dialogue("u: do"), "good", None, "do"),
    ),
    "instruction, input, output": (
        {"instruction": "do", "input": "this", "output": "good", "text": "all of it"},
        Row(dialogue("u: do\nthis"), "good", None, "do\nthis", {"text": "all of it"}),
    ),
    "instruction with a history": (
        {"instruction": "b", "input": None, "output": "good", "system": "s", "history": [["q", "a"]]},
        Row(dialogue("s: s", "u: q", "a: a", "u: b"), "good", None, "q"),
    ),
    "instruction, context, response": (
        {"instruction": "do", "context": "this", "response": "good", "category": "x"},
        Row(dialogue("u: do\nthis"), "good", None, "do\nthis", {"category": "x"}),
    ),
    "a pair of OpenAI": (
        {"input": {"messages": [ASK], "tools": []}, "preferred_output": [ONE], "non_preferred_output": [TWO]},
        Row(Q, "good", "bad", "q"),
    ),
    "completions with ranks": (
        {"context": [ASK], "completions": [{"rank": 1, "completion": [TWO]}, {"rank": 0, "completion": [ONE]}]},
        Ranked(Q, (("bad", -1.0), ("good", 0.0)), "q"),
    ),
    "text": ({"text": "words", "label": 1}, Row((), "words", None, "", {"label": 1})),
    "a prompt": ({"prompt": "q", "solution": 4}, Row(Q, None, None, "q", {"solution": 4})),
    "a prompt of messages": ({"prompt": MORE}, Row(LONG, None, None, "q")),
    "a prompt that opens the response": (
        {"prompt": [ASK, {"role": "assistant", "content": ""}]},
        Row(Q, None, None, "q"),
    ),
    "an empty prompt and response": ({"prompt": "", "response": ""}, Row(dialogue("u: "), "", None, "")),
    "generations with ratings, one of which is missing": (
        {"instruction": "q", "generations": ["bad", "unrated", "good"], "ratings": [1, None, 4.5]},
        Ranked(Q, (("bad", 1.0), ("good", 4.5)), "q"),
    ),
    "rated completions as objects": (
        {
            "instruction": "q",
            "completions": [
                {"response": "bad", "overall_score": 2, "rating": 9, "model": "m"},
                {"response": "unrated", "overall_score": None},
                {"response": [ONE], "score": 4},
            ],
            "source": "x",
        },
        Ranked(Q, (("bad", 2.0), ("good", 4.0)), "q", {"source": "x"}),
    ),
    "responses, best first": (
        {"prompt": "q", "responses": ["good", [ONE], "bad"], "id": 3},
        Ranked(Q, (("good", 0.0), ("good", -1.0), ("bad", -2.0)), "q", {"id": 3}),
    ),
    "responses with scores": (
        {"prompt": [ASK], "responses": ["bad", "good"], "scores": [1, 2.5]},
        Ranked(Q, (("bad", 1.0), ("good", 2.5)), "q"),
    ),
    "responses with ranks": (
        {"question": "q", "responses": ["bad", "good"], "ranks": [2, 1], "scores": None},
        Ranked(Q, (("bad", -2.0), ("good", -1.0)), "q"),
    ),
    "an instruction and outputs, best first": (
        {"instruction": "b", "input": "", "output": ["good", "bad"], "history": [["q", "a"]]},
        Ranked(dialogue("u: q", "a: a", "u: b"), (("good", 0.0), ("bad", -1.0)), "q"),
    ),
    "labelled good": (
        {"prompt": [ASK], "completion": [ONE], "label": True, "id": 1},
        Labelled(Q, "good", True, "q", {"id": 1}),
    ),
    "labelled bad": ({"prompt": "q", "response": "bad", "label": 0}, Labelled(Q, "bad", False, "q")),
    "labelled in a CSV file": ({"prompt": "q", "response": "bad", "label": "False"}, Labelled(Q, "bad", False, "q")),
    "labelled messages": ({"messages": [*MORE, TWO], "label": False}, Labelled(LONG, "bad", False, "q")),
}


@pytest.mark.parametrize("name", RECORDS)
def test_shapes(name: str) -> None:
    record, row = RECORDS[name]
    before = repr(record)
    assert parse(record, "f:1") == row
    assert repr(record) == before


VALUES: dict[str, Any] = {
    **dict.fromkeys(("prompt", "instruction", "question", "text"), "q"),
    **dict.fromkeys(("response", "completion", "output", "answer"), "good"),
    "messages": [ASK, ONE],
    "conversations": [ASK, ONE],
    "context": [ASK],
    "chosen": [ASK, ONE],
    "rejected": [ASK, TWO],
    "rejected_response": "bad",
    "rejected_messages": [ASK, TWO],
    "input": {"messages": [ASK]},
    "preferred_output": [ONE],
    "non_preferred_output": [TWO],
    "completions": [
        {"rank": 1, "completion": [TWO], "response": "bad", "score": 1},
        {"rank": 0, "completion": [ONE], "response": "good", "score": 2},
    ],
    "response_a": "good",
    "response_b": "bad",
    "preference": "a",
    "responses": ["good", "bad"],
    "generations": ["good", "bad"],
    "label": "true",
}


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_columns_determine_the_shape(shape: Shape) -> None:
    record = {column: VALUES[column] for column in shape.columns}
    if "chosen" in record and "conversations" in record:
        record["conversations"] = [ASK]
    for columns in (tuple(record), tuple(reversed(record)), (*record, "id")):
        assert match_shape(columns, None, frozenset()) == (shape, tuple(set(columns) - set(record)))
    row = parse(record, "f:1")
    kinds = {"label": Labelled, **dict.fromkeys(("responses", "generations", "completions"), Ranked)}
    assert isinstance(row, kinds.get(shape.columns[-1], Row))
    assert row.prompt == (() if shape.name == "text" else Q)


def test_a_conversation_and_its_continuation_are_one_group() -> None:
    dialogues = ([ASK, ONE], MORE, [SYSTEM, *MORE, TWO])
    rows = [
        row for phase in PHASES for turns in dialogues for row in phase_rows([parse({"messages": turns}, "f:1")], phase)
    ]
    assert len(rows) == 9 and {row.group for row in rows if isinstance(row, Row)} == {"q"}


UNUSABLE = (
    ({"prompt": [ASK, ONE], "response": "x"}, "prompt does not end in the user's turn"),
    ({"prompt": "\n\nHuman: q\n\nAssistant: a", "response": "x"}, "prompt does not end in the user's turn"),
    ({"prompt": "q", "responses": []}, "no response"),
    ({"prompt": "q", "generations": ["a", "b"], "ratings": [None, None]}, "no response with a rating"),
    ({"prompt": "q", "completions": [{"response": "a"}]}, "no response with a rating"),
    ({"prompt": "q", "response_a": "x", "response_b": "y", "preference": ""}, "no preference filled in"),
    ({"prompt": "q", "response_a": "x", "response_b": "y", "preference": None}, "no preference filled in"),
    ({"prompt": "q", "response_a": "x", "response_b": "y", "preference": "Tie"}, "tie"),
)


@pytest.mark.parametrize(("record", "message"), UNUSABLE)
def test_sound_records_of_no_use(record: dict[str, Any], message: str) -> None:
    with pytest.raises(Unusable, match=message):
        parse(record, "f:1")


@pytest.mark.parametrize(("margin", "cell"), [(2, 2.0), (0.5, 0.5), ("-1.5", -1.5), ("3", 3.0), (None, None), ("", "")])
def test_a_margin_is_a_number_also_where_files_have_text_only(margin: Any, cell: Any) -> None:
    row = parse({"prompt": "q", "chosen": "x", "rejected": "y", "margin": margin, "n": "1"}, "f:1")
    assert isinstance(row, Row)
    assert row.columns == {"margin": cell, "n": "1"}


def test_one_side_of_a_pair_may_be_meant_so() -> None:
    record = {"prompt": "q", "chosen": "x"}
    assert parse(record, "f:1", "prompt") == Row(Q, None, None, "q", {"chosen": "x"})
    assert parse(record, "f:1", renamed={"response": "chosen"}) == Row(Q, "x", None, "q")
