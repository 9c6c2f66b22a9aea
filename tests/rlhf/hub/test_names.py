"""Short names of models, as people type them."""

from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.text.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("typed", "hub_id"),
    [
        ("opt-1.3b", "facebook/opt-1.3b"),
        ("opt-350m", "facebook/opt-350m"),
        ("OPT-66B", "facebook/opt-66b"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("pythia-160m", "EleutherAI/pythia-160m"),
        ("bloom-560m", "bigscience/bloom-560m"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_short_name_is_a_hub_id(typed: str, hub_id: str) -> None:
    assert short_names.resolve(typed) == hub_id


@pytest.mark.parametrize("name", ["someone/opt-1.3b", "no-such-model", "a/b/c", ""])
def test_anything_else_stays_as_it_is(name: str) -> None:
    assert short_names.resolve(name) == name


def test_what_is_there_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert short_names.resolve("gpt2") == "gpt2"
    assert short_names.resolve("gpt2-medium") == "openai-community/gpt2-medium"


def test_every_name_means_one_place_and_every_preset_is_there() -> None:
    ids = [pattern.format(size) for pattern, sizes in short_names.FAMILIES.items() for size in sizes.split()]
    short = [hub_id.split("/")[1].lower() for hub_id in ids]
    assert len(set(short)) == len(short), "two models share a short name"
    assert all(hub_id.count("/") == 1 and not set("{} ") & set(hub_id) for hub_id in ids)
    assert all(short_names.resolve(name) == hub_id for name, hub_id in zip(short, ids, strict=True))
    assert short_names.PRESETS and all(path.is_file() for path in short_names.PRESETS.values())


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """Told at once, whether the hub answers or not."""
    (tmp_path / "pairs.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"pairs\.jsonl: got a file, expected a model directory, a hub id"):
        load_tokenizer(str(tmp_path / "pairs.jsonl"))
