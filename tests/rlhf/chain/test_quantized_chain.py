"""The three stages over quantised weights: adapters train, every number is finite, and the results are plain models."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.chain import command
from rlhf.hub.short_names import resolve
from rlhf.launch import launcher
from rlhf.models.load import load_causal_lm
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer
from tests.support import one_process, programs

SMALL = [
    *("--data-path", "demo,rows=400", "--sft.num-train-epochs", "1", "--reward.num-train-epochs", "1"),
    *("--ppo.total-episodes", "16", "--ppo.batch-size", "16", "--ppo.eval-samples", "4", "--max-eval-rows", "8"),
    *("--ppo.response-length", "8", "--max-length", "48", "--max-prompt-length", "24", "--max-train-rows", "32"),
]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_all_stages_train_adapters_over_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "run", one_process.run_stage)
    train = programs.runner("train.py", command.main, monkeypatch, capsys)
    start = tmp_path / "start"
    tokenizer = load_tokenizer(resolve("demo-llama"))
    load_causal_lm("demo-llama", torch.float32, id_count(tokenizer)).save_pretrained(start)
    tokenizer.save_pretrained(start)
    models = ("--actor-model", str(start), "--reward-model", str(start))
    options = ("--dtype", "fp32", "--quantize", "nf4", "--adapter", "lora,r=4", "--output-dir", str(tmp_path / "run"))
    code, out, err = train(*models, *options, *SMALL, "--ppo.reward-models.quantize", "fp4", "--ppo.kl-coef", "0.1")
    assert code == 0, err
    assert out.count("million weights in nf4") == 4 and out.count("million weights in fp4") == 1
    [first, *_] = metrics(tmp_path / "run/step3_ppo")
    assert first["first_approx_kl"] == pytest.approx(0, abs=1e-6) and abs(first["kl"]) < 1e-4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/step3_ppo/actor").dtype == torch.float32


def metrics(stage: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == "train"]
