"""AdamW with master weights, beside torch's own on fp32 copies; schedules by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf.config.options import OptimizerOptions
from rlhf.engine.adamw import MASTER, MasterAdamW, decay_groups, schedule, warmup_warning

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((7, 5), (3,), ())]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((7, 5), (3,), ())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_it_is_torchs_adamw_in_fp32_whatever_the_weights_are(dtype: torch.dtype, scale: float) -> None:
    ours, theirs = weights(dtype), [nn.Parameter(w.detach().float().clone()) for w in weights(dtype)]
    mine, oracle = MasterAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, foreach=False, fused=False, **OPTIONS)
    for step in range(4):
        for own, other, gradient in zip(ours, theirs, gradients(step, dtype), strict=True):
            own.grad, other.grad = gradient.clone(), gradient.float() * scale
        mine.scale = scale
        mine.step()
        oracle.step()
    for own, other in zip(ours, theirs, strict=True):
        master = mine.state[own].get(MASTER, own)
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(own, master.to(dtype))
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[own][moment], oracle.state[other][moment], rtol=1e-6, atol=1e-9)


def test_matrices_decay_but_for_those_of_biases() -> None:
    """Experts of gpt-oss have a bias each, the rows of one matrix."""
    shapes = {
        "q.weight": (3, 3),
        "experts.down_proj": (4, 3, 2),
        "experts.down_proj_bias": (4, 3),
        "norm.weight": (3,),
        "q.bias": (3,),
    }
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    decay = {id(w): group["weight_decay"] for group in decay_groups(parameters, 0.1) for w in group["params"]}
    assert [decay[id(weight)] for weight in parameters.values()] == [0.1, 0.1, 0, 0, 0]
    assert decay_groups(parameters, 0.0) == [{"params": list(parameters.values()), "weight_decay": 0.0}]
    assert len(decay_groups({"q.bias": parameters["q.bias"]}, 0.1)) == 1


def test_a_weight_without_a_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = MasterAdamW([used, unused], **OPTIONS)
    used.grad = torch.ones(2)
    optimizer.step()
    assert unused.tolist() == [1, 1] and used.tolist() != [1, 1]
    assert "step" not in optimizer.state[unused]


def test_parts_of_a_gradient_are_added_up_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], **OPTIONS)
    sums = {}
    for dtype in (torch.float32, None):
        optimizer.sum_gradients_in(dtype)
        for part in (1.0, *[2.0**-9] * 256):  # in bf16 each is lost beside the 1
            (weight * part).sum().backward()
        sums[dtype] = weight.grad.tolist() if weight.grad is not None else []
        optimizer.zero_grad()
    assert sums == {torch.float32: [1.5] * 4, None: [1.0] * 4}


@pytest.mark.parametrize(
    ("kind", "warmup_ratio", "expected"),
    [
        ("constant", 0.4, [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", 0.4, [1 / 2, 1, 1, 1, 1, 1]),
        ("linear", 0.0, [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]),
        ("linear", 0.2, [1, 1, 3 / 4, 1 / 2, 1 / 4, 0]),
        ("linear", 0.01, [1, 1, 3 / 4, 1 / 2, 1 / 4, 0]),
        ("linear", 0.8, [1 / 4, 1 / 2, 3 / 4, 1, 1, 0]),
        ("cosine", 0.2, [1, 1, (2 + math.sqrt(2)) / 4, 1 / 2, (2 - math.sqrt(2)) / 4, 0]),
    ],
)
def test_schedules_by_hand(kind: Any, warmup_ratio: float, expected: list[float]) -> None:
    """Of five steps, and what stays from their end on."""
    factor = schedule(OptimizerOptions(lr_scheduler_type=kind, warmup_ratio=warmup_ratio), 5)
    assert [factor(step) for step in range(6)] == pytest.approx(expected, abs=1e-12)
    assert [factor(step) for step in (7, 10**9)] == pytest.approx(expected[-1:] * 2, abs=1e-12)


SHAPES: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.5, "lr_end": 0.0},
    "inverse_sqrt": {"timescale": 10_000},
}


@pytest.mark.parametrize("kind", SHAPES)
def test_schedules_are_those_of_transformers(kind: Any) -> None:
    """Without warm-up, which begins at 0 there. Rounding: some operations on numbers up to 3, in float64."""
    more = {"lr_num_cycles": SHAPES[kind].get("num_cycles", 1), "lr_power": SHAPES[kind].get("power", 1.0)}
    factor = schedule(OptimizerOptions(lr_scheduler_type=kind, warmup_ratio=0.0, **more), 40)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    oracle = get_scheduler(
        kind, optimizer, num_warmup_steps=0, num_training_steps=40, scheduler_specific_kwargs=SHAPES[kind]
    )
    (theirs,) = oracle.lr_lambdas if hasattr(oracle, "lr_lambdas") else (lambda step: 1.0,)
    assert [factor(step) for step in range(41)] == pytest.approx([theirs(step) for step in range(41)], abs=1e-14)


def test_warm_up_in_steps_takes_the_place_of_a_share() -> None:
    options = OptimizerOptions(lr_scheduler_type="inverse_sqrt", warmup_ratio=0.5, warmup_steps=3)
    factor = schedule(options, 100)
    assert [factor(step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factor(3 + 9) == pytest.approx(0.5)  # three times the warm-up later: sqrt(3 / 12)
    none = OptimizerOptions(lr_scheduler_type="constant_with_warmup", warmup_ratio=0.5, warmup_steps=0)
    assert schedule(none, 100)(0) == 1


def test_a_warm_up_longer_than_the_run_is_a_warning() -> None:
    """Its rate ends at steps / warm-up, as the schedule itself says."""
    options = OptimizerOptions(lr_scheduler_type="cosine", warmup_steps=50)
    assert schedule(options, 20)(19) == pytest.approx(0.4)
    warning = warmup_warning(options, 20)
    assert warning is not None and "--warmup-steps 50 is more than the 20 steps" in warning and "40%" in warning
    assert warmup_warning(options, 50) is None
    assert warmup_warning(OptimizerOptions(lr_scheduler_type="constant", warmup_steps=50), 20) is None
