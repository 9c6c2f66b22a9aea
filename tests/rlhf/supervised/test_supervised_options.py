"""Options of evaluation in steps 1 and 2, and the speed that is reported."""

from typing import Any

import pytest

from rlhf.config import validate
from rlhf.supervised import speed
from rlhf.supervised.options import steps_between
from rlhf.supervised.speed import Speed
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


def test_an_option_without_effect_is_named() -> None:
    [note] = RewardConfig(keep_best="eval_loss").idle()
    assert note == "--keep-best eval_loss without --eval-every in one epoch, which has one evaluation"
    assert [*RewardConfig(eval_every=5, patience=2).idle()] == ["--patience 2 without --keep-best"]
    assert [*RewardConfig(eval_every=5, patience=2, keep_best="eval_loss").idle()] == []


def test_the_speed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 14.0, 99.0])
    monkeypatch.setattr(speed.time, "monotonic", lambda: next(clock))
    timed = Speed()
    rows = list(timed.observe([{"tokens": 100.0}, {"tokens": 40.0}]))
    assert [row["tokens_per_second"] for row in rows] == [50.0, 10.0]
    assert timed.summary() == {"tokens_per_second": pytest.approx(140 / 6)}
    assert Speed().summary() == {}
