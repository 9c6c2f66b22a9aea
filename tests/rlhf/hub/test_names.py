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
        ("OPT-66B", "facebook/opt-66b"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
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
