"""The shapes of columns that the generic source knows."""

from typing import Any

import pytest

from data.sources.files import parse
from rlhf.config import UserError
from rlhf.types import Message, Row

ASK = {"role": "user", "content": "q"}
ONE = {"role": "assistant", "content": "good"}
TWO = {"role": "assistant", "content": "bad"}
PROMPT = (Message("user", "q"),)


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, Row(PROMPT, "good", "bad", "q")),
        ({"prompt": [ASK], "chosen": [ONE], "rejected": [TWO]}, Row(PROMPT, "good", "bad", "q")),
        (
            {"prompt": "q", "chosen": [ASK, ONE], "rejected": [ASK, TWO], "messages": []},
            Row(PROMPT, "good", "bad", "q"),
        ),
        ({"chosen": [ASK, ONE], "rejected": [ASK, TWO]}, Row(PROMPT, "good", "bad", "q")),
        ({"prompt": "q", "completion": "good"}, Row(PROMPT, "good", None, "q")),
        ({"prompt": [ASK], "completion": [ONE]}, Row(PROMPT, "good", None, "q")),
        ({"prompt": "q", "response": "good"}, Row(PROMPT, "good", None, "q")),
        ({"messages": [ASK, ONE]}, Row(PROMPT, "good", None, "q")),
        ({"messages": [ASK]}, Row(PROMPT, None, None, "q")),
        ({"prompt": "q"}, Row(PROMPT, None, None, "q")),
        ({"prompt": "q", "solution": 4}, Row(PROMPT, None, None, "q", {"solution": 4})),
    ],
)
def test_shapes(record: dict[str, Any], row: Row) -> None:
    found = parse(record, "f:1")
    assert (found.prompt, found.response, found.rejected, found.group) == (
        row.prompt,
        row.response,
        row.rejected,
        row.group,
    )
    assert {key: value for key, value in found.columns.items() if key != "messages"} == row.columns


def test_a_conversation_and_its_continuation_are_one_group() -> None:
    more = [ASK, ONE, {"role": "user", "content": "and then?"}, TWO]
    assert parse({"messages": more}, "f:1").group == parse({"messages": [ASK, ONE]}, "f:1").group


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"question": "q", "answer": "a"},
            "got the columns question, answer; expected one of: prompt, chosen, rejected;",
        ),
        ({}, "got the columns none"),
        ({"prompt": None, "response": "x"}, "prompt: got null, expected text"),
        ({"prompt": "q", "response": 3}, "response: got 3, expected text"),
        ({"prompt": "q", "chosen": "x", "rejected": None}, "rejected: got null"),
        ({"chosen": "x", "rejected": "y"}, "no column 'prompt'; .*hh_rlhf:PLACE"),
        ({"chosen": [ONE], "rejected": [TWO]}, "no prompt"),
        ({"chosen": [ASK, ONE], "rejected": [TWO, TWO]}, "differ before their last message"),
        ({"prompt": "q", "chosen": [ASK], "rejected": [TWO]}, "last message of role 'user', expected 'assistant'"),
        ({"messages": []}, r"messages: got \[\], expected a list of messages"),
        ({"messages": "x"}, "messages: got x, expected a list"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\]: got .*expected a message with a role"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: got null"),
    ],
)
def test_mistaken_records(record: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse(record, "f:1")
    assert str(error.value).startswith("f:1: ")
