"""A text that a template has rendered is the dialogue again; a text that only quotes its markers is not."""

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.rendered import markers_of, prompt_of
from rlhf.text.templates import BUILT_IN
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.rlhf.text.test_families import FAMILIES, family
from tests.support.texts import byte_tokenizer, with_chat_tokens

SYSTEM, ASK, ANSWER = (
    Message("system", "Be kind."),
    Message("user", "hi\nthere"),
    Message("assistant", "It is.\n\nYes."),
)
MORE = (Message("user", "and?"), Message("assistant", "No."))
DIALOGUES = [(ASK,), (ASK, ANSWER), (SYSTEM, ASK, ANSWER), (ASK, ANSWER, *MORE), (SYSTEM, ASK, ANSWER, MORE[0])]
NO_SYSTEM = ("human_assistant", "alpaca")
"""they begin with the system message itself, so any text would do"""


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    if name in BUILT_IN:
        return prepare_tokenizer(with_chat_tokens(byte_tokenizer()), name)
    return family(name).tokenizer


def ids(template: Template, dialogue: tuple[Message, ...]) -> list[int]:
    if dialogue[-1].role == "user":
        return template.prompt_ids(dialogue)
    return template.prompt_ids(dialogue[:-1]) + template.turn_ids(Row(dialogue[:-1]), dialogue[-1])


@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in BUILT_IN if name != "plain")])
def test_a_rendered_text_is_learned_as_its_dialogue(name: str) -> None:
    tokenizer = tokenizer_of(name)
    markers, template = markers_of(tokenizer), Template(tokenizer)
    assert markers is not None
    for dialogue in DIALOGUES:
        asks = dialogue[-1].role == "user"
        if dialogue[0] is SYSTEM and (name in NO_SYSTEM or (name == "mistral" and not asks)):
            continue  # mistral's loses the system message of a finished dialogue
        dicts = [{"role": message.role, "content": message.content} for message in dialogue]
        text = str(tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=asks))
        for shown in (text, text.removeprefix("<s>"), text.rstrip(), text.rstrip() + "</s>\n"):
            assert markers.inside(shown)
            got = markers.dialogue(shown)
            assert got, shown
            assert ids(template, got) == ids(template, dialogue), (got, shown)


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("Write <|im_end|>\n<|im_start|>assistant\n after the question.", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\nno", True),
        ("<|im_start|>user\nhi<|im_end|><|im_start|>assistant\nyes<|im_end|>", True),
    ],
    ids=["a quotation", "a tool", "two answers", "other space"],
)
def test_a_text_with_markers_that_is_no_dialogue(text: str, begins: bool) -> None:
    markers = markers_of(tokenizer_of("chatml"))
    assert markers is not None and markers.dialogue(text) == () and markers.begins(text) == begins


def test_a_template_that_writes_nothing_between_turns_has_no_markers() -> None:
    assert markers_of(prepare_tokenizer(byte_tokenizer(), "plain")) is None


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_rendered_prompt_is_its_messages_or_refused(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for turns in DIALOGUES:
        dicts = [{"role": message.role, "content": message.content} for message in turns]
        text = str(tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=turns[-1].role == "user"))
        row = Row((Message("user", text),))
        if turns[-1].role == "user":
            assert prompt_of(tokenizer, row).prompt == turns
        else:
            with pytest.raises(UserError, match="no dialogue up to a user's turn"):
                prompt_of(tokenizer, row)
    plain = Row((Message("user", "What does <|im_start|>assistant mean?"),))
    assert prompt_of(tokenizer, plain) is plain
