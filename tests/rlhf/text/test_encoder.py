"""Many texts at a time against one by one, as transformers itself encodes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.text.dialogues import Template
from rlhf.text.encoder import Encoder
from rlhf.text.templates import BUILT_IN
from rlhf.text.tokenizer import prepare_tokenizer
from rlhf.types import Message, Row
from tests.support.texts import DIALOGUE, HORRIBLE, MAKERS, opening_ids, slow_tokenizer, user, words_tokenizer

TEXTS = ["", "the fox", " ", " the", "\n", "\n\nthe", "é漢", *HORRIBLE]

KINDS = [*MAKERS, "words", "slow"]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    makers: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
        **MAKERS,
        "words": lambda: words_tokenizer(tmp_path, "the", "fox", "Human:", "Assistant:"),
        "slow": slow_tokenizer,
    }
    return makers[request.param]()


@pytest.mark.parametrize("split", [False, True])
def test_many_texts_have_the_ids_of_each(tokenizer: PreTrainedTokenizerBase, split: bool) -> None:
    options = {"add_special_tokens": False, "split_special_tokens": split}
    expected = [tokenizer.encode(text, **options) if text else [] for text in TEXTS]
    assert Encoder(tokenizer).encode_many(TEXTS, split) == expected
    assert [ids for text in TEXTS for ids in Encoder(tokenizer).encode_many([text], split)] == expected
    assert Encoder(tokenizer).encode_many([], split) == []


def test_the_tokenizer_is_left_as_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.enable_truncation(3)
        tokenizer.backend_tokenizer.enable_padding(length=9)
    before = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None
    assert len(Encoder(tokenizer).encode_many(["the fox is a fox"], split=True)[0]) > 3
    if tokenizer.is_fast:
        assert not tokenizer.backend_tokenizer.encode_special_tokens
        assert tokenizer.backend_tokenizer.to_str() == before
    assert Encoder(tokenizer).encode_many(["</s>"], split=False) == [[tokenizer.eos_token_id]]


@pytest.mark.parametrize("kind", ["llama", "first"])
def test_the_bos_of_a_post_processor_is_never_added(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id
    for name in BUILT_IN:
        template = Template(prepare_tokenizer(tokenizer, name))
        ids = template.prompt_ids(DIALOGUE)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == template.prompt_text(DIALOGUE).count("<s>")
        assert ids[1] != tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in template.response_ids("<s> the") + opening_ids(template, "the")
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id  # nor lost


def test_spans_keep_the_spaces_that_a_post_processor_would_trim() -> None:
    encoder = Encoder(MAKERS["bytes"]())
    ids, spans = encoder.encode_with_spans(" the  é", split=True)
    assert encoder.tokenizer.convert_ids_to_tokens(ids) == ["Ġthe", "Ġ", "Ġ", "Ã", "©"]
    assert spans == [(0, 4), (4, 5), (5, 6), (6, 7), (6, 7)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_many_rows_are_each_row(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    template = Template(prepare_tokenizer(tokenizer, name))
    dialogues = [[], DIALOGUE, *map(user, TEXTS), *([*DIALOGUE, Message("user", text)] for text in TEXTS)]
    rows = [Row(tuple(messages)) for messages in dialogues]
    assert template.prompt_ids_many(rows) == [template.prompt_ids(messages) for messages in dialogues]
    assert template.prompt_ids_many([]) == template.turn_ids_many([], []) == []
    answers = [Message("assistant", text) for text in TEXTS]
    opening = [Row(()) if i % 2 else rows[1] for i in range(len(TEXTS))]
    assert template.turn_ids_many(opening, answers) == [
        opening_ids(template, text) if i % 2 else template.response_ids(text) for i, text in enumerate(TEXTS)
    ]
