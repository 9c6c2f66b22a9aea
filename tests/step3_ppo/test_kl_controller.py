"""The controller brings the KL of a policy that responds to its coefficient to the target."""

import math

import pytest

from rlhf import plugins
from rlhf.config import validate
from rlhf.errors import UserError
from step3_ppo.algorithms.ppo import Config
from step3_ppo.kl import KLController
from step3_ppo.schedule import Schedule
from tests.support import tiny
from tests.support.players import config_of, on_stage, players

ITERATIONS, BATCH = 40, 128


def controller(coef: float, target: float | None, warmup: int = 0) -> KLController:
    episodes = (ITERATIONS + warmup) * BATCH
    options = {"total_episodes": episodes, "batch_size": BATCH, "critic_warmup_iterations": warmup}
    return KLController(Config(kl_coef=coef, kl_target=target, **options))  # type: ignore[arg-type]


def respond(coef: float, kl: float) -> float:
    """A policy that goes half of the way to where the coefficient lets it, 0.6 / coef nats, in every iteration."""
    return kl + 0.5 * (0.6 / coef - kl)


@pytest.mark.parametrize("factor", [1 / 30, 1 / 5, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("target", [1.5, 6.0])
def test_the_target_is_reached_and_held(factor: float, target: float) -> None:
    """From coefficients up to 30 times too low or too high."""
    control = controller(factor * 0.6 / target, target)
    kl, history = 0.0, []
    for _ in range(ITERATIONS):
        control.observe(kl)
        kl = respond(control.coef, kl)
        history.append(kl)
    reached = next(i for i, kl in enumerate(history) if kl > 0.8 * target)
    assert reached <= ITERATIONS / 2
    assert history[ITERATIONS // 2 :] == pytest.approx([target] * (ITERATIONS // 2), rel=0.2)
    assert history[-5:] == pytest.approx([target] * 5, rel=0.1)


def test_the_coefficient_by_hand() -> None:
    """Of 40 iterations the wanted KL rises for 12: 0 in the first one, (1/12)^2 of the target in the second."""
    control = controller(0.2, 2.4, warmup=3)
    control.observe(0.0)
    assert control.coef == pytest.approx(0.2)
    control.observe(-0.02)
    error = math.log((-0.02 + 0.24) / (2.4 / 144 + 0.24))
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + error))
    control.observe(2.3)  # above the wanted KL, an error of 1 at most; below the target nothing of it lasts
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 2))
    control.observe(50.0)
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 24 / 40 + 2))
    control.observe(-1.0)  # and of -1 at least
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 24 / 40 - 12 / 40 - 1))


def test_without_a_target_nothing_moves() -> None:
    control = controller(0.3, None)
    control.observe(100.0)
    assert control.coef == 0.3


def test_a_coefficient_of_0_could_not_be_steered() -> None:
    with pytest.raises(UserError, match="kl_coef 0: expected more than 0"):
        validate(Config, {"kl_target": 1.0, "kl_coef": 0.0}, "x")


STEERED = sorted(set(plugins.names("step3_ppo.algorithms")) - {"best_of_n"})  # which only measures it


@pytest.mark.parametrize("name", STEERED)
def test_every_algorithm_has_one(name: str) -> None:
    config = plugins.find("step3_ppo.algorithms", name).Config(algorithm=name, kl_coef=0.25)
    assert KLController(config).coef == 0.25


@pytest.mark.parametrize(("asked_for", "expected"), [(0.3, 0.7), (0.1, 0.1)])
def test_a_resumed_run_keeps_its_coefficient_unless_the_options_changed_it(asked_for: float, expected: float) -> None:
    """Steered from 0.3 to 0.7 when the checkpoint was written."""
    with tiny.one_rank():
        before, after = (on_stage(players("rloo", kl_coef=coef)) for coef in (0.3, asked_for))
        before.kl.coef, before.kl._base, before.kl._observed = 0.7, 0.5, 9
        after.load_state_dict(before.state_dict())
    assert after.kl.coef == expected
    if asked_for == 0.3:
        assert after.kl.state_dict() == before.kl.state_dict()


def test_an_iteration_gets_the_coefficient_of_the_controller_when_it_begins() -> None:
    config = config_of("ppo", kl_coef=0.07, total_episodes=24, critic_warmup_iterations=1)
    kl = KLController(config)
    iterations = iter(Schedule(8, config, kl))
    first = next(iterations)
    assert (first.number, first.kl_coef, first.pretrains_critic) == (0, 0.07, True)
    kl.coef = 0.5
    second = next(iterations)
    assert (second.number, second.kl_coef, second.pretrains_critic) == (1, 0.5, False)
