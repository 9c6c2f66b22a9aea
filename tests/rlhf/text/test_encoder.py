"""Many texts at a time against one by one, as transformers itself encodes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.text.dialogues import Template
from rlhf.text.encoder import Encoder
from rlhf.text.templates import BUILT_IN
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer
from rlhf.types import Message, Row
from tests.support.texts import (
    DIALOGUE,
    HORRIBLE,
    MAKERS,
    byte_tokenizer,
    opening_ids,
    slow_tokenizer,
    user,
    words_tokenizer,
)

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


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_the_split_of_tokenizer_json_stays_whatever_class_is_named(tmp_path: Path, named: str) -> None:
    """The oracle is the file itself, as the library tokenizers reads it; and what is saved has it still."""
    backend = byte_tokenizer().backend_tokenizer
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s*[\r\n]+|[^\r\n\p{N}]+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    merged = json.loads(backend.to_str())
    pairs = [("Ċ", "Ċ"), ("1", "2"), ("12", "3"), ("123", "4"), ("e", "Ġthe")]
    merged["model"]["vocab"] |= {a + b: 1000 + i for i, (a, b) in enumerate(pairs)}
    merged["model"]["merges"] += [list(pair) for pair in pairs]
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(merged))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    texts = ["the 1234", "a\n\nb", "see the fox\r\n\n12345 é"]
    expected = [Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids for text in texts]
    loaded = load_tokenizer(str(tmp_path))
    assert Encoder(loaded).encode_many(texts, split=False) == expected
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    loaded.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").backend_tokenizer.encode(texts[0]).ids == expected[0]
