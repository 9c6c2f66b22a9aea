"""LoRA in every family of models: nothing changes before the first step, only it trains, and merged weights say what
wrapped ones do. test_adapter_methods.py has the other methods."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf import adapters
from rlhf.config.options import EngineOptions, FrozenOptions, OptimizerOptions
from rlhf.engine.export import full_state, save_policy, save_scalar
from rlhf.engine.frozen import FrozenEngine
from rlhf.engine.training import Engine
from rlhf.maths import losses
from rlhf.models.head import ScoreHead
from rlhf.models.policy import Policy
from rlhf.models.scalar import ScalarModel, load_scalar_model
from rlhf.types import Sequences
from step3_ppo.rollout import Reference
from tests.support import tiny

ADAPTERS = ["lora"]
ROWS = tiny.sequences([12, 20, 17], prompts=[3, 9, 1])
OPTIMIZER = OptimizerOptions(learning_rate=1e-2, lr_scheduler_type="constant", warmup_ratio=0)

each = pytest.mark.parametrize("adapter", ADAPTERS)
families = pytest.mark.parametrize("family", tiny.FAMILIES)
stages = pytest.mark.parametrize("stage", [1, 3])


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


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
    return Engine(policy, EngineOptions(**{"dtype": "fp32", "zero_stage": 1, **options}), OPTIMIZER, 3)


def reward_engine(adapter: str, stage: int) -> Engine:
    model = ScalarModel(adapters.wrap(tiny.backbone(), adapter), ScoreHead(torch.linspace(-1, 1, tiny.WIDTH)[None]))
    return Engine(model, EngineOptions(dtype="fp32", zero_stage=stage), OPTIMIZER, 3)


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


@each
@families
def test_nothing_changes_before_the_first_step(adapter: str, family: str) -> None:
    plain = tiny.causal_lm(family)
    wrapped = adapters.wrap(copy.deepcopy(plain), adapter)
    assert greatest(logprobs(Policy(wrapped)) - logprobs(Policy(plain))) < 1e-6


@each
@families
def test_only_new_weights_train_and_they_have_the_models_dtype(adapter: str, family: str) -> None:
    plain = tiny.causal_lm(family).to(torch.bfloat16)
    count = sum(weight.numel() for weight in plain.parameters())
    wrapped = adapters.wrap(plain, adapter)
    frozen = sum(weight.numel() for weight in wrapped.parameters() if not weight.requires_grad)
    trained = [weight for weight in wrapped.parameters() if weight.requires_grad]
    assert frozen == count and trained
    assert {weight.dtype for weight in wrapped.parameters()} == {torch.bfloat16}


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
def test_merging_in_bf16_loses_no_more_than_bf16(adapter: str) -> None:
    plain = tiny.causal_lm().to(torch.bfloat16)
    wrapped = disturbed(adapters.wrap(copy.deepcopy(plain), adapter))
    merged = copy.deepcopy(plain)
    merged.load_state_dict(full_state(wrapped, adapter))
    difference = (logprobs(Policy(merged)) - logprobs(Policy(wrapped)))[ROWS.loss_mask]
    assert float(difference.abs().mean()) < 5e-2


@each
@families
def test_with_the_adapter_off_it_is_the_reference(adapter: str, family: str) -> None:
    expected = logprobs(Policy(tiny.causal_lm(family)))
    actor = Policy(disturbed(adapters.wrap(tiny.causal_lm(family), adapter)))
    changed = logprobs(actor)
    frozen: Any = FrozenEngine(actor, FrozenOptions(), torch.float32)
    with Reference(adapters.open_adapter(adapter)).of(frozen) as reference:
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
    with Reference(adapters.open_adapter(adapter)).of(engine) as reference:
        assert torch.equal(logprobs(reference), logprobs(Policy(tiny.causal_lm())))


@each
def test_the_zero_stage_and_checkpointing_change_no_loss(adapter: str) -> None:
    def losses_with(**options: Any) -> list[float]:
        torch.manual_seed(0)  # of the adapter's first weights
        return train(policy_engine(adapter, **options))

    expected = losses_with()
    for options in ({"zero_stage": 3}, {"gradient_checkpointing": True}):
        assert losses_with(**options) == pytest.approx(expected, abs=1e-6), options


@each
@stages
def test_a_saved_policy_is_a_plain_model(adapter: str, stage: int, tmp_path: Path) -> None:
    engine = policy_engine(adapter, "gpt2", zero_stage=stage)
    train(engine)
    save_policy(engine, adapter, tiny.tokenizer(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(loaded.state_dict()) == set(tiny.causal_lm("gpt2").state_dict())
    with engine.inference() as actor:
        assert greatest(logprobs(Policy(loaded)) - logprobs(actor)) < 1e-5


@each
@stages
def test_the_head_of_a_scalar_model_trains_too(adapter: str, stage: int, tmp_path: Path) -> None:
    engine = reward_engine(adapter, stage)
    before = weights(engine)
    engine.step([ROWS], lambda rows: (engine(rows)[rows.mask].mean(), {}))
    engine.step([ROWS], lambda rows: (engine(rows)[rows.mask].mean(), {}))
    after = weights(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "score.weight" in changed and len(changed) > 1
    save_scalar(engine, adapter, tiny.tokenizer(), tmp_path)
    loaded = load_scalar_model(str(tmp_path), torch.float32, tiny.VOCAB)
    with engine.inference() as model:
        assert greatest((loaded(ROWS) - model(ROWS))[ROWS.mask]) < 1e-5
