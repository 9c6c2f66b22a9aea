"""What is left of a text that is too long, by hand and beside a search through all that could be left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.prepare.encode import Demonstration, Encoded, Preference, Prompt, Recipe, RowEncoder, Truncation
from data.read.records import Phase
from rlhf.text.dialogues import Template
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.text.truncate import fit_prompt
from rlhf.types import Message, Row
from tests.support.texts import MAKERS, slow_tokenizer, words_tokenizer

BOS, EOS, FIRST = 1, 2, 4
TEMPLATES = ("chatml", "llama_3", "llama_2", "alpaca", "human_assistant", "plain")


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ids(*numbers: int) -> tuple[int, ...]:
    return tuple(FIRST + number for number in numbers)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    tokenizer = words_tokenizer(tmp_path_factory.mktemp("words"), *(f"w{i}" for i in range(200)))
    return prepare_tokenizer(tokenizer, "plain")


def encoded(tokenizer: PreTrainedTokenizerBase, phase: Phase, row: Row, **options: Any) -> Encoded:
    [result] = RowEncoder(Recipe(phase), Template(tokenizer), DataOptions(**{"truncate": "tokens", **options}))([row])
    return result


def user(*numbers: int) -> tuple[Message, ...]:
    return (Message("user", words(*numbers)),)


def test_a_long_dialogue_is_encoded_a_few_times(
    plain: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each turn that is too much. A user turn has 2 tokens, an answer 1."""
    turns = [message for i in range(150) for message in (*user(i, i + 1), Message("assistant", words(i)))]
    turns = [Message(turn.role, f"{turn.content} ") for turn in turns]  # plain puts nothing between turns
    calls, encode = [], Template.prompt_ids

    def counted(template: Template, messages: Sequence[Message], *variables: Any) -> list[int]:
        calls.append(len(messages))
        return encode(template, messages, *variables)

    monkeypatch.setattr(Template, "prompt_ids", counted)
    fitted = fit_prompt(Template(plain), Row((*turns, Message("user", words(5)))), 21, by_tokens=False)
    assert fitted is not None and fitted.messages == [*turns[-12:], Message("user", words(5))]
    assert len(calls) < 15


# --- by hand; plain writes BOS and nothing else


@pytest.mark.parametrize("length", [9, 10, 11, 100])
def test_the_prompt_gives_way_first(plain: PreTrainedTokenizerBase, length: int) -> None:
    """max_length 10, response of 3 words and EOS: 6 tokens are left for BOS and the prompt's end."""
    prompt = range(length - 5)  # with BOS, 3 words and EOS: `length` tokens
    remaining = prompt if length <= 10 else prompt[-5:]
    item = Demonstration((BOS, *ids(*remaining, 100, 101, 102), EOS), ((1 + len(remaining), 5 + len(remaining)),))
    row = Row(user(*prompt), words(100, 101, 102))
    assert encoded(plain, "sft", row, max_length=10) == (item, Truncation(prompt=length > 10))


@pytest.mark.parametrize("size", [4, 5, 6, 90])
def test_a_prompt_keeps_a_fourth_of_the_length(plain: PreTrainedTokenizerBase, size: int) -> None:
    """max_length 10: BOS and three words stay of a prompt, and then a response loses its end, and with it EOS."""
    response = range(100, 100 + size)
    remaining = (7, 8, 9) if size > 4 else (6, 7, 8, 9)
    ends = (*ids(*response), EOS)[: 9 - len(remaining)]
    item = Demonstration((BOS, *ids(*remaining), *ends), ((1 + len(remaining), 10),))
    row = Row(user(*range(10)), words(*response))
    assert encoded(plain, "sft", row, max_length=10) == (item, Truncation(prompt=True, response=size > 5))
    assert encoded(plain, "sft", row, max_length=10, truncate="turns") == (
        "prompt too long" if size < 10 else "response too long"
    )


def test_a_short_prompt_stays_whole_beside_any_response(plain: PreTrainedTokenizerBase) -> None:
    row = Row(user(1, 2), words(*range(100)))
    item = Demonstration((BOS, *ids(1, 2, *range(7))), ((3, 10),))
    assert encoded(plain, "sft", row, max_length=10) == (item, Truncation(response=True))


def test_both_sides_of_a_pair_lose_the_same(plain: PreTrainedTokenizerBase) -> None:
    """max_length 9: the prompt keeps BOS and three words, so each side has five tokens; EOS stands where one ended."""
    row = Row(user(0, 1, 2, 3), words(10), words(11, 12, 13, 14))
    result = encoded(plain, "reward", row, max_length=9)
    pair = Preference((BOS, *ids(1, 2, 3, 10), EOS), (BOS, *ids(1, 2, 3, 11, 12, 13, 14), EOS), 4)
    assert result == (pair, Truncation(prompt=True))
    row = Row(user(0, 1, 2, 3), words(10), words(*range(11, 30)))
    result = encoded(plain, "reward", row, max_length=9)
    pair = Preference((BOS, *ids(1, 2, 3, 10), EOS), (BOS, *ids(1, 2, 3, 11, 12, 13, 14, 15)), 4)
    assert result == (pair, Truncation(prompt=True, response=True))


@pytest.mark.parametrize("length", [7, 8, 9, 80])
def test_a_prompt_of_ppo_keeps_its_end_and_its_row_has_no_more(plain: PreTrainedTokenizerBase, length: int) -> None:
    prompt = range(length - 1)
    item = Prompt((BOS, *ids(*prompt[-7:])), Row(user(*prompt[-7:]), columns={"answer": 3}))
    row = Row(user(*prompt), columns={"answer": 3})
    assert encoded(plain, "ppo", row, max_prompt_length=8) == (item, Truncation(prompt=length > 8))


TURNS = [("system", (0,)), ("user", (1, 2)), ("assistant", (3,)), ("user", (4, 5, 6))]


@pytest.mark.parametrize(
    ("limit", "expected", "by_turns"),
    [
        (8, (0, 1, 2, 3, 4, 5, 6), True),
        (7, (0, 4, 5, 6), True),
        (5, (0, 4, 5, 6), True),
        (4, (0, 5, 6), False),
        (3, (0, 6), False),
        (2, (6,), False),  # the system message goes, too
        (1, None, False),
    ],
)
def test_what_goes_when(plain: PreTrainedTokenizerBase, limit: int, expected: Any, by_turns: bool) -> None:
    dialogue = [Message(role, f"{words(*numbers)} ") for role, numbers in TURNS]  # plain puts nothing between turns
    for by_tokens in (True, False):
        if expected is not None and (by_tokens or by_turns):
            result = fit_prompt(Template(plain), Row(tuple(dialogue)), limit, by_tokens)
            assert tuple(result.ids) == (BOS, *ids(*expected))
            assert Template(plain).prompt_ids(result.messages) == result.ids
        else:
            assert fit_prompt(Template(plain), Row(tuple(dialogue)), limit, by_tokens) is None


def test_a_system_message_goes_where_it_leaves_too_little(plain: PreTrainedTokenizerBase) -> None:
    """Of 12 tokens a fourth is the user's: BOS and 8 of the system's leave it 3, and 9 leave it 2."""
    for size, remaining in ((8, (*range(8), 107, 108, 109)), (9, tuple(range(100, 110)))):
        messages = (Message("system", words(*range(size)) + " "), Message("user", words(*range(100, 110))))
        assert tuple(fit_prompt(Template(plain), Row(tuple(messages)), 12, by_tokens=True).ids) == (
            BOS,
            *ids(*remaining),
        )


# --- templates and tokenizers of every kind


@pytest.mark.parametrize("kind", ["chat bytes", "chat llama", "first", "slow"])
def test_a_cut_prompt_is_what_the_template_writes_around_as_many_last_words_as_fit(kind: str) -> None:
    """Beside a search through all the ends of the last turn."""
    tokenizer = {**MAKERS, "slow": slow_tokenizer}[kind]()
    content = "the fox\nsaid: " + " ".join(["the", "fox", "ran"] * 7)
    ends = [content[i:] for i in range(len(content)) if not content[i].isspace() and content[i - 1 : i].strip() == ""]
    for name in TEMPLATES:
        template = Template(prepare_tokenizer(tokenizer, name))
        system = Message("system", "be kind")
        dialogue = (system, Message("user", "the"), Message("assistant", "a"), Message("user", content))
        sizes = {end: len(template.prompt_ids((system, Message("user", end)))) for end in ends}
        for share in (3, 2):
            limit = sizes[ends[0]] // share + min(sizes.values())
            fitted = fit_prompt(template, Row(tuple(dialogue)), limit, by_tokens=True)
            best = next(end for end in ends if sizes[end] <= limit)
            assert fitted.messages == [system, Message("user", best)], name
            assert fitted.ids == template.prompt_ids(fitted.messages)


@pytest.mark.parametrize("limit", [3, 4, 5, 6, 8, 20])
def test_a_prompt_that_is_cut_keeps_its_tools(limit: int, tmp_path: Path) -> None:
    """They stand before all turns, and count."""
    tokenizer = words_tokenizer(tmp_path, *(f"w{i}" for i in range(20)))
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name + ' ' }}{% endfor %}"
        "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"
    )
    template = Template(prepare_tokenizer(tokenizer, "auto"))
    prompt = [Message(role, words(*numbers)) for role, numbers in TURNS[1:]]
    row = Row(tuple(prompt), variables={"tools": [{"name": "w17"}, {"name": "w18"}]})
    fitted = fit_prompt(template, row, limit, by_tokens=True)
    assert fitted is not None and len(fitted.ids) <= limit
    kept = {20: (1, 2, 3, 4, 5, 6), 8: (1, 2, 3, 4, 5, 6), 6: (4, 5, 6), 5: (4, 5, 6), 4: (5, 6), 3: (6,)}[limit]
    assert tuple(fitted.ids) == ids(17, 18, *kept)


def test_a_text_without_spaces_is_cut_between_characters() -> None:
    template = Template(prepare_tokenizer(MAKERS["chat bytes"](), "chatml"))
    text = "".join(chr(0x4E00 + i) for i in range(200))  # of three bytes each
    fitted = fit_prompt(template, Row((Message("user", text),)), 300, by_tokens=True)
    assert 300 - 16 * 3 < len(fitted.ids) <= 300
    assert text.endswith(fitted.messages[-1].content)


def test_no_prompt_is_left_without_words() -> None:
    """A template that leaves no fourth of the tokens to the user drops the row."""
    tokenizer = prepare_tokenizer(MAKERS["chat bytes"](), "alpaca")
    row = Row((Message("user", "the fox " * 50),), "yes", "no")
    frame = len(Template(tokenizer).prompt_ids(()))
    for limit, fits in ((frame * 4 // 3 - 2, False), (frame * 4 // 3 + 2, True)):
        for phase in ("sft", "reward", "ppo"):
            result = encoded(tokenizer, phase, row, max_prompt_length=limit, max_length=999)  # type: ignore[arg-type]
            assert isinstance(result, tuple) == fits and (fits or result == "prompt too long")
