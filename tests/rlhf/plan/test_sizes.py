"""Numbers of weights, copies and bits that a plan counts from a config, against real models and sums by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions
from rlhf.errors import UserError
from rlhf.generation.loop import next_logits
from rlhf.kernels import decoding
from rlhf.plan import machine, sizes, zero
from rlhf.plan.devices import PlanOptions
from rlhf.plan.forecast import forecast
from rlhf.plan.sizes import Setup
from rlhf.plan.zero import RankLayout
from step3_ppo.algorithms.grpo import Config as GRPO
from step3_ppo.stage import REINFORCEMENT
from tests.support import tiny
from tests.support.plans import workload_of


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return saved("llama", tmp_path)


def saved(family: str, folder: Path, **changes: Any) -> str:
    """The path of a directory that holds only the config of a tiny model."""
    tiny.config_of(family, **changes).save_pretrained(folder / family)
    return str(folder / family)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_weights_are_those_of_the_real_model(family: str, tmp_path: Path) -> None:
    model_path, lm, backbone = saved(family, tmp_path), tiny.causal_lm(family), tiny.backbone(family)
    width = getattr(backbone.config, "word_embed_proj_dim", tiny.WIDTH)
    result = sizes.size(model_path, "lm")
    assert result.total == result.trained == sum(p.numel() for p in lm.parameters())
    assert result.layers == 2 and result.vocabulary == tiny.VOCAB
    assert sizes.size(model_path, "scalar").total == sum(p.numel() for p in backbone.parameters()) + width
    assert sizes.size(model_path, "lm", Setup(frozen=True)).trained == 0


def test_an_adapter_trains_few_weights(model_path: str) -> None:
    wrapped = adapters.wrap(tiny.causal_lm(), "lora,r=2")
    result = sizes.size(model_path, "lm", Setup("lora,r=2"))
    assert result.total == sum(p.numel() for p in wrapped.parameters())
    assert result.trained == sum(p.numel() for p in wrapped.parameters() if p.requires_grad) < result.total / 5


def test_cache_size_is_that_of_generation(model_path: str) -> None:
    lm = tiny.causal_lm()
    cache = lm(torch.zeros(3, 7, dtype=torch.long), use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert sizes.size(model_path, "lm").cache * 3 * 7 == numbers


def test_sampling_on_a_cpu_has_a_second_copy_of_the_linear_layers(model_path: str) -> None:
    """In the order of oneDNN; compiled layers multiply by the weights as they are."""
    lm = adapters.wrap(tiny.causal_lm(), "lora,r=2")
    ids = torch.ones(3, 1, dtype=torch.long)
    with decoding.decode_step(lm, next_logits, print, fixed=False) as (step, _), torch.no_grad():
        step(lm, ids, torch.ones_like(ids), torch.zeros_like(ids), DynamicCache())
        ordered = [module for module in lm.modules() if type(module) is decoding._SortedLinear]
    counts = sizes.size(model_path, "lm", Setup("lora,r=2"))
    assert counts.linear == sum(module.weight.numel() for module in ordered) > counts.total / 2
    quantized = sizes.size(model_path, "lm", Setup("lora,r=2", quantize="nf4"))
    whole = [
        weight for weight in (module.weight for module in ordered) if weight.requires_grad or len(weight) == tiny.VOCAB
    ]
    assert quantized.linear == sum(weight.numel() for weight in whole)  # LoRA and the head
    starts = {"actor_model": model_path, "reward_model": model_path}
    rules: Any = {"algorithm": "grpo", "num_generations": 4, "reward": ("length,target=8",), "dtype": "fp32",
                  "adapter": "lora,r=2"}  # fmt: skip
    on_cpu = machine.describe_machine(PlanOptions(device="cpu", devices=1), 1)
    generating = [
        {m.name: m.bytes.total for m in forecast(workload_of(REINFORCEMENT, options, "cpu", starts), on_cpu).moments}[
            "actor: generate"
        ]
        for options in (GRPO(**rules, torch_compile=compiled) for compiled in (False, True))
    ]
    assert generating[0] - generating[1] == 4 * counts.linear


def test_unknown_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"no-such-model.*config\.json, or a \.yaml file with"):
        sizes.size("nobody/no-such-model", "lm")
    (tmp_path / "a.yaml").write_text("model: {model_type: llama}")
    with pytest.raises(UserError, match="expected a 'model' mapping with 'model_type' and 'vocab_size'"):
        sizes.size(str(tmp_path / "a.yaml"), "lm")


def test_quantised_weights_have_their_bits(tmp_path: Path) -> None:
    """Of a Llama with 2 layers of width 64: 4 products of 64 x 64, two of them half as wide, and 3 of 64 x 128."""
    path = saved("llama", tmp_path, hidden_size=64, intermediate_size=128)
    matrices = 2 * (64 * 64 * 3 + 3 * 64 * 128)
    whole, four = (sizes.size(path, "lm", Setup("lora,r=2", quantize=kind)) for kind in ("none", "nf4"))
    assert (four.quantized, whole.quantized) == (matrices, 0)
    assert sizes.size(path, "scalar", Setup(frozen=True, quantize="nf4")).quantized == matrices
    saved_bits = whole.weight_bytes(2) - four.weight_bytes(2)
    assert saved_bits == pytest.approx(matrices * (16 - 4 - 8 / 64 - 32 / 256 / 64) / 8)
    options = EngineOptions(adapter="lora,r=2", quantize="nf4", dtype="bf16")
    memory = zero.model_memory(four, options, 2, RankLayout())
    assert memory.weights.device == four.weight_bytes(2)
    assert zero.frozen_memory(four, FrozenOptions(zero_stage=0), 2, 1).weights.device == four.weight_bytes(2)


@pytest.mark.parametrize("changes", [{"pad_token_id": 10**6}, {"num_attention_heads": 0}, {"hidden_act": "strange"}])
def test_a_config_of_which_no_model_can_be_built_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = Path(saved("llama", tmp_path)) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=rf"^model '{path.parent}'") as refused:
        sizes.size(str(path.parent), "lm")
    assert "\n" not in str(refused.value)
