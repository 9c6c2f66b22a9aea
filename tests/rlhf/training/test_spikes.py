"""Loss spikes on lists of losses made for it: what is one, what is not, and when it is said."""

import json
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from rlhf.config import option_names
from rlhf.training.spikes import ADVICE, NAME, Spikes
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.algorithms import ppo

LOSSES = ("loss", "policy_loss", "value_loss")


def spike_steps(losses: Iterable[float], name: str = "loss") -> list[int]:
    """The steps, from 1, at which a spike is said."""
    spikes = Spikes(LOSSES)
    return [step for step, loss in enumerate(losses, start=1) if spikes.check({name: loss}) is not None]


def noisy(count: int, level: float = 2.0, spread: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, spread) for _ in range(count)]


@pytest.mark.parametrize("name", ["loss", "policy_loss", "value_loss"])
def test_a_loss_that_jumps_and_stays_is_said_once(name: str) -> None:
    assert spike_steps(noisy(200) + noisy(40, level=4.0), name) == [201]


def test_the_numbers_worked_by_hand() -> None:
    """16 losses of mean 2 and deviation 0.1, so the limit is 2.6; three of 2.4 and 3.2 have the mean 2.6."""
    spikes = Spikes(LOSSES)
    for i in range(16):
        assert spikes.check({"loss": 1.9 + 0.2 * (i % 2)}) is None
    for loss in (2.4, 2.4, 2.4):
        assert spikes.check({"loss": loss}) is None
    metrics = spikes.check({"loss": 3.21})
    assert metrics == pytest.approx({"loss": 2.6025, "loss_limit": 2.6, "loss_before": 2.0})


def test_a_loss_that_grows_from_the_first_steps_is_said() -> None:
    """Limit 2 x 4 + 1 = 9: (4 + 300) / 2 at the second step; a value loss may grow from a small one."""
    assert spike_steps([4.0, 300.0, *noisy(30, 800.0)]) == [2]
    assert spike_steps([4.0, 5.0, 12.0, 9.0, 8.0]) == [] and spike_steps([0.1, 30.0, 40.0], "value_loss") == []


def test_one_step_far_out_is_a_spike_and_one_odd_batch_is_not() -> None:
    for loss, steps in ((2.9, []), (12.0, [101])):  # 18 and 200 deviations above
        assert spike_steps([*noisy(100), loss, *noisy(60, seed=1)]) == steps


def test_two_spikes_far_apart_are_two() -> None:
    losses = [*noisy(150), 9.0, *noisy(150, seed=1), 9.0, *noisy(20, seed=2)]
    assert spike_steps(losses) == [151, 302]


def falling() -> Iterator[float]:
    yield from (10 * 0.97**i + loss for i, loss in enumerate(noisy(300)))


def heavy_tailed() -> Iterator[float]:
    """Small batches of a reward model: mostly little, now and then a badly wrong pair."""
    draw = random.Random(3)
    yield from (math.exp(draw.gauss(-1.5, 0.6)) for _ in range(500))


@pytest.mark.parametrize(
    "losses",
    [
        noisy(500),
        list(falling()),
        list(heavy_tailed()),
        [2.0] * 50 + [2.1] * 50,  # no deviation at all: a twentieth more is no spike
        [loss - 2.0 for loss in noisy(300)],  # around 0, as the policy's
        [4.0 - 0.01 * i for i in range(300)],
        [2.0] * 15 + [4.9] * 4,  # too little is known of what is normal: twice the first and 1 is allowed
        noisy(100) + noisy(100, level=1.0),  # it may fall as it likes
    ],
)
def test_what_is_no_spike(losses: list[float]) -> None:
    assert spike_steps(losses) == []


def test_a_resumed_run_does_not_say_again_what_was_said() -> None:
    """And forgets nothing: a loss that was low before the stop is no less a spike after it."""
    losses = noisy(100) + noisy(40, level=4.0)
    for stop in (50, 101, 102, 103, 110):
        spikes, steps = Spikes(LOSSES), list[int]()
        for step, loss in enumerate(losses, start=1):
            if step == stop:
                state = json.loads(json.dumps(spikes.state_dict()))
                spikes = Spikes(LOSSES)
                spikes.load_state_dict(state)
            steps += [step] if spikes.check({"loss": loss}) is not None else []
        assert steps == spike_steps(losses) == [101], stop


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_anothers_affair(broken: float) -> None:
    assert spike_steps([*noisy(100), *[broken] * 9, *noisy(100, seed=1)]) == []
    assert spike_steps([*noisy(100), broken, 9.0, *noisy(10, seed=1)]) == [102]


def test_steps_without_a_loss_change_nothing() -> None:
    """A warm-up of the critic has no policy loss, a step that was left out has none at all."""
    spikes = Spikes(LOSSES)
    rows: list[dict[str, float]] = [{"value_loss": 1.0}] * 40 + [{}] + [{"value_loss": 1.0, "policy_loss": 0.0}] * 40
    assert [spikes.check(row) for row in rows] == [None] * 81
    metrics: Any = spikes.check({"value_loss": 9.0, "policy_loss": 0.0})
    assert set(metrics) == {"value_loss", "value_loss_limit", "value_loss_before"}


def test_the_advice_names_options_of_every_stage() -> None:
    assert NAME == "loss_spike" and "\n" not in ADVICE
    for config in (SFTConfig, RewardConfig, ppo.Config):
        assert {"learning-rate", "warmup-ratio"} <= set(option_names(config))
    assert "--learning-rate" in ADVICE and "--warmup-ratio" in ADVICE
