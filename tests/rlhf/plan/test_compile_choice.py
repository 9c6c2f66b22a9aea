"""Which runs compile their layers unasked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf import kernels
from rlhf.config.options import EngineOptions
from rlhf.distributed import collectives
from rlhf.models.load import load_config
from rlhf.plan import compile_choice, machine
from rlhf.plan.compile_choice import FAMILIES, SAVED, START_S, choose_compiler
from step1_sft.config import SFTConfig
from step1_sft.stage import FINE_TUNING
from step3_ppo import stage
from tests.step3_ppo.test_stage import models, options
from tests.support.demo import SMALL
from tests.support.tiny import causal_lm

__all__ = ["models"]
ROOT = Path(__file__).parents[3]
FLOPS = 1e9


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a Llama, on a machine with FLOPS operations a second and a C++ compiler."""
    rate = FLOPS / machine.UTILISATION
    core = replace(machine.CORE, flops=rate, flops_fp32=rate)
    monkeypatch.setattr(compile_choice, "describe_machine", lambda _, ranks: machine.Machine(core, ranks, 1e9, 1e9))
    monkeypatch.setattr(kernels, "require_compiler", lambda _: None)
    causal_lm("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def tokens_that_repay(model_path: str) -> float:
    """Passes take 6 operations a token for each weight in layers and head, and for a number of each layer's width, of a
    row's first token that meets itself in attention; what is saved is twice the start."""
    model, config = AutoModelForCausalLM.from_pretrained(model_path), load_config(model_path)
    inside = sum(weight.numel() for weight in model.model.layers.parameters())
    met = inside + model.lm_head.weight.numel() + config.num_hidden_layers * config.hidden_size
    return 2 * START_S / SAVED * FLOPS / (6 * met)


def chosen(model_path: str, tokens: float, **changes: Any) -> bool | None:
    return choose_compiler(EngineOptions(**{"dtype": "fp32", **changes}), "a stage", model_path, tokens).torch_compile


def test_a_run_that_is_long_enough_is_compiled(model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    enough = tokens_that_repay(model_path)
    assert chosen(model_path, 0.99 * enough) is None and not capsys.readouterr().out
    assert chosen(model_path, 1.01 * enough) is True
    assert capsys.readouterr().out.startswith("a stage: layers are compiled, ")
    assert chosen(model_path, 1e99, torch_compile=False) is False
    assert chosen(model_path, 0, torch_compile=True) is True


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 3}, {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"adapter": "ia3"},
        {"adapter": "lora", "share_trunk": True}, {"adapter": "lora", "quantize": "nf4"},
    ],
    ids=str,
)  # fmt: skip
def test_what_refuses_the_compiler_runs_without_it(model_path: str, changes: dict[str, Any]) -> None:
    assert chosen(model_path, 1e99, **changes) is None


def test_neither_on_gpus_nor_for_unmeasured_models(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "FAMILIES", FAMILIES - {"llama"})
    assert chosen(model_path, 1e99) is None
    monkeypatch.undo()
    monkeypatch.setattr(collectives, "local_device", lambda: torch.device("cuda"))
    assert chosen(model_path, 1e99) is None


def test_the_families_are_those_of_the_page() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    head, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    assert {row[0].strip("`") for row in rows if row[head.index("compiles")] == "yes"} == FAMILIES


def test_both_kinds_of_stages_choose(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is what runs; the options of the run stay as the user set them."""
    calls: list[Any] = []
    compiled: list[Any] = []

    def always(options: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        return options.model_copy(update={"torch_compile": True})

    for module in ("rlhf.supervised.runner", "step3_ppo.stage"):
        monkeypatch.setattr(f"{module}.choose_compiler", always)
    monkeypatch.setattr(kernels, "compile_layers", compiled.append)
    FINE_TUNING.run(SFTConfig(**SMALL, num_train_epochs=2, model="demo-llama", output_dir=str(tmp_path)))
    stage.run(options(models, tmp_path, num_ppo_epochs=3))
    (sft, _, sft_tokens), (ppo, _, ppo_tokens) = calls
    assert (sft, ppo, len(compiled)) == ("step1_sft", "step3_ppo", 1 + 4)
    lines = (tmp_path / "step1_sft/metrics.jsonl").read_text().splitlines()
    trained = sum(line.get("tokens", 0) for line in map(json.loads, lines) if line["kind"] == "train")
    assert trained <= sft_tokens < 1.2 * trained  # the rows of an epoch's incomplete batch are not trained
    assert 96 * 16 * 2 * (3 + 1) < ppo_tokens <= 96 * (16 + 24) * 2 * (3 + 1)
    for name in ("step1_sft", "step3_ppo"):
        assert "torch_compile: null" in (tmp_path / name / "config.yaml").read_text(encoding="utf-8")
