"""Every dataset type of TRL, standard and conversational, with the examples of TRL's documentation; rows by hand."""

from typing import Any

import pytest

from data.read.table import Labelled
from data.sources.files import parse
from rlhf.errors import UserError
from rlhf.types import Message, Row

ASK = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
QUESTION = (Message("user", ASK["content"]),)
SKY = (Message("user", "The sky is"),)

TYPES: dict[str, tuple[dict[str, Any], Row | Labelled]] = {
    "language modelling": ({"text": "The sky is blue."}, Row((), "The sky is blue.")),
    "language modelling, conversational": (
        {"messages": [ASK, BLUE]},
        Row(QUESTION, "It is blue.", None, ASK["content"]),
    ),
    "prompt-only": ({"prompt": "The sky is"}, Row(SKY, None, None, "The sky is")),
    "prompt-only, conversational": ({"prompt": [ASK]}, Row(QUESTION, None, None, ASK["content"])),
    "prompt-completion": (
        {"prompt": "The sky is", "completion": " blue."},
        Row(SKY, " blue.", None, "The sky is"),
    ),
    "prompt-completion, conversational": (
        {"prompt": [ASK], "completion": [BLUE]},
        Row(QUESTION, "It is blue.", None, ASK["content"]),
    ),
    "preference": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        Row(SKY, " blue.", " green.", "The sky is"),
    ),
    "preference, conversational": (
        {"prompt": [ASK], "chosen": [BLUE], "rejected": [GREEN]},
        Row(QUESTION, "It is blue.", "It is green.", ASK["content"]),
    ),
    "preference, implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        Row(SKY, " blue.", " green.", "The sky is"),
    ),
    "preference, implicit prompt, conversational": (
        {"chosen": [ASK, BLUE], "rejected": [ASK, GREEN]},
        Row(QUESTION, "It is blue.", "It is green.", ASK["content"]),
    ),
    "unpaired preference": (
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        Labelled(SKY, " blue.", True, "The sky is"),
    ),
    "unpaired preference, conversational": (
        {"prompt": [ASK], "completion": [GREEN], "label": False},
        Labelled(QUESTION, "It is green.", False, ASK["content"]),
    ),
    "implicit prompt, responses that begin alike": (
        {"chosen": "The sky is blue, I think", "rejected": "The sky is black", "margin": 2},
        Row(SKY, " blue, I think", " black", "The sky is", {"margin": 2.0}),
    ),
    "implicit prompt in lines": (
        {"chosen": "Q: sky?\n\nA: blue", "rejected": "Q: sky?\n\nB"},
        Row((Message("user", "Q: sky?"),), "\n\nA: blue", "\n\nB", "Q: sky?"),
    ),
    "implicit prompt, one response is longer": (
        {"chosen": "The sky is blue", "rejected": "The sky is"},
        Row(SKY, " blue", "", "The sky is"),
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_row_of_each_type(name: str) -> None:
    record, expected = TYPES[name]
    assert parse(record, "f:1") == expected


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": "Blue.", "rejected": "Green."},
        {"chosen": "Blue", "rejected": "Black"},
        {"chosen": "It is blue.", "rejected": "It is green.", "query": "What color is the sky?"},
        {"chosen": [BLUE], "rejected": [GREEN]},
    ],
    ids=["nothing in common", "half a word in common", "a text that may be the prompt", "messages without a prompt"],
)
def test_a_pair_whose_prompt_is_unknown_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"f:1: chosen: got no prompt before it, .*files,prompt=COLUMN:PATH"):
        parse(record, "f:1")
