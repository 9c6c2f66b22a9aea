"""Optimizer steps whose numbers are not finite: left out without a trace, named, and after too many the end."""

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.config.options import EngineOptions
from rlhf.engine import precision
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.engine.training import FP16_SEARCH, Engine, _allow_overflows
from rlhf.models.policy import Policy
from tests.support import engine_runs, tiny
from tests.support.engine_runs import OPTIMIZER, STEPS, apart, batches, require_left_out, step, weights

alone = pytest.mark.parametrize("stage", engine_runs.ALONE)
OFFLOADED: dict[str, Any] = {"offload_optimizer": True}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


@alone
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_of_nan_is_left_out_without_a_trace_and_five_end_the_run(stage: int, dtype: str) -> None:
    (result,) = engine_runs.run_into_nan({"zero_stage": stage, "dtype": dtype}, bad_rank=0)["ranks"]
    shortest = batches(2)[1].lengths.argsort(descending=True, stable=True)[6:]
    require_left_out(result, ", ".join(map(str, sorted(shortest.tolist()))))


@alone
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_of_nan_under_a_finite_loss_is_left_out_too(
    stage: int, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_runs.engine({"zero_stage": stage, "dtype": dtype})
    rows = batches(1)[0]
    step(engine, rows)
    before = weights(engine)

    def loss(micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = engine(micro)[0]
        return logprobs.mean() + 0.0 * (logprobs - logprobs).sum().sqrt(), {}  # d sqrt(x) at 0 is infinite

    assert engine.step([rows], loss)["skipped"] == 1
    assert apart(weights(engine), before) == 0
    assert re.search(r"warning, step 2: grad_norm is (nan|inf); skipped", capsys.readouterr().out)
    state, other = engine.state_dict(), engine_runs.engine({"zero_stage": stage, "dtype": dtype})
    counts = {"steps": 2, "overflows": 1, "bad_in_a_row": 1, "adam_steps": 1}
    assert {name: state[name] for name in counts} == counts
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_fp16_that_overflows_for_ever_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps without effect are DeepSpeed's search for a loss scale; it does not go on for ever."""
    engine = engine_runs.engine({"zero_stage": 3, "dtype": "bf16"})
    monkeypatch.setattr(engine, "_options", engine._options.model_copy(update={"dtype": "fp16"}))
    rows, before = batches(1)[0], weights(engine)

    def loss(micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = engine(micro)[0]
        return logprobs.mean() + 0.0 * (logprobs - logprobs).sum().sqrt(), {}

    history = [engine.step([rows], loss) for _ in range(FP16_SEARCH)]
    assert all(metrics["skipped"] == 1 and math.isfinite(metrics["loss"]) for metrics in history)
    with pytest.raises(NonFiniteError, match=rf"step {FP16_SEARCH + 5}: grad_norm is inf, 5 times in a row"):
        for _ in range(9):
            engine.step([rows], loss)
    assert apart(weights(engine), before) == 0


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        *((stage, {"dtype": dtype}) for stage in engine_runs.ALONE for dtype in ("fp32", "bf16")),
        *((stage, OFFLOADED) for stage in (1, 2, 3)),
    ],
    ids=str,
)
def test_a_number_without_a_trace_in_the_gradient_is_enough(
    stage: int, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A metric of NaN beside a loss that is finite; a loss of NaN whose gradient is 0. Each leaves no trace either."""
    engine, undisturbed = (engine_runs.engine({"zero_stage": stage, **options}) for _ in range(2))
    first, second = batches(2)
    parts = engine_runs.micro_batches(first, 3)
    nan = torch.tensor(torch.nan)
    engine.step(parts, lambda micro: (engine(micro)[0].mean(), {"entropy": nan}))
    engine.step(parts, lambda micro: (engine(micro)[0].mean().clamp(nan, nan), {}))
    output = capsys.readouterr().out
    assert "entropy is nan" in output and "step 2: loss is nan" in output
    assert apart(weights(engine), weights(undisturbed)) == 0
    for each in (engine, undisturbed):
        step(each, second, 3)
    assert apart(weights(engine), weights(undisturbed)) == 0


def test_auto_that_is_fp16_trains_with_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a V100 or T4. Its norm is that of fp32, and an overflow is a step of the search, not a bad one."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr(precision, "_fast_dtype", lambda device: torch.float16)
    rows = batches(1)[0]
    in_fp32 = engine_runs.engine({"dtype": "fp32"})
    exact = step(in_fp32, rows)
    engine = Engine(Policy(engine_runs.start()), tiny.training_options(EngineOptions(), OPTIMIZER), STEPS)
    assert engine.state_dict()["cur_scale"] == 2**16
    scaled = step(engine, rows)
    # Rounding is 2^-11 in each of some tens of operations; a scale that stayed in would be a factor of 65536.
    assert scaled["skipped"] == 0 and math.isclose(scaled["grad_norm"], exact["grad_norm"], rel_tol=0.05)
    before = weights(engine)
    skipped = engine.step([rows], lambda micro: (1e3 * engine(micro)[0].float().mean(), {}))
    assert skipped["skipped"] == 1 and math.isfinite(skipped["loss"])
    state = engine.state_dict()
    assert (state["overflows"], state["bad_in_a_row"]) == (1, 0) and apart(weights(engine), before) == 0
    resumed = Engine(Policy(engine_runs.start()), tiny.training_options(EngineOptions(), OPTIMIZER), STEPS)
    resumed.load_state_dict(in_fp32.state_dict())  # of a run that began on another device
    resumed.load_tensors(in_fp32.tensors())
    assert resumed.state_dict()["cur_scale"] == 2**16
    assert math.isclose(step(resumed, rows)["grad_norm"], step(in_fp32, rows)["grad_norm"], rel_tol=0.05)


def test_the_search_for_a_loss_scale_raises_nothing_of_its_own() -> None:
    """DeepSpeed's scaler gives up by a bare Exception after 17 overflows, before we have counted to the end."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def overflow(scaler: Any) -> None:
        for _ in range(FP16_SEARCH + 9):
            scaler.update_scale(True)

    settings = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    settings |= {"consecutive_hysteresis": False, "raise_error_at_min_scale": True}
    own, ours = (DynamicLossScaler(**settings) for _ in range(2))
    with pytest.raises(Exception, match="minimum"):
        overflow(own)
    _allow_overflows(SimpleNamespace(loss_scaler=ours))
    overflow(ours)
    assert ours.cur_scale == 1
