"""`rlhf evaluate-reward`: numbers of a small model against its scores row by row, files of several shapes, mistakes."""

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from rlhf.maths import preferences
from rlhf.models.scalar import HEAD
from rlhf.storage import disk
from step2_reward import evaluate_reward
from tests.support import tiny
from tests.support.programs import Run, runner

EPS = 1e-5
"""of numbers near 1: some 100 operations in fp32 in a row, each of them off by 6e-8 at most"""
LISTS = [
    {"prompt": "w4 w5", "chosen": ["w6"], "rejected": ["w7 w8", "w9", "w10 w11 w12"], "subset": "facts"},
    {"prompt": "w5 w6", "chosen": ["w9 w9"], "rejected": ["w7", "w20 w8", "w30"], "subset": "facts"},
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": f"w{i} w40", "chosen": f"w{i + 20}", "rejected": " ".join([f"w{i + 3}"] * (i % 4 + 1)), "subset": "chat"}
    for i in range(4, 16)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two reward models that differ in their heads, and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for seed, name in enumerate(("one", "two", "foreign")):
        model = tiny.backbone()
        model.save_pretrained(folder / name)
        prefix = model.base_model_prefix
        head = torch.randn(1, tiny.WIDTH, generator=torch.Generator().manual_seed(seed)) / math.sqrt(tiny.WIDTH)
        state = {f"{prefix}.{key}": value for key, value in model.state_dict().items()} | {HEAD: head}
        (folder / name / "model.safetensors").unlink()
        disk.save_tensors(state, folder / name / "model.safetensors", {"format": "pt"})
        tiny.tokenizer(reverse=name == "foreign").save_pretrained(folder / name)
        paths[name] = folder / name
    return paths


@pytest.fixture(autouse=True)
def _paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    for name, rows in {"lists": LISTS, "pairs": PAIRS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    transformers.utils.logging.set_verbosity_error()  # as the program does, but for this process
    transformers.utils.logging.disable_progress_bar()
    yield runner("evaluate-reward", evaluate_reward.main, monkeypatch, capsys)
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()


@functools.cache
def classifier(path: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()


def score(path: str, prompt: str, response: str) -> float:
    """By transformers alone, of one row."""
    ids = [tiny.BOS, *(int(word[1:]) for word in f"{prompt} {response}".split()), tiny.EOS]
    with torch.no_grad():
        return float(classifier(path)(torch.tensor([ids])).logits)


def comparisons(rows: list[dict[str, Any]]) -> Iterator[tuple[int, str, str, str]]:
    """(number of the row, prompt, better, worse) of each comparison."""
    for number, row in enumerate(rows):
        sides = [[row[side]] if isinstance(row[side], str) else row[side] for side in ("chosen", "rejected")]
        for better in sides[0]:
            for worse in sides[1]:
                yield number, row["prompt"], better, worse


def test_the_numbers_of_files_are_those_of_scores_row_by_row(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    names = [str(models[name]) for name in ("one", "two")]
    files = [str(tmp_path / f"{name}.jsonl") for name in ("pairs", "lists")]
    out = tmp_path / "out"
    code, output, errors = run(*names, "--data-path", *files, "--dtype", "fp32", "--output", str(out))
    assert (code, errors) == (0, "")
    assert "length rule" in output and "pairs that two models order alike" in output
    results = json.loads((out / "results.json").read_text())
    rows_of = {(one["model"], one["source"], one["subset"]): one for one in results["results"]}
    parts = [(files[0], "all"), (files[1], "all"), ("all", "all"), ("all", "chat"), ("all", "facts")]
    assert [*rows_of] == [(model, *part) for model in names for part in parts]
    gaps: dict[str, list[torch.Tensor]] = {}
    for model in names:
        for rows, source in zip((PAIRS, LISTS), files, strict=True):
            compared = list(comparisons(rows))
            gap = torch.tensor([score(model, p, b) - score(model, p, w) for _, p, b, w in compared])
            elements = torch.tensor([number for number, *_ in compared])
            lengths = torch.tensor([len(b.split()) - len(w.split()) for _, _, b, w in compared])
            result = rows_of[model, source, "all"]
            assert result["pairs"] == len(gap) == (6 if rows is LISTS else 12)
            assert result["accuracy"]["mean"] == pytest.approx(preferences.accuracy(gap, elements).mean)
            loss = preferences.by_element(torch.log1p(torch.exp(-gap)), elements).mean().item()
            assert result["loss"] == pytest.approx(loss, abs=EPS)
            longer = preferences.by_element((lengths.sign() + 1) / 2, elements).mean().item()
            assert result["length_rule"] == pytest.approx(longer)
            assert result["calibration_error"] == pytest.approx(preferences.calibration_error(gap), abs=EPS)
            best_of_4 = None if rows is PAIRS else [bool((gap[elements == n] > 0).all()) for n in (0, 1)]
            assert (result["lists"] or {}).get("mean") == (best_of_4 and sum(best_of_4) / 2)
            gaps.setdefault(model, []).append(gap)
    for model in names:
        assert [rows_of[model, *part]["pairs"] for part in parts] == [12, 6, 18, 12, 6]
        pairs, lists, whole, *subsets = (rows_of[model, *part]["accuracy"]["mean"] for part in parts)
        assert whole == pytest.approx((12 * pairs + 2 * lists) / 14) and subsets == [pairs, lists]
    one, two = (torch.cat(gaps[name]).sign() for name in names)
    assert results["agreement"][0][1] == pytest.approx(((1 + one * two) / 2).mean().item())
    assert "| model | source | subset |" in (out / "results.md").read_text()


def test_mistakes_of_the_user(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    one, data = str(models["one"]), ("--data-path", str(tmp_path / "pairs.jsonl"))
    for words, message in (
        ((), "rlhf evaluate-reward: got no model, expected MODEL ... --data-path PATH ..."),
        ((one,), "--data-path: not given, expected sources of pairs, e.g. pairs.jsonl"),
        ((one, str(models["foreign"]), *data), "got different tokenizers or chat templates, expected one"),
    ):
        code, _, errors = run(*words)
        assert code == 2 and message in errors and errors.count("\n") == 1
    (tmp_path / "results.json").touch()
    code, _, errors = run(one, *data, "--output", str(tmp_path))
    assert code == 2 and "has a results.json already; name another directory, or add --overwrite" in errors
