"""LoRA in every family of models: nothing changes before the first step, only it trains, and merged weights say what
wrapped ones do. test_adapter_methods.py has the other methods."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions, OptimizerOptions
from rlhf.engine.export import full_state
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models.policy import Policy
from rlhf.types import Sequences
from step3_ppo.rollout import Reference
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("ranks")

ADAPTERS = ["lora"]
ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
OPTIMIZER = OptimizerOptions(learning_rate=1e-2, lr_scheduler_type="constant", warmup_ratio=0)

each = pytest.mark.parametrize("adapter", ADAPTERS)
families = pytest.mark.parametrize("family", tiny.FAMILIES)
stages = pytest.mark.parametrize("stage", [1, 3])


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


def policy_engine(adapter: str, family: str = "llama", **options: Any) -> Engine:
    policy = Policy(adapters.wrap(tiny.causal_lm(family), adapter))
    return Engine(
        policy, tiny.training_options(EngineOptions(**{"dtype": "fp32", "zero_stage": 1, **options}), OPTIMIZER), 3
    )


def train(engine: Engine, steps: int = 3) -> list[float]:
    count = ROWS.loss_mask.sum()
    nll = []
    for _ in range(steps):
        micros = [ROWS[:2], ROWS[2:]]
        nll.append(engine.step(micros, lambda rows: losses.token_nll(engine(rows)[0], rows.loss_mask, count))["loss"])
    return nll


def weights(engine: Engine) -> dict[str, Tensor]:
    with engine.inference() as model:
        return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h"])
def test_layers_whose_weights_a_kernel_reads_itself_are_left_as_they_are(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=8))
    adapters.wrap(model, "lora")
    linear = {name for name, module in model.named_modules() if name.endswith((".in_proj", ".out_proj"))}
    wrapped = {name for name in linear if hasattr(model.get_submodule(name), "lora_A")}
    assert wrapped == {name for name in linear if name.endswith(".in_proj")} < linear


@each
@families
def test_merged_weights_say_what_wrapped_ones_do(adapter: str, family: str) -> None:
    plain = tiny.causal_lm(family)
    wrapped = disturbed(adapters.wrap(copy.deepcopy(plain), adapter))
    merged = copy.deepcopy(plain)
    state = full_state(wrapped, adapter)
    assert set(state) == set(plain.state_dict())
    merged.load_state_dict(state)
    assert greatest(logprobs(Policy(merged)) - logprobs(Policy(wrapped))) < 1e-5
    assert greatest(logprobs(Policy(merged)) - logprobs(Policy(plain))) > 1e-2


@each
@families
def test_with_the_adapter_off_it_is_the_reference(adapter: str, family: str) -> None:
    expected = logprobs(Policy(tiny.causal_lm(family)))
    actor = Policy(disturbed(adapters.wrap(tiny.causal_lm(family), adapter)))
    changed = logprobs(actor)
    frozen: Any = FrozenEngine(actor, FrozenOptions(), torch.float32)
    with Reference(adapters.open_adapter(adapter)).inference(frozen) as reference:
        assert torch.equal(logprobs(reference), expected)
    assert torch.equal(logprobs(actor), changed) and greatest(changed - expected) > 1e-2


@each
@stages
def test_an_engine_trains_the_adapter_and_nothing_else(adapter: str, stage: int) -> None:
    engine = policy_engine(adapter, zero_stage=stage)
    before = weights(engine)
    trained = {name for name, weight in engine.module.named_parameters() if weight.requires_grad}
    nll = train(engine)
    assert nll[2] < nll[0]
    after = weights(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and changed <= trained
    with Reference(adapters.open_adapter(adapter)).inference(engine) as reference:
        assert torch.equal(logprobs(reference), logprobs(Policy(tiny.causal_lm())))
