"""Which tokens are learned, and what gives way where a dialogue is too long."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.prepare.encode import Demonstration, Encoded, Preference, Prompt, Recipe, RowEncoder, Truncation
from data.prepare.split import PHASES
from rlhf.text import rendering
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.text.truncate import fit_prompt
from rlhf.types import Message, Row
from tests.support import tiny

BOS, EOS, FIRST = 1, 2, 4


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    file = tmp_path_factory.mktemp("model") / "words.yaml"
    file.write_text(json.dumps({"tokenizer": {"words": [f"w{i}" for i in range(600)]}}))
    return prepare_tokenizer(load_tokenizer(str(file)), "plain")


# plain writes nothing between turns, so each ends in a space: s 0 | u 1 2 | a 3 4 5 | u 6 | a 7 | u 8 9
TURNS = [
    ("system", (0,)),
    ("user", (1, 2)),
    ("assistant", (3, 4, 5)),
    ("user", (6,)),
    ("assistant", (7,)),
    ("user", (8, 9)),
]
DIALOGUE = Row(tuple(Message(role, words(*numbers) + " ") for role, numbers in TURNS), words(10, 11))


def encoded(tokenizer: PreTrainedTokenizerBase, row: Row, loss_on: Any = "last", **options: Any) -> Encoded:
    encoder = RowEncoder(Recipe("sft", loss_on), Template(tokenizer), DataOptions(**options))
    [result] = encoder([row])
    return result


def learned(result: Encoded) -> list[int]:
    """The words that are learned, EOS as -1."""
    assert not isinstance(result, str)
    item = result[0]
    assert isinstance(item, Demonstration)
    numbers = [id - FIRST if id != EOS else -1 for id in item.ids]
    return [number for start, end in item.spans for number in numbers[start:end]]


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [("last", [10, 11, -1]), ("every", [3, 4, 5, 7, 10, 11, -1]), ("all", [*range(12), -1])],
)
def test_what_is_learned(plain: PreTrainedTokenizerBase, loss_on: str, expected: list[int]) -> None:
    assert learned(encoded(plain, DIALOGUE, loss_on)) == expected
    one_turn = Row(DIALOGUE.prompt[:2], words(10))
    assert learned(encoded(plain, one_turn, loss_on)) == ([10, -1] if loss_on != "all" else [0, 1, 2, 10, -1])


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (14, [3, 4, 5, 7, 10, 11, -1]),  # BOS, 12 words and EOS: all fits
        (13, [7, 10, 11, -1]),  # without the first pair of turns: BOS, 0, 6 to 11, EOS
        (9, [7, 10, 11, -1]),
        (8, [10, 11, -1]),
        (7, [10, 11, -1]),
        (6, "prompt too long"),
        (4, "prompt too long"),
        (3, "response too long"),
    ],
)
def test_turns_that_are_left_are_learned(plain: PreTrainedTokenizerBase, length: int, expected: Any) -> None:
    result = encoded(plain, DIALOGUE, "every", max_length=length)
    assert result == expected if isinstance(expected, str) else learned(result) == expected


def test_turns_that_are_left_of_a_cut_prompt_are_learned(plain: PreTrainedTokenizerBase) -> None:
    """The last user's turn loses words before an answer of the assistant's that stands behind it does."""
    turns = [("user", (1, 2, 3, 4)), ("assistant", (5, 6)), ("system", (7,))]
    row = Row(tuple(Message(role, words(*numbers) + " ") for role, numbers in turns), words(8))
    for length, count in ((10, 4), (9, 3), (8, 2)):
        result = encoded(plain, row, "every", max_length=length, truncate="tokens")
        assert learned(result) == [5, 6, 8, -1]
        assert not isinstance(result, str)
        assert result[0].ids == (BOS, *(FIRST + i for i in [*range(5 - count, 5), 5, 6, 7, 8]), EOS)  # type: ignore[union-attr]


def test_the_eos_that_stands_for_a_bos_stays_at_the_head() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = None
    template = Template(prepare_tokenizer(tokenizer, "plain"))
    assert list(fit_prompt(template, Row((Message("user", "w4 w5 w6 w7"),)), 3, True).ids) == [tiny.EOS, 6, 7]


@pytest.mark.parametrize(("margin", "expected"), [(2, 2.0), (0.5, 0.5), (None, None), ("much", None)])
def test_a_margin_is_a_number_of_any_kind(plain: PreTrainedTokenizerBase, margin: Any, expected: float | None) -> None:
    columns = {} if margin is None else {"margin": margin}
    [result] = RowEncoder(Recipe("reward"), Template(plain), DataOptions())([Row((), "w1", "w2", columns=columns)])
    assert not isinstance(result, str)
    assert result[0].margin == expected  # type: ignore[union-attr]


def test_a_side_without_words_is_an_end_at_once(plain: PreTrainedTokenizerBase) -> None:
    encoder = RowEncoder(Recipe("reward"), Template(plain), DataOptions())
    for row, ids in (
        (Row((Message("user", "w1"),), None, "w2"), ((BOS, 5, EOS), (BOS, 5, 6, EOS))),
        (Row((Message("user", "w1"),), "w2", ""), ((BOS, 5, 6, EOS), (BOS, 5, EOS))),
    ):
        [result] = encoder([row])
        assert not isinstance(result, str) and isinstance(result[0], Preference)
        assert (result[0].chosen, result[0].rejected) == ids


def test_a_plain_text_is_learned_from_its_first_token_to_its_end(plain: PreTrainedTokenizerBase) -> None:
    encoder = RowEncoder(Recipe("sft", objective="text"), Template(plain), DataOptions(max_length=2))
    rows = [Row((), "w1 w2 w3"), Row((Message("user", "w1"),), "w2"), Row((), None)]
    texts = [
        (Demonstration((BOS, 5, 6, 7, EOS), ((1, 5),)), Truncation()),
        (Demonstration((BOS, EOS), ((1, 2),)), Truncation()),
    ]
    assert encoder(rows) == [texts[0], "not plain text", texts[1]]


def test_a_prompt_keeps_its_row_and_the_turns_that_fit(plain: PreTrainedTokenizerBase) -> None:
    turns = (Message("user", "w1 "), Message("assistant", "w2 "), Message("user", "w3"))
    rows = [Row(turns[2:], columns={"answer": 1}), Row(turns, columns={"answer": 2})]
    encoder = RowEncoder(Recipe("ppo"), Template(plain), DataOptions(max_prompt_length=2))
    cut = Prompt((BOS, FIRST + 3), replace(rows[1], prompt=turns[2:]))
    assert encoder(rows) == [
        (Prompt((BOS, FIRST + 3), rows[0]), Truncation()),
        (cut, Truncation(prompt=True)),
    ]


def test_a_plain_text_without_a_bos_begins_with_its_first_word() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = None
    encoder = RowEncoder(
        Recipe("sft", objective="text"), Template(prepare_tokenizer(tokenizer, "plain")), DataOptions()
    )
    assert encoder([Row((), "w4 w5")]) == [(Demonstration((4, 5, tiny.EOS), ((1, 3),)), Truncation())]


@pytest.mark.parametrize(("phase", "renderings"), [("sft", 2), ("reward", 3), ("ppo", 1)])
def test_a_prompt_is_rendered_once(
    phase: Any, renderings: int, plain: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template writes the prompt, and the whole dialogue with each answer."""
    template, rendered, original = Template(plain), [], rendering._render
    monkeypatch.setattr("rlhf.text.rendering._render", lambda *_: rendered.append(_[1]) or original(*_))
    rows = [Row((Message("user", f"w{i}"),), "w1", "w2") for i in range(4)]
    encoder = RowEncoder(Recipe(phase), template, DataOptions())
    encoder(rows)  # what the template writes around any turn is rendered here
    rendered.clear()
    assert all(not isinstance(item, str) for item in encoder(rows))
    assert sum(map(len, rendered)) == renderings * len(rows)


def test_many_rows_give_what_each_gives_alone(plain: PreTrainedTokenizerBase) -> None:
    rows = [
        Row(DIALOGUE.prompt[: 2 + i % 4], words(*range(i % 7)) or "w1", words(i % 5), columns={"margin": i})
        for i in range(50)
    ]
    rows += [Row((), "w1 w2", "w3"), Row((Message("user", "</s> w1"),), "<s>", "</s>")]
    rows.insert(20, Row((Message("user", words(*range(30))),), "w1", "w2"))
    for phase in PHASES:
        encoder = RowEncoder(Recipe(phase), Template(plain), DataOptions(max_length=12, max_prompt_length=8))
        results = encoder(rows)
        assert results == [result for row in rows for result in encoder([row])] and results[20] == "prompt too long"
        assert encoder([]) == []
