"""LoRA in every family of models: merged weights say what wrapped ones do, and without it the model is the reference.
test_adapter_methods.py has what training changes, and the other methods."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import adapters
from rlhf.config.options import FrozenOptions
from rlhf.engine.export import full_state
from rlhf.engine.frozen import FrozenEngine
from rlhf.models.policy import Policy
from rlhf.types import Sequences
from step3_ppo.rollout import Reference
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("ranks")

ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
families = pytest.mark.parametrize("family", tiny.FAMILIES)


@torch.no_grad()
def logprobs(policy: Any, rows: Sequences = ROWS) -> Tensor:
    return policy(rows)[0]


def greatest(difference: Tensor) -> float:
    return float(difference.abs().max())


def disturbed(model: nn.Module) -> nn.Module:
    """The model with every trainable weight moved, as if training had gone on for a while."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=draw).to(weight.dtype)
    return model


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h"])
def test_layers_whose_weights_a_kernel_reads_itself_are_left_as_they_are(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=8))
    adapters.wrap(model, "lora")
    linear = {name for name, module in model.named_modules() if name.endswith((".in_proj", ".out_proj"))}
    wrapped = {name for name in linear if hasattr(model.get_submodule(name), "lora_A")}
    assert wrapped == {name for name in linear if name.endswith(".in_proj")} < linear


@families
def test_merged_weights_say_what_wrapped_ones_do(family: str, adapter: str = "lora") -> None:
    plain = tiny.causal_lm(family)
    wrapped = disturbed(adapters.wrap(copy.deepcopy(plain), adapter))
    merged = copy.deepcopy(plain)
    state = full_state(wrapped, adapter)
    assert set(state) == set(plain.state_dict())
    merged.load_state_dict(state)
    assert greatest(logprobs(Policy(merged)) - logprobs(Policy(wrapped))) < 1e-5
    assert greatest(logprobs(Policy(merged)) - logprobs(Policy(plain))) > 1e-2


@families
def test_with_the_adapter_off_it_is_the_reference(family: str, adapter: str = "lora") -> None:
    expected = logprobs(Policy(tiny.causal_lm(family)))
    actor = Policy(disturbed(adapters.wrap(tiny.causal_lm(family), adapter)))
    changed = logprobs(actor)
    frozen: Any = FrozenEngine(actor, FrozenOptions(), torch.float32)
    with Reference(adapters.open_adapter(adapter)).inference(frozen) as reference:
        assert torch.equal(logprobs(reference), expected)
    assert torch.equal(logprobs(actor), changed) and greatest(changed - expected) > 1e-2
