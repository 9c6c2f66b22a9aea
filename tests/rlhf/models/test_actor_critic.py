"""A policy and its critic in one pass: beside two models of the same weights, each in a pass of its own."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf import adapters
from rlhf.config.options import EngineOptions, OptimizerOptions
from rlhf.engine.export import save_policy, save_scalar
from rlhf.engine.training import Engine
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import HEAD, ScalarModel, new_head
from tests.support import engine_runs, tiny

ROWS = tiny.sequences([5, 12, 9], [2, 4, 3])
RATES = {HEAD: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def actor_critic(family: str = "llama", adapter: str | None = None) -> ActorCritic:
    lm = tiny.causal_lm(family)
    torch.manual_seed(0)  # of the adapter
    adapters.wrap(lm, adapter)
    return ActorCritic(lm, new_head(lm, torch.float32, 3))


def loss_of_policy(logprobs: Tensor) -> Tensor:
    return (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum()


def loss_of_values(values: Tensor) -> Tensor:
    return (values - 0.3).square()[ROWS.mask].sum()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_pass_is_two_and_its_gradient_their_sum(family: str) -> None:
    """In another order of additions, the gradients are off by a few ORDERS of the greatest: three passes are added."""
    together, policy = actor_critic(family), Policy(tiny.causal_lm(family))
    critic = copy.deepcopy(together).critic()
    logprobs, _, values = together(ROWS, 0.7, entropy="watched")
    alone, scalars = policy(ROWS, 0.7)[0], critic(ROWS)
    torch.testing.assert_close(logprobs, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(values, scalars, rtol=0, atol=1e-5)
    (loss_of_policy(logprobs) + 0.5 * loss_of_values(values)).backward()
    loss_of_policy(alone).backward()
    (0.5 * loss_of_values(scalars)).backward()
    of_policy, of_critic = gradients(policy), gradients(critic)
    greatest = max(float(gradient.abs().max()) for gradient in gradients(together).values())
    prefix = f"lm.{together.lm.base_model_prefix}."
    for name, gradient in gradients(together).items():
        parts = [of_policy.get(name), of_critic.get(name.replace(prefix, "backbone.", 1))]
        expected = sum(part for part in parts if part is not None)
        assert isinstance(expected, Tensor), name
        torch.testing.assert_close(gradient, expected, rtol=0, atol=3 * tiny.ORDERS * greatest, msg=name)


def test_a_head_that_learns_alone_moves_nothing_else() -> None:
    """And every weight has a gradient, which ZeRO waits for; the head's is that of both learning."""
    one, other = actor_critic(), actor_critic()
    loss_of_values(one(ROWS, learns="head")[2]).backward()
    loss_of_values(other(ROWS)[2]).backward()
    alone, all_weights = gradients(one), gradients(other)
    assert set(alone) == {name for name, _ in one.named_parameters()}
    assert all(not gradient.any() for name, gradient in alone.items() if name != HEAD)
    assert torch.equal(alone[HEAD], all_weights[HEAD]) and alone[HEAD].any()
    assert any(gradient.any() for name, gradient in all_weights.items() if name != HEAD)


def engine(adapter: str | None = None, **options: Any) -> Engine:
    optimizer = OptimizerOptions(learning_rate=1e-3, warmup_ratio=0.0, adam_epsilon=1e-3, max_grad_norm=0.0)
    return Engine(
        actor_critic(adapter=adapter),
        tiny.training_options(EngineOptions(dtype="fp32", **options), optimizer),
        9,
        rates=RATES,
    )


def step(trained: Engine) -> dict[str, float]:
    def loss(rows: Any) -> Any:
        logprobs, _, values = trained(rows)
        value = loss_of_policy(logprobs) + loss_of_values(values)
        return value, {"value_loss": loss_of_values(values).detach()}

    return trained.step([ROWS], loss)


KINDS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0},
    "zero 1, offloaded": {"zero_stage": 1, "offload_optimizer": True},
    "zero 2, offloaded": {"zero_stage": 2, "offload_optimizer": True},
    "zero 3": {"zero_stage": 3},
    "zero 3, lora": {"zero_stage": 3, "adapter": "lora,r=4"},
    "lora, checkpointing": {"zero_stage": 1, "adapter": "lora,r=4", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_engines_agree_and_export_both_models(options: dict[str, Any], tmp_path: Path) -> None:
    """The head's first step, of AdamW, is its own learning rate, whatever its gradient."""
    trained, adapter = engine(**options), options.get("adapter")
    before = engine_runs.weights(trained)
    metrics = [step(trained)]
    after = engine_runs.weights(trained)
    assert float((after[HEAD] - before[HEAD]).abs().max()) == pytest.approx(RATES[HEAD], rel=1e-2)
    moved = max(float((after[name] - before[name]).abs().max()) for name in after if name != HEAD)
    assert moved == pytest.approx(1e-3, rel=1e-2)
    plain = engine(adapter, zero_stage=0)
    assert metrics[0] == pytest.approx(step(plain), rel=1e-4)
    assert engine_runs.apart(after, engine_runs.weights(plain)) < engine_runs.ROUNDING
    save_policy(trained, adapter, tiny.tokenizer(), tmp_path / "actor")
    save_scalar(trained, adapter, tiny.tokenizer(), tmp_path / "critic")
    with trained.inference() as model:
        logprobs, _, values = model(ROWS)
    actor = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "actor").eval())
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    critic = ScalarModel(classifier.base_model, classifier.score)
    with torch.no_grad():
        torch.testing.assert_close(actor(ROWS)[0], logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(critic(ROWS), values, rtol=0, atol=1e-5)
