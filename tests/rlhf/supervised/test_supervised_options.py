"""Options of evaluation in steps 1 and 2, and the speed that is reported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.config import validate
from rlhf.errors import UserError
from rlhf.plan import machine
from rlhf.plan.forecast import ModelSpec
from rlhf.plan.sizes import Size
from rlhf.supervised import speed
from rlhf.supervised.options import steps_between
from rlhf.supervised.speed import Arithmetic, Speed
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(100, 100), ("100", 100), ("1epoch", 40), ("0.5epochs", 20), ("2epochs", 80), ("0.001epochs", 1)],
)
def test_an_interval_is_of_steps_or_epochs(interval: Any, steps: int) -> None:
    options = validate(SFTConfig, {"eval_every": interval}, "x")
    assert options.eval_every is not None and steps_between(options.eval_every, 40) == steps


def test_without_an_interval_it_is_an_epoch() -> None:
    several = validate(SFTConfig, {"num_train_epochs": 3, "keep_best": "eval_perplexity"}, "x")
    assert several.eval_every is None and steps_between(several.eval_every, 40) == 40


@pytest.mark.parametrize("interval", ["0.5", 0.5, "0", "0epochs", "-1", "often", "1 epoch"])
def test_another_interval_is_refused(interval: Any) -> None:
    with pytest.raises(UserError, match=r"eval_every: expected a number of optimizer steps such as 100, or of epochs"):
        validate(SFTConfig, {"eval_every": interval}, "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"eval_every": 5, "keep_best": "eval_perplexity"},
            "keep_best: Input should be 'eval_accuracy' or 'eval_loss'",
        ),
        ({"dropout": 0.1, "tensor_parallel_size": 2}, "dropout: expected tensor_parallel_size 1"),
    ],
)
def test_options_that_need_others(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(RewardConfig, options, "x")


def test_an_option_without_effect_is_named() -> None:
    [note] = RewardConfig(keep_best="eval_loss").idle()
    assert note == "--keep-best eval_loss without --eval-every in one epoch, which has one evaluation"
    assert [*RewardConfig(eval_every=5, patience=2).idle()] == ["--patience 2 without --keep-best"]
    assert [*RewardConfig(eval_every=5, patience=2, keep_best="eval_loss").idle()] == []


SIZE = Size(total=1100, trained=1100, largest=100, outer=100, layers=2, hidden=8, cache=0, vocabulary=50)


def test_the_speed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 10 tokens: 1000 weights inside make 2000 operations a token, attention 2 x 10 x 8 x 2 = 320, the head
    2 x 50 x 8 = 800 for each token that is learned; thrice with the backward pass."""
    clock = iter([0.0, 2.0, 10.0, 14.0, 99.0])
    monkeypatch.setattr(speed.time, "monotonic", lambda: next(clock))
    timed = Speed(Arithmetic(SIZE, 10.0, 3.0, peak=1e6))
    rows = list(timed.observe([{"tokens": 100.0, "tokens_learned": 50.0}, {"tokens": 40.0}]))
    assert [row["tokens_per_second"] for row in rows] == [50.0, 10.0]
    shares = [3 * (100 * 2320 + 50 * 800) / 2e6, 3 * 40 * 2320 / 4e6]
    assert [row["share_of_peak"] for row in rows] == pytest.approx(shares, rel=1e-12)
    whole = 3 * (140 * 2320 + 50 * 800) / 6e6
    assert timed.summary() == {"tokens_per_second": pytest.approx(140 / 6), "share_of_peak": pytest.approx(whole)}
    assert Speed(None).summary() == {}


def test_the_peak_is_that_of_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("policy", "m", "lm", SFTConfig(), "lora")
    monkeypatch.setattr(ModelSpec, "size", lambda _: SIZE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert speed.arithmetic(spec, torch.float32, 1.0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("Some GPU 9", None)):
        properties = SimpleNamespace(name=name, total_memory=1)
        monkeypatch.setattr(machine.torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        result = speed.arithmetic(spec, torch.bfloat16, 1.0)
        assert (None if result is None else (result.peak, result.passes)) == (None if peak is None else (peak, 2.0))
