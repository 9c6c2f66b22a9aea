"""The controller brings the KL of a policy that responds to its coefficient to the target, or to the budget."""

import json
import math
import random
from pathlib import Path

import pytest

from rlhf import plugins
from rlhf.config import validate
from rlhf.errors import UserError
from rlhf.training.evaluations import Best
from step3_ppo import stage
from step3_ppo.algorithms.ppo import Config
from step3_ppo.kl import KLController
from tests.support import tiny
from tests.support.demo import SMALL
from tests.support.players import on_course, on_stage, players

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
    for iteration in range(ITERATIONS):
        control.observe(kl, 1.0, iteration)
        kl = respond(control.coef, kl)
        history.append(kl)
    reached = next(i for i, kl in enumerate(history) if kl > 0.8 * target)
    assert reached <= ITERATIONS / 2
    assert history[ITERATIONS // 2 :] == pytest.approx([target] * (ITERATIONS // 2), rel=0.2)
    assert history[-5:] == pytest.approx([target] * 5, rel=0.1)


def test_the_coefficient_by_hand() -> None:
    """Of 40 iterations the wanted KL rises for 12: 0 in the first one, (1/12)^2 of the target in the second."""
    control = controller(0.2, 2.4, warmup=3)
    control.observe(0.0, 1.0, 0)
    assert control.coef == pytest.approx(0.2)
    control.observe(-0.02, 1.0, 1)
    error = math.log((-0.02 + 0.24) / (2.4 / 144 + 0.24))
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + error))
    control.observe(2.3, 1.0, 2)  # above the wanted KL, an error of 1 at most; below the target nothing of it lasts
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 2))
    control.observe(50.0, 1.0, 3)
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 24 / 40 + 2))
    control.observe(-1.0, 1.0, 4)  # and of -1 at least
    assert control.coef == pytest.approx(0.2 * math.exp(12 / 40 * error + 24 / 40 - 12 / 40 - 1))


def spender(budget: float, iterations: int = ITERATIONS, name: str = "ppo", **options: object) -> KLController:
    """The controller of a run with a budget."""
    episodes = {"total_episodes": iterations * BATCH, "batch_size": BATCH}
    return KLController(plugins.find("step3_ppo.algorithms", name).Config(kl_budget=budget, **episodes, **options))


def spent(
    budget: float, iterations: int, responsiveness: float, noise: float = 0.0, seed: int = 0, scale: float = 1.0
) -> list[float]:
    """The KL after each iteration, over the budget, of a policy whose best KL is (responsiveness * s / kl_coef)^2 / 2,
    s = `scale` the deviation of the scores, but not over 5 budgets. Each iteration goes a share of the way, which falls
    with the learning rate. noise: deviation of the logarithm of a measured KL"""
    control, draw, kl, history = spender(budget, iterations), random.Random(seed), 0.0, []
    for iteration in range(iterations):
        control.observe(kl * math.exp(draw.gauss(0.0, noise)), scale, iteration)
        best = min((responsiveness * scale / control.coef) ** 2 / 2, 5 * budget)
        kl += 0.35 * (1 - iteration / iterations) * (best - kl)
        history.append(kl / budget)
    return history


@pytest.mark.parametrize("responsiveness", [0.4 / 30, 0.4 / 5, 0.4, 2.0, 12.0])
@pytest.mark.parametrize("iterations", [20, 40, 100])
def test_a_budget_is_spent_at_the_end(responsiveness: float, iterations: int) -> None:
    """From starts that are up to 30 times too low or too high. Where the start is right, the KL is never above it."""
    history = spent(1.5, iterations, responsiveness)
    assert history[-1] == pytest.approx(1.0, abs=0.1)
    assert max(history[iterations // 2 :]) < 1.2 and (responsiveness != 0.4 or max(history) < 1.0)
    assert history == pytest.approx(spent(6.0, iterations, responsiveness, scale=100.0))  # without a scale of its own


def test_a_budget_is_spent_where_the_kl_is_measured_with_noise() -> None:
    """The end deviates by no more than one measurement in 20 iterations, by half of it in 40."""
    for iterations, limit in ((20, 0.12), (40, 0.06)):
        ends = [spent(3.0, iterations, 1.0, 0.12, seed)[-1] for seed in range(30)]
        assert math.sqrt(sum(math.log(end) ** 2 for end in ends) / len(ends)) < limit


def test_the_coefficient_under_a_budget_by_hand() -> None:
    """After 10 of 40 iterations the KL may be between 0.1914 and 0.6836 of the budget, 2 nats."""
    control = spender(2.0)
    control.observe(0.0, 0.0, 0)
    assert control.coef == 0.0  # scores that are all the same say nothing
    control.observe(0.0, 3.0, 1)
    first = 0.4 * 3 / math.sqrt(2 * 2)
    error = math.log(0.1 / ((1 - (39 / 40) ** 2) ** 2 + 0.1))
    assert control.coef == pytest.approx(first * math.exp(12 / 40 * error + 2 * error))
    base = first * math.exp(12 / 40 * error)
    for kl in (0.384, 1.367):  # right: the base, whatever the scores are by now
        control.observe(kl, 50.0, 10)
        assert control.coef == pytest.approx(base)
    control.observe(1.8, 3.0, 10)  # too much by now, but within the budget
    assert control.coef == pytest.approx(base * (1.0 / (1 - 0.75**4 + 0.1)) ** 2)
    control.observe(2.6, 3.0, 10)
    error = math.log(1.4 / (1 - 0.75**4 + 0.1))
    assert control.coef == pytest.approx(base * math.exp(12 / 40 * error + 2 * error))


def test_a_resumed_run_spends_its_budget_to_the_bit() -> None:
    """From a checkpoint of every iteration."""
    whole, resumed = spender(2.0), spender(2.0)
    for iteration, kl in enumerate([0.0, 0.3, 1.7, 2.9, 1.1]):
        for control in (whole, resumed):
            control.observe(kl, 1.0 + iteration, iteration)
        state = json.loads(json.dumps(resumed.state_dict()))
        assert state == whole.state_dict()
        resumed = spender(2.0)
        resumed.load_state_dict(state)


def test_grpo_weighs_the_kl_against_scores_over_their_deviation() -> None:
    plain = {"num_generations": 4}
    for options, expected in ((plain, 0.2), (plain | {"scale_rewards": False}, 0.2 * 7)):
        control = spender(2.0, name="grpo", **options)
        control.observe(0.0, 7.0, 0)
        assert control.coef == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_target": 1.0}, "kl_budget 2: expected no kl_target, got 1; leave one out"),
        ({"abort_kl": 9.0}, "kl_budget 2: expected no abort_kl, got 9; leave one out"),
    ],
)
def test_a_budget_decides_alone(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(Config, {"kl_budget": 2.0, **options}, "x")


def test_a_budget_serves_a_recipe_with_a_coefficient_and_says_it() -> None:
    control = spender(2.0, kl_coef=0.5)
    assert control.note == "kl_coef 0.5 has no effect: kl_budget 2 finds the coefficient"
    control.observe(0.0, 3.0, 0)
    assert control.coef == pytest.approx(0.4 * 3 / math.sqrt(2 * 2))
    assert spender(2.0).note is None and controller(0.5, 2.0).note is None


def test_a_policy_above_the_budget_is_not_the_best() -> None:
    """Unless the budget is within the interval of its KL."""
    kept: list[int] = []
    best = Best("eval_score", None, lambda: kept.append(best.step), admits=spender(2.0).admits)
    for step, (score, kl) in enumerate([(1.0, 1.5), (3.0, 2.4), (2.0, 2.2), (9.0, 5.0), (1.9, 1.9)], start=1):
        best.update(step, {"eval_score": score, "eval_kl": kl, "eval_kl_ci95": 0.3})
    assert kept == [1, 3] and best.value == 2.0 and best.waited == 2
    assert spender(2.0, name="rloo").admits({"eval_kl": 2.3, "eval_kl_ci95": 0.4})
    assert KLController(Config()).admits({"eval_kl": 99.0, "eval_kl_ci95": 0.1})


def test_without_a_target_nothing_moves() -> None:
    control = controller(0.3, None)
    control.observe(100.0, 1.0, 0)
    assert control.coef == 0.3


def test_a_coefficient_of_0_could_not_be_steered() -> None:
    with pytest.raises(UserError, match="kl_coef 0: expected more than 0"):
        validate(Config, {"kl_target": 1.0, "kl_coef": 0.0}, "x")


@pytest.mark.parametrize(("asked_for", "expected"), [(0.3, 0.7), (0.1, 0.1)])
def test_a_resumed_run_keeps_its_coefficient_unless_the_options_changed_it(asked_for: float, expected: float) -> None:
    """Steered from 0.3 to 0.7 when the checkpoint was written."""
    with tiny.one_rank():
        before, after = (on_stage(players("rloo", kl_coef=coef)) for coef in (0.3, asked_for))
        before.kl.coef, before.kl._base = 0.7, 0.5
        after.load_state_dict(before.state_dict())
    assert after.kl.coef == expected
    if asked_for == 0.3:
        assert after.kl.state_dict() == before.kl.state_dict()


def test_an_iteration_gets_the_coefficient_of_its_own_rollout() -> None:
    """Of the policy that is about to learn; while only the critic learns, that of the options."""
    with tiny.one_rank():
        game = players("ppo", kl_coef=0.07, kl_target=0.02, total_episodes=32, critic_warmup_iterations=1)
        warm_up, *rows = on_course(game)
    control, expected = KLController(game.config), list[float]()
    for iteration, row in enumerate(rows):
        control.observe(row["kl"], row["score_std"], iteration)
        expected.append(control.coef)
    assert warm_up["kl_coef"] == 0.07
    assert [row["kl_coef"] for row in rows] == pytest.approx(expected, rel=1e-9)
    assert len(rows) == 3 and len(set(expected)) == 3


@pytest.mark.parametrize("admitted", [True, False])
def test_a_policy_above_the_budget_is_not_kept(admitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its score is the best so far."""
    monkeypatch.setattr(KLController, "admits", lambda *_: admitted)
    options = {"actor_model": "demo-llama", "response_length": 8, "total_episodes": 64, "eval_samples": 8}
    options |= {"kl_budget": 1.0, "keep_best": "eval_score", "eval_every": 1, "reward": ["length,target=8"]}
    values = {**SMALL, **options, "algorithm": "rloo", "num_generations": 2, "output_dir": str(tmp_path)}
    stage.run(plugins.find("step3_ppo.algorithms", "rloo").Config(**values))
    manifest = json.loads((tmp_path / "step3_ppo/manifest.json").read_text(encoding="utf-8"))
    assert ("best" in manifest["models"]) == ("eval_best_step" in manifest["metrics"]) == admitted
