"""`rlhf verify`: honest runs hold, whatever they are made of; the bounds are those of rounding, and no wider."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.chain import claims, recount, verify
from rlhf.chain.claims import Claim
from rlhf.errors import UserError
from rlhf.report import seal
from tests.rlhf.chain.test_train import SMALL
from tests.support import changed_runs, tiny

ROOT = Path(__file__).parents[3]


def test_what_holds() -> None:
    assert Claim("", 1.0, 1.01, 0.02).holds and not Claim("", 1.0, 1.01, 0.005).holds
    assert Claim("", 3, 3).holds and not Claim("", 3, 2).holds and not Claim("", 1.0, float("nan"), 9.0).holds
    assert Claim("", float("nan"), float("nan")).holds and not Claim("", float("nan"), 1.0, 9.0).holds
    assert Claim("", "yes", "yes").holds and not Claim("", "yes", "no").holds
    assert Claim("", 7, None).holds, "what was not computed is no difference"


def log_probs(model: Any, rows: Sequence[list[int]]) -> tuple[Tensor, float]:
    values = [recount.log_probs(model, row) for row in rows]
    return torch.cat([each for each, _ in values]), (sum(square for _, square in values) / len(values)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_bound_holds_and_is_no_wider_than_it_must(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The same weights in the dtype of a run, and in float64 in place of exact numbers."""
    model: Any = tiny.causal_lm(family).to(dtype)
    model.save_pretrained(tmp_path)
    rows = [ids[mask].tolist() for ids, mask in [*zip(*vars_of(tiny.sequences([40] * 24, [1] * 24)), strict=True)]]
    run = recount.Recount.__new__(recount.Recount)
    run.device, run.config = "cpu", {"dtype": "auto"}
    _, relative = run.model(str(tmp_path))
    computed, scale = log_probs(model, rows)
    exact, _ = log_probs(model.double(), rows)
    spread = relative * scale
    error = (computed - exact).abs()
    bound = 2**0.5 * claims.largest_error(spread, len(error))
    assert error.max() < bound < 300 * error.max()
    assert (computed - exact).mean().abs() < claims.mean_error(spread, len(error))


def vars_of(rows: Any) -> tuple[Tensor, Tensor]:
    return rows.ids, rows.mask


def test_a_log_prob_is_rounded_where_logits_are_small() -> None:
    """A policy that has hardly learned gives all of a large vocabulary the same probability."""
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(0)) * 1e-4
    values = logits.log_softmax(-1)[:, 0].double()
    error = (values - logits.double().log_softmax(-1)[:, 0]).abs().max()
    spread = claims.EPS * logits.square().mean().sqrt().item()
    assert claims.largest_error(spread, len(values)) < error
    assert error < claims.largest_error(claims.log_prob_spread(spread, values), len(values))


def test_a_seal_is_of_these_files_only(tmp_path: Path) -> None:
    files = [tmp_path / "a/manifest.json", tmp_path / "a/model/weights"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    assert seal.describe(tmp_path) == ""
    seal.write(tmp_path, files, 12, 3)
    words = seal.describe(tmp_path)
    assert "12 numbers" in words and "3 were not computed again" in words and f"torch {version('torch')}" in words
    files[1].write_text("2")
    assert seal.describe(tmp_path) == "", "the same size, another content"
    files[1].write_text("1")
    assert seal.describe(tmp_path) == words
    files[0].unlink()
    assert seal.describe(tmp_path) == ""
    for damaged in ("", "[]", "{}", '{"files": {}, "versions": {}, "date": "", "numbers": 1}'):
        (tmp_path / seal.SEAL).write_text(damaged)
        assert seal.describe(tmp_path) == ""


def test_one_false_number_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, and a seal from before is gone. Without it a seal counts what holds and what was not computed."""
    stages: Any = [(step, SimpleNamespace(directory=tmp_path / name)) for step, name in enumerate(("one", "two"))]
    (tmp_path / "file").write_text("1")
    monkeypatch.setattr(recount, "finished_stages", lambda run: stages)
    monkeypatch.setattr(recount, "sealed_files", lambda stage: [tmp_path / "file"] if stage is stages[1][1] else [])
    honest = {0: [Claim("a", 1.0, 1.0), Claim("b", 2.0, None)], 1: [Claim("c", 3.0, 3.0), Claim("d", "yes", "yes")]}
    for false, code in ((None, 0), (0, 1), (1, 1), (None, 0)):
        more = {step: [Claim("e", 4.0, 5.0)] if step == false else [] for step in honest}
        monkeypatch.setattr(recount, "recount", lambda step, _, more=more: iter(more[step] + honest[step]))
        assert verify.main([str(tmp_path)]) == code
        text, sealed = capsys.readouterr().out, tmp_path / seal.SEAL
        assert (" e  " in text) == ("DIFFERS" in text) == bool(code)
        if code:
            assert f"1 of 4 numbers differ: {('one', 'two')[false or 0]}: e\n" in text and not sealed.exists()
        else:
            assert "verified: 3 numbers hold; 1 were not computed again\n" in text
            content = json.loads(sealed.read_text())
            assert (content["numbers"], content["left"], [*content["files"]]) == (3, 1, ["file"])


def test_a_path_without_a_finished_stage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    for path in (tmp_path, tmp_path / "step1_sft"):
        with pytest.raises(UserError, match="no stage has recorded metrics there"):
            verify.main([str(path)])
    with pytest.raises(UserError, match="no run is named"):
        verify.main([])


def test_a_saved_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """transformers fills it with random numbers, and only warns."""
    tiny.causal_lm("llama").save_pretrained(tmp_path)
    assert recount.load_plainly(AutoModelForCausalLM, str(tmp_path)) is not None
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing \(model\.norm\.weight\)"):
        recount.load_plainly(AutoModelForCausalLM, str(tmp_path))


def test_the_cap_of_attention_counts(tmp_path: Path) -> None:
    """transformers 5.17 to 5.23 choose an attention for Gemma 2 that ignores it."""
    tiny.causal_lm("gemma2", std=0.5, attn_logit_softcapping=0.1).save_pretrained(tmp_path)
    stage: Any = SimpleNamespace(manifest={"config": {"dtype": "fp32"}, "metrics": {}}, directory=tmp_path)
    plain, _ = recount.Recount(stage).model(str(tmp_path))
    capped = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(plain.cpu()(input_ids=ids).logits, capped(input_ids=ids).logits)


def train(out: Path, *words: str) -> None:
    command = [sys.executable, "train.py", *SMALL, *words, "--output-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    train(out)
    return out


STEP_3 = ("--steps", "3")
LORA = (
    "--adapter",
    "lora,r=8",
    "--sft.learning-rate",
    "0.01",
    "--reward.learning-rate",
    "0.01",
    "--ppo.kl-coef",
    "0.05",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--dtype", "bf16"),
        LORA,
        (*LORA, "--dtype", "bf16", "--ppo.learning-rate", "0.001"),
        ("--config", "configs/demo.yaml", *LORA, "--share-trunk", "--actor-model", "BASE", "--reward-model", "BASE"),
        ("--ppo.algorithm", "rloo", "--ppo.num-generations", "4", *STEP_3),
        ("--ppo.algorithm", "grpo", "--ppo.num-generations", "4", *STEP_3),
        ("--ppo.algorithm", "reinforce", "--ppo.missing-eos-penalty", "1", "--ppo.response-length", "7", *STEP_3),
        ("--ppo.algorithm", "a2c", "--ppo.num-ppo-epochs", "1", "--ppo.num-mini-batches", "1", *STEP_3),
        ("--ppo.algorithm", "best_of_n", "--ppo.num-generations", "4", *STEP_3),
        ("--ppo.temperature", "0.7", "--ppo.ema-decay", "0.9", "--ppo.critic-model", "policy", *STEP_3),
    ],
    ids=lambda words: " ".join(words) or "demo",
)  # fmt: skip
def test_an_honest_run_holds(
    finished: Path, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if words:
        for stage in ("step1_sft", "step2_reward") if "--steps" in words else ():
            shutil.copytree(finished / stage, out / stage)
        train(out, *(word.replace("BASE", str(finished / "step1_sft/model")) for word in words))
    assert verify.main([str(out if words else finished)]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert "DIFFERS" not in text and "score of the samples" in text
    left = {line.split()[0] for line in text.splitlines() if line.endswith("not computed")}
    assert left <= set().union(*changed_runs.LEFT.values())
    sealed = json.loads(((out if words else finished) / seal.SEAL).read_text(encoding="utf-8"))
    assert {name.split("/")[0] for name in sealed["files"]} == {"step1_sft", "step2_reward", "step3_ppo"}
