"""Models and tokenizers that are not what they should be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.errors import UserError
from rlhf.models.load import load_causal_lm
from rlhf.plan.sizes import size
from rlhf.text.tokenizer import load_tokenizer
from rlhf.training.checks import check_start
from tests.support import payloads, tiny


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A good Llama with its tokenizer."""
    tiny.causal_lm("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(load: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 no archive"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_make_no_model_are_named(model_path: Path, name: str, content: bytes) -> None:
    (model_path / "model.safetensors").unlink()
    (model_path / name).write_bytes(content)
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message.startswith(f"model '{model_path}': cannot be loaded: ") and name in message


@pytest.mark.parametrize("content", ["{", "[]", "null", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_malformed_config_is_one_line(model_path: Path, name: str, content: str) -> None:
    (model_path / name).write_bytes(content.encode("latin-1"))
    if not name.startswith("tokenizer"):
        message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
        assert message.startswith(f"model '{model_path}': cannot be loaded: ") and name in message
    if name != "generation_config.json":
        message = refusal(lambda: load_tokenizer(str(model_path)))
        expected = "no tokenizer can be loaded" if name == "tokenizer.json" else name
        assert message.startswith(f"{model_path}: ") and expected in message


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -1},
        {"num_hidden_layers": "two"},
        {"model_type": ["llama"]},
        {"dtype": "evil"},
        {"text_config": {"model_type": "llama"}},
        {"vocab_size": 10**12},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"attn_implementation": "nonsense"},
        {"rope_scaling": {"rope_type": "evil"}},
        {"hidden_act": "os.system"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_makes_no_sense_is_one_line(model_path: Path, change: dict[str, Any]) -> None:
    path = model_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message.startswith(f"model '{model_path}': ")
    if next(iter(change)) in ("rope_scaling", "hidden_act"):
        assert "transformers has no 'evil'" in message or "transformers has no 'os.system'" in message
        assert "transformers has no '" in refusal(lambda: size(str(model_path), "lm"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Evil"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_tokenizer_that_makes_no_sense_is_one_line(model_path: Path, change: dict[str, Any]) -> None:
    path = model_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert f"{model_path}: no tokenizer can be loaded from it: " in refusal(lambda: load_tokenizer(str(model_path)))


def test_padding_beyond_the_embedding_is_one_line(model_path: Path) -> None:
    payloads.edit_json(model_path / "config.json", pad_token_id=10**6)
    message = refusal(lambda: load_causal_lm(str(model_path), torch.float32, tiny.VOCAB))
    assert message == f"model '{model_path}': cannot be loaded: config.json: Padding_idx must be within num_embeddings"


def test_ids_with_gaps_are_refused_by_a_smaller_embedding(model_path: Path) -> None:
    path = model_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["w9"] = 10**6
    path.write_text(json.dumps(tokenizer))
    message = refusal(lambda: check_start(str(model_path), "plain", 8))
    assert message.startswith(
        f"model '{model_path}': its embedding has {tiny.VOCAB} rows, but its tokenizer 1000001 ids"
    )
