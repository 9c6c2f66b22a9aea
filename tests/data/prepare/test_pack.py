"""Plain text becomes contexts of full length, none of its tokens lost."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.dataset import PhaseData, Recipe, open_datasets
from data.prepare import pack
from data.prepare.encode import Demonstration
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    file = tmp_path_factory.mktemp("model") / "words.yaml"
    file.write_text(json.dumps({"tokenizer": {"words": [f"w{i}" for i in range(3000)]}}))
    return prepare_tokenizer(load_tokenizer(str(file)), "auto")


def texts(count: int) -> list[str]:
    """Of 1 to 40 words, no word twice in all but the first, which counts."""
    return [" ".join(f"w{i}" for _ in range(1 + i * 7 % 40)) for i in range(count)]


def packed(tokenizer: PreTrainedTokenizerBase, **options: Any) -> PhaseData:
    return open_datasets(DataOptions(data_split=(1, 0, 0), **options), Recipe("sft", objective="text"), tokenizer)


def test_all_tokens_are_there_and_contexts_are_full(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "BATCH_TEXTS", 7)
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(300)))
    data = packed(tokenizer, data_path=(str(path),), max_length=64, eval_fraction=0.2)
    result: list[tuple[int, ...]] = []
    for side in (data.train, data.evaluation):
        stream: list[int] = []
        for i, item in enumerate(side):
            assert isinstance(item, Demonstration)
            assert len(item.ids) == 64 or i == len(side) - 1
            assert item.spans == ((1, len(item.ids)),)
            stream += item.ids
        assert stream[0] == BOS
        ends = [i for i, token in enumerate(stream) if token == EOS]
        result += [tuple(stream[start + 1 : end]) for start, end in pairwise([-1, *ends])]
        assert ends[-1] == len(stream) - 1
    expected = [(BOS, *tokenizer.encode(text, add_special_tokens=False)) for text in texts(300)]
    assert sorted(result) == sorted(expected)
    whole: dict[str, Any] = {"data_path": (str(path),), "max_length": 64, "eval_fraction": 0.0}
    first, second = (packed(tokenizer, data_seed=seed, **whole).train[:] for seed in (0, 1))
    assert first != second  # the order is the seed's, not the file's
    outcomes = data.report["sources"][0]["outcomes"]
    assert outcomes["train"] + outcomes["evaluation"] == 300
    assert len(data.train) < 300


def test_paragraphs_of_a_text_file_and_weights(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(texts(50)))
    (tmp_path / "b.txt").write_text("\n\n".join(f"w{i} w{i}" for i in range(1000, 1200)))
    weighted_paths = (f"{tmp_path}/a.txt=1", f"{tmp_path}/b.txt=3")
    data = packed(tokenizer, data_path=weighted_paths, max_length=32, eval_fraction=0.0)
    assert data.report["train"]["rows_by_source"] == [50, 150]


def test_a_last_token_alone_teaches_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("w1 w2\n\nw3 w4 w5")  # with BOS and EOS 4 and 5 tokens
    for length, contexts in ((8, [8]), (4, [4, 4]), (7, [7, 2])):
        data = packed(tokenizer, data_path=(f"{tmp_path}/a.txt",), max_length=length, eval_fraction=0.0)
        assert [len(item.ids) for item in data.train] == contexts  # type: ignore[union-attr]
