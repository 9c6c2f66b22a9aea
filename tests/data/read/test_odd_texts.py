"""Texts that are too long, empty or odd, and tokenizers with ways of their own: which ids a row becomes, by hand."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import pair_batch, sft_batch
from data.build.encode import Demonstration, Item, Preference, Prompt
from data.build.split import PHASES
from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets
from rlhf.text.tokenizer import prepare_tokenizer
from tests.support.texts import CHAT_TOKENS, MAKERS, byte_tokenizer, words_tokenizer

BOS, EOS, FIRST = 1, 2, 4


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(
    phase: Any, tokenizer: Any, rows: Iterable[dict[str, Any]] | str, objective: str = "response", **options: Any
) -> PhaseData:
    """The rows, all of them to train on, in their order by content."""
    text = rows if isinstance(rows, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path("rows.jsonl").write_text(text, "utf-8", newline="")
    every = {"eval_fraction": 0.0, "data_split": tuple(float(name == phase) for name in PHASES), "max_dropped": 1.0}
    data_options = DataOptions(data_path=("rows.jsonl",), **{**every, **options})
    return open_datasets(data_options, Recipe(phase, objective=objective), tokenizer)


def sides_of(item: Item) -> list[tuple[int, ...]]:
    return [item.chosen, item.rejected] if isinstance(item, Preference) else [item.ids]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Words w0, w1, ... with the ids 4, 5, ..."""
    return prepare_tokenizer(words_tokenizer(tmp_path_factory.mktemp("words"), *(f"w{i}" for i in range(99))), "plain")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("truncate", ["turns", "tokens"])
def test_a_prompt_longer_than_max(phase: Any, truncate: str, plain: Any) -> None:
    """max_prompt_length 8, BOS included: prompts of 7, 8, 9 and 80 tokens."""
    prompts = {length: [i % 90 for i in range(length, 2 * length - 1)] for length in (7, 8, 9, 80)}
    rows = [{"prompt": " ".join(f"w{i}" for i in p), "chosen": "w97", "rejected": "w98"} for p in prompts.values()]
    data = opened(phase, plain, rows, max_prompt_length=8, max_length=32, truncate=truncate)
    result = {item.chosen[: item.prompt_length] if isinstance(item, Preference) else item.ids for item in data.train}
    end = (FIRST + 97, EOS) if phase == "sft" else ()
    expected = [
        (BOS, *(FIRST + i for i in p[-7:]), *end) for length, p in prompts.items() if length < 9 or truncate == "tokens"
    ]
    assert result == set(expected)
    assert data.train.shortened == (2 if truncate == "tokens" else 0)
    message = (
        "2 of 4 training rows are cut to length: 2 lost part of the prompt (--max-length 32, --max-prompt-length 8)"
    )
    assert data.notes == ((message,) if truncate == "tokens" else ())
    outcomes = {"train": 4} if truncate == "tokens" else {"train": 2, "prompt too long": 2}
    assert data.report["sources"][0]["outcomes"] == outcomes


def test_texts_that_are_empty(plain: Any) -> None:
    rows = [
        {"prompt": "", "chosen": "w1", "rejected": ""},
        {"prompt": " \n", "chosen": "w2", "rejected": " "},
        {"prompt": "w3", "chosen": "", "rejected": "w4"},
        {"prompt": "w5", "chosen": " \t\n", "rejected": ""},
    ]
    result = {phase: opened(phase, plain, rows) for phase in PHASES}
    accounts = {phase: data.report["sources"][0]["outcomes"] for phase, data in result.items()}
    assert accounts == {
        "sft": {"train": 2, "empty response": 2},
        "reward": {"train": 3, "equal sides": 1},
        "ppo": {"train": 2, "empty prompt": 2},
    }
    assert {item.ids for item in result["sft"].train} == {(BOS, FIRST + 1, EOS), (BOS, FIRST + 2, EOS)}
    assert {(item.chosen, item.rejected) for item in result["reward"].train} == {
        ((BOS, FIRST + 1, EOS), (BOS, EOS)),
        ((BOS, FIRST + 2, EOS), (BOS, EOS)),
        ((BOS, FIRST + 3, EOS), (BOS, FIRST + 3, FIRST + 4, EOS)),
    }
    assert {item.ids for item in result["ppo"].train} == {(BOS, FIRST + 3), (BOS, FIRST + 5)}


ODD = ["a\u2028b\u2029c\x85d", "NUL \0 and \ufeff inside", "\u202e right to left", "two\r\nlines \U0001f98a"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_odd_characters_byte_order_mark_and_line_ends(end: str) -> None:
    tokenizer = prepare_tokenizer(byte_tokenizer(), "plain")
    rows = [{"prompt": text, "chosen": text + "x", "rejected": text + "y"} for text in ODD]
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + end for i, row in enumerate(rows))
    data = opened("ppo", tokenizer, text)
    assert {item.row.prompt[0].content for item in data.train if isinstance(item, Prompt)} == set(ODD)
    assert {tokenizer.decode(item.ids[1:]) for item in data.train if isinstance(item, Prompt)} == set(ODD)
    pairs = opened("reward", tokenizer, text).train
    sides = {tokenizer.decode(side[item.prompt_length : -1]) for item in pairs for side in (item.chosen, item.rejected)}
    assert sides == {text + letter for text in ODD for letter in "xy"}


def test_a_line_of_ten_megabytes(plain: Any) -> None:
    rows = [{"prompt": "w1", "response": "w2 " + "x" * 10_000_000}, {"prompt": "w" * 10_000_000, "response": "w3"}]
    rows += [{"prompt": "w4", "response": "w5 " * 100_000}]
    data = opened("sft", plain, rows)
    assert data.report["sources"][0]["outcomes"] == {"train": 2, "response too long": 1}


# --- tokenizers


@pytest.mark.parametrize("kind", ["chat bytes", "chat llama"])
def test_special_tokens_that_texts_spell(kind: str) -> None:
    """As many special tokens as in a dialogue that spells none, and the words come back."""
    tokenizer = prepare_tokenizer(MAKERS[kind](), "chatml")
    special = set(tokenizer.convert_tokens_to_ids([*CHAT_TOKENS, "<s>", "</s>"]))
    result = {}
    for words in ("abc", "a </s> b <|im_end|> c <|im_start|>assistant"):
        row = {"prompt": words, "chosen": f"{words} x", "rejected": f"{words} y", "text": words}
        items = [opened(phase, tokenizer, [row]).train[0] for phase in PHASES]
        items.append(opened("sft", tokenizer, [{"text": words}], objective="text").train[0])
        sides = [ids for item in items for ids in sides_of(item)]
        result[words] = [[i for i in ids if i in special] for ids in sides]
        assert all(words in tokenizer.decode(ids) for ids in sides)
    one, other = result.values()
    assert one == other
    assert [len(ids) for ids in one] == [5, 5, 5, 4, 2]


@pytest.mark.parametrize("kind", ["llama", "first", "chat llama"])
@pytest.mark.parametrize("name", ["plain", "human_assistant", "llama_2"])
def test_a_tokenizer_and_a_template_that_both_write_bos(kind: str, name: str) -> None:
    tokenizer = prepare_tokenizer(MAKERS[kind](), name)
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
    rows = [{"prompt": "the", "chosen": "a", "rejected": "b"}]
    for phase in PHASES:
        for ids in sides_of(opened(phase, tokenizer, rows).train[0]):
            assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1)


@pytest.mark.parametrize(
    "special", [{"eos_token": "</s>"}, {"eos_token": "</s>", "pad_token": "</s>", "bos_token": "</s>"}]
)
def test_padding_that_is_eos_or_none(special: dict[str, str]) -> None:
    """EOS is attended to and learned in every row, the padded ones too."""
    raw = byte_tokenizer(**special)
    tokenizer = prepare_tokenizer(raw, "auto")
    assert tokenizer.pad_token_id not in (None, raw.eos_token_id)
    rows = [{"prompt": "a", "chosen": "the " * n, "rejected": "no"} for n in (1, 5)]
    demonstrations = [item for item in opened("sft", tokenizer, rows).train if isinstance(item, Demonstration)]
    preferences = [item for item in opened("reward", tokenizer, rows).train if isinstance(item, Preference)]
    pairs = pair_batch(preferences, tokenizer.pad_token_id)
    for batch in (sft_batch(demonstrations, tokenizer.pad_token_id), pairs.chosen, pairs.rejected):
        last = batch.mask.sum(1) - 1
        each = torch.arange(len(batch))
        assert (batch.ids[each, last] == tokenizer.eos_token_id).all()
        assert batch.loss_mask[each, last].all()
        assert (batch.ids[~batch.mask] == tokenizer.pad_token_id).all()


def test_a_tokenizer_of_the_same_size_with_two_ids_swapped(tmp_path: Path) -> None:
    """What one model's tokenizer made is never read for another's."""
    for i, words in enumerate((["w0", "w1"], ["w1", "w0"])):
        (tmp_path / str(i)).mkdir()
        tokenizer = prepare_tokenizer(words_tokenizer(tmp_path / str(i), *words), "plain")
        [item] = opened("sft", tokenizer, [{"prompt": "w0", "response": "w1"}]).train
        assert sides_of(item) == [(BOS, FIRST + i, FIRST + 1 - i, EOS)]
