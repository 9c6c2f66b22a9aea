"""The average of the weights: against its closed form in float64, whatever ZeRO does with the weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.engine.ema import EMA
from rlhf.engine.export import save_policy
from tests.support import tiny
from tests.support.engine_runs import ALONE, DECAY, EPS, STEPS, batches, engine, master, run_averaged, step


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


ROUNDING = 1.5 * EPS * 1.1 / (1 - DECAY)
"""6.6e-7: an update rounds three times, each by up to eps / 2 of a weight, at most 1.1; of what is off a share of DECAY
is left after the next one."""
IN_BF16 = 2**-8 + ROUNDING
"""and half of the distance of neighbours in bf16 from 1 to 2"""


def require_average(result: dict[str, Any], tolerance: float = ROUNDING) -> None:
    """average_n = decay^n w_0 + (1 - decay) sum_k decay^(n - k) w_k"""
    shares = [DECAY**STEPS] + [(1 - DECAY) * DECAY ** (STEPS - k) for k in range(1, STEPS + 1)]
    assert sum(shares) == pytest.approx(1.0)
    assert result["undone"]
    for name, averaged in result["averaged"].items():
        if name in result["trace"][0]:
            expected = sum(
                share * weights[name].double() for share, weights in zip(shares, result["trace"], strict=True)
            )
            torch.testing.assert_close(averaged.double(), expected, rtol=0, atol=tolerance, msg=name)
    assert any((result["averaged"][name] - last).abs().max() > 1e-4 for name, last in result["trace"][-1].items())


@pytest.mark.parametrize("stage", ALONE)
def test_closed_form(stage: int) -> None:
    require_average(run_averaged({"zero_stage": stage}))


def test_with_an_adapter_only_its_weights_are_averaged() -> None:
    result = run_averaged({"zero_stage": 2}, adapter="lora")
    require_average(result)
    assert result["state"] and all("lora" in name for name in result["state"])


@pytest.mark.parametrize("stage", ALONE)
def test_in_bf16_the_average_is_kept_in_fp32(stage: int) -> None:
    """What bf16 could not hold: the average of weights that differ by less than its resolution."""
    result = run_averaged({"zero_stage": stage, "dtype": "bf16"})
    require_average(result, tolerance=IN_BF16)
    for name, average in result["state"].items():
        assert average.dtype == torch.float32
        shares = [DECAY**STEPS] + [(1 - DECAY) * DECAY ** (STEPS - k) for k in range(1, STEPS + 1)]
        expected = sum(share * weights[name].double() for share, weights in zip(shares, result["trace"], strict=True))
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=ROUNDING)


def test_the_average_is_what_is_saved(tmp_path: Path) -> None:
    trained = engine({"zero_stage": 3})
    average = EMA(trained, DECAY)
    for rows in batches(2):
        step(trained, rows)
        average.update()
    save_policy(trained, None, tiny.tokenizer(), tmp_path / "last")
    save_policy(trained, None, tiny.tokenizer(), tmp_path / "ema", average)
    saved = {kind: AutoModelForCausalLM.from_pretrained(tmp_path / kind).state_dict() for kind in ("last", "ema")}
    averaged = dict(average.tensors())
    for name, last in master(trained).items():
        name_there = name.removeprefix("lm.")
        assert torch.equal(saved["last"][name_there], last) and torch.equal(saved["ema"][name_there], averaged[name])
        assert not torch.equal(last, averaged[name])


def test_the_state_comes_back() -> None:
    trained = engine({"zero_stage": 1})
    one, other = EMA(trained, DECAY), EMA(trained, DECAY)
    step(trained, batches(1)[0])
    one.update()
    other.load_tensors([(name, value.clone()) for name, value in one.tensors()])
    assert all(torch.equal(value, dict(other.tensors())[name]) for name, value in one.tensors())
