"""What a column must hold, and how a mistake is shown: on one line, whatever is in the data."""

from typing import Any

import pytest

from data.read.records import column_names, read_text
from rlhf.errors import UserError
from rlhf.text.messages import require_text, short_json


@pytest.mark.parametrize("words", ["", "plain", "naïve 漢字 🙂", "a\u2028b\x00c", "\n\t"])
def test_text_is_passed_on_as_it_is(words: str) -> None:
    assert read_text({"a": words}, "a", "f:1") is words
    assert require_text(words, "f:1") is words


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "null"),
        (3, "3"),
        (True, "true"),
        (["x"], '["x"]'),
        ({"x": "a\nb"}, '{"x": "a\\nb"}'),
        ("y\ud800", "half a surrogate pair at character 1"),
    ],
)
def test_another_value_is_a_mistake(value: Any, got: str) -> None:
    with pytest.raises(UserError) as error:
        read_text({"a": value}, "a", "f:1")
    assert str(error.value) == f"f:1: a: got {got}, expected text"


def test_a_missing_column_names_those_there_are() -> None:
    with pytest.raises(UserError) as error:
        read_text({"a": "", "b": ""}, "c", "f:1")
    assert str(error.value) == "f:1: no column 'c'; have a, b"


def test_what_is_shown_is_short_and_on_one_line() -> None:
    assert short_json("x" * 1000) == '"' + "x" * 56 + "..."
    assert column_names([]) == "none"
    assert column_names(["a", "b\nc", "\ud800", "x" * 50]) == "a, b\\nc, \\ud800, " + "x" * 37 + "..."
    assert column_names(map(str, range(99))).endswith("28, 29, ...")
