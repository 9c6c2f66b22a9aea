"""The controller brings the KL of a policy that responds to its coefficient to the target."""

from typing import Any

import pytest

from rlhf import plugins
from rlhf.config import validate
from rlhf.errors import UserError
from step3_ppo import algorithms
from step3_ppo.algorithms.ppo import Config
from step3_ppo.kl import KLController
from tests.support import tiny
from tests.support.players import on_stage, players


def respond(coef: float, kl: float) -> float:
    """A policy that goes half of the way to where the coefficient lets it, 0.6 / coef nats, in every iteration."""
    return kl + 0.5 * (0.6 / coef - kl)


@pytest.mark.parametrize("start", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("target", [1.5, 6.0])
def test_the_target_is_reached_and_held(start: float, target: float) -> None:
    control = KLController(Config(kl_coef=start, kl_target=target, kl_horizon=1000, batch_size=256))
    kl, history = 0.0, []
    for _ in range(400):
        kl = respond(control.coef, kl)
        control.observe(kl, 256)
        history.append(kl)
    assert history[-100:] == pytest.approx([target] * 100, rel=0.05)
    assert control.coef == pytest.approx(0.6 / target, rel=0.05)


def test_without_a_target_nothing_moves() -> None:
    control = KLController(Config(kl_coef=0.3))
    control.observe(100.0, 512)
    assert control.coef == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kl_target": 1.0, "kl_horizon": 10, "batch_size": 64},
            "kl_horizon 10: expected more than a fifth of batch_size 64",
        ),
        ({"kl_target": 1.0, "kl_coef": 0.0}, "kl_coef 0: expected more than 0"),
    ],
)
def test_what_could_not_steer_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(Config, options, "x")


STEERED = sorted(set(plugins.names("step3_ppo.algorithms")) - {"best_of_n"})  # which only measures it


@pytest.mark.parametrize("name", STEERED)
def test_every_algorithm_has_one(name: str) -> None:
    config = plugins.find("step3_ppo.algorithms", name).Config(algorithm=name, kl_coef=0.25)
    assert algorithms.load(config).kl_coef == KLController(config).coef == 0.25


@pytest.mark.parametrize(("asked_for", "expected"), [(0.3, 0.7), (0.1, 0.1)])
def test_a_resumed_run_keeps_its_coefficient_unless_the_options_changed_it(asked_for: float, expected: float) -> None:
    """Steered from 0.3 to 0.7 when the checkpoint was written."""
    with tiny.one_rank():
        before, after = (on_stage(players("rloo", kl_coef=coef)) for coef in (0.3, asked_for))
        before.kl.coef = 0.7
        after.load_state_dict(before.state_dict())
    assert after.kl.coef == expected
