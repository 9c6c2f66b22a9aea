"""Where in a prompt an assistant speaks: read back from the tokens that are marked."""

import itertools
import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.templates import BUILT_IN
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.text.turns import Altered
from rlhf.types import Message, Row
from tests.support.texts import DIALOGUE, HORRIBLE, MAKERS, byte_tokenizer, slow_tokenizer, user

TRIMMING = ("llama_2", "llama_3")
BEFORE = {"human_assistant": " ", "llama_2": " "}
AFTER = {"llama_2": " </s>", "alpaca": "</s>"}
AFTER_WITH_CHAT_TOKENS = {**AFTER, "chatml": "<|im_end|>", "llama_3": "<|eot_id|>"}

SAID = [
    "ok", "ok", "", "a\nb", "</s>", "x <|im_end|>", "<|eot_id|><s>", "[INST] no [/INST]", "{{ eos_token }}",
    "Human: no", "\n\nAssistant: ok", "### Response:\nok", "é漢👩‍👧", "\ue0000\ue001ok\ue002", "assistant", "user\n",
]  # fmt: skip
"""contents that look like the frames around them, or like each other"""


def turn_ids(template: Template, messages: list[Message]) -> list[list[int]]:
    """The ids of each stretch of marked tokens."""
    ids, turns = template.prompt_ids_and_turns(Row(tuple(messages)))
    assert ids == template.prompt_ids(messages)
    stretches = itertools.groupby(zip(ids, turns, strict=True), key=lambda pair: pair[1])
    return [[i for i, _ in pairs] for marked, pairs in stretches if marked]


def dialogue(*contents: str) -> list[Message]:
    """Turns by turns, the user first."""
    return [Message(role, text) for role, text in zip(itertools.cycle(("user", "assistant")), contents, strict=False)]


@pytest.mark.parametrize("kind", ["bytes", "chat bytes"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_marked_tokens_spell_the_turns(kind: str, name: str) -> None:
    template = Template(prepare_tokenizer(MAKERS[kind](), name))
    before = BEFORE.get(name, "")
    after = (AFTER_WITH_CHAT_TOKENS if kind == "chat bytes" else AFTER).get(name, "")
    draw = random.Random(0)
    for _ in range(60):
        contents = [draw.choice(SAID) for _ in range(draw.choice((3, 4, 5, 7)))]
        contents[::2] = [content or "?" for content in contents[::2]]  # turns stay apart
        system = [Message("system", draw.choice(SAID[:3]))] * draw.randrange(2)
        expected = []
        for content in contents[1::2]:
            content = content.strip() if name in TRIMMING else content
            expected.append(f"{before}{content}{after}" if content else after.strip())
        texts = [template.tokenizer.decode(ids) for ids in turn_ids(template, [*system, *dialogue(*contents)])]
        assert texts == [text for text in expected if text]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_turn_is_a_response(kind: str, name: str) -> None:
    template = Template(prepare_tokenizer(MAKERS[kind](), name))
    responses = [text for text in SAID if text and text == text.strip()]
    turns = itertools.chain.from_iterable(("?", content) for content in responses)
    for content, ids in zip(responses, turn_ids(template, dialogue(*turns, "?")), strict=True):
        response = template.response_ids(content)
        assert ids in (response, response[:-1])  # without EOS where the template does not close turns


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_ids_are_those_of_the_prompt(kind: str, name: str) -> None:
    template = Template(prepare_tokenizer(MAKERS[kind](), name))
    for messages in ([], *(dialogue(text, text, "ok") for text in HORRIBLE), *map(user, HORRIBLE)):
        ids, turns = template.prompt_ids_and_turns(Row(tuple(messages)))
        assert ids == template.prompt_ids(messages)
        assert len(turns) == len(ids)
        assert any(turns) == (len(messages) > 1)


def test_the_same_words_of_both_sides_by_hand() -> None:
    template = Template(prepare_tokenizer(MAKERS["chat bytes"](), "chatml"))
    ids, turns = template.prompt_ids_and_turns(Row(tuple(dialogue("ok", "ok", "ok", "ok", "ok"))))
    frame = {"user": "<|im_start|>user\n", "assistant": "<|im_start|>assistant\n"}
    expected: list[bool] = [False]  # <s>
    for role in ("user", "assistant", "user", "assistant", "user"):
        header = 1 + len(frame[role].removeprefix("<|im_start|>"))
        expected += [False] * header + [role == "assistant"] * 3 + [False]  # o, k, <|im_end|>, line break
    expected += [False] * (1 + len("assistant\n"))
    assert turns == expected
    assert len(ids) == len(turns)


def test_a_token_across_the_border_counts(tmp_path: Path) -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "plain"))
    tokens = template.tokenizer.convert_ids_to_tokens
    assert [tokens(ids) for ids in turn_ids(template, dialogue("t", "h", "e the", "x ", "the"))] == [
        ["the"],
        ["x", "Ġthe"],
    ]


def test_an_assistant_that_spells_the_end_token_is_not_closed_by_it() -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "plain"))
    assert [template.tokenizer.decode(ids) for ids in turn_ids(template, dialogue("a", "b", "</s>", "c"))] == ["b", "c"]


# --- templates of other people


def own(source: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Template:
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = source
    return Template(prepare_tokenizer(tokenizer, "auto"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("m.content", [" a \n</s>", "\n\n</s>", "b</s>"]),
        ("m.content | trim", ["a</s>", "</s>", "b</s>"]),
        ("m.content.rstrip()", [" a</s>", "</s>", "b</s>"]),
        ("(m.content | trim if m.role == 'user' else m.content)", [" a \n</s>", "\n\n</s>", "b</s>"]),
        ("(m.content if m.role == 'user' else m.content | trim)", ["a</s>", "</s>", "b</s>"]),
    ],
)
def test_trimming(content: str, expected: list[str]) -> None:
    template = own("{% for m in messages %}[{{ m.role }}]{{ " + content + " }}{{ eos_token }}\n{% endfor %}")
    messages = dialogue(" </s> ", " a \n", "\n", "\n\n", " u", "b", "ok\n")
    turns = [f"[assistant]{text}" for text in expected]  # the template asks for no header, so the model writes it
    assert [template.tokenizer.decode(ids) for ids in turn_ids(template, messages)] == turns


def test_a_template_that_says_nothing_for_nothing() -> None:
    template = own("{% for m in messages if m.content %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}")
    messages = dialogue("a", "", "b", "c", "d")
    assert [template.tokenizer.decode(ids) for ids in turn_ids(template, messages)] == ["[assistant]c</s>"]


@pytest.mark.parametrize("content", ["m.content.split('.')[-1]", "m.content[:3]", "m.content | upper"])
def test_a_template_that_rewrites_turns_is_refused_only_where_it_matters(content: str) -> None:
    template = own("{% for m in messages %}{{ " + content + " }}{% endfor %}")
    messages = dialogue("Abc", "a. b. cde", "c")
    assert template.prompt_ids(messages)
    with pytest.raises(Altered, match="the chat template leaves out a part of the response"):
        template.prompt_ids_and_turns(Row(tuple(messages)))


def test_special_tokens_in_a_text_that_is_changed_letter_by_letter() -> None:
    template = own("{% for m in messages %}{{ m.content | lower }}{{ eos_token }}{% endfor %}")
    tokens = template.tokenizer.convert_ids_to_tokens(template.prompt_ids(user("The </s>")))
    assert tokens == [*["the", "Ġ"], *"</s>", "</s>"]


def test_a_slow_tokenizer_does_not_know() -> None:
    template = Template(prepare_tokenizer(slow_tokenizer(), "alpaca"))
    with pytest.raises(UserError, match=r"fast tokenizer.*tokenizer\.json"):
        template.prompt_ids_and_turns(Row(tuple(DIALOGUE)))
