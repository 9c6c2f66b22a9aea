"""The controller brings the KL of a policy that responds to its coefficient to the budget."""

import json
import math
import random
from pathlib import Path

import pytest

from rlhf import plugins
from rlhf.training.evaluations import Best
from step3_ppo import stage
from step3_ppo.algorithms.ppo import Config
from step3_ppo.kl import KLController
from tests.support import tiny
from tests.support.demo import SMALL
from tests.support.players import on_course, on_stage, players

ITERATIONS, BATCH = 40, 128


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
    base *= math.exp(12 / 40 * error)
    control.observe(99.0, 3.0, 10)  # an error of 1 at most
    assert control.coef == pytest.approx(base * math.exp(12 / 40 + 2))
    control.observe(-1.0, 3.0, 10)  # and of -1 at least
    assert control.coef == pytest.approx(base * math.exp(-2))


def test_grpo_weighs_the_kl_against_scores_over_their_deviation() -> None:
    plain = {"num_generations": 4}
    for options, expected in ((plain, 0.2), (plain | {"scale_rewards": False}, 0.2 * 7)):
        control = spender(2.0, name="grpo", **options)
        control.observe(0.0, 7.0, 0)
        assert control.coef == pytest.approx(expected)


def test_a_budget_serves_a_recipe_with_a_coefficient_and_says_it() -> None:
    control = spender(2.0, kl_coef=0.5)
    assert control.note == "kl_coef 0.5 has no effect: kl_budget 2 finds the coefficient"
    control.observe(0.0, 3.0, 0)
    assert control.coef == pytest.approx(0.4 * 3 / math.sqrt(2 * 2))
    assert spender(2.0).note is None and KLController(Config(kl_coef=0.5)).note is None


def test_a_policy_above_the_budget_is_not_the_best() -> None:
    """Unless the budget is within the interval of its KL."""
    kept: list[int] = []
    best = Best("eval_score", None, lambda: kept.append(best.step), admits=spender(2.0).admits)
    for step, (score, kl) in enumerate([(1.0, 1.5), (3.0, 2.4), (2.0, 2.2), (9.0, 5.0), (1.9, 1.9)], start=1):
        best.update(step, {"eval_score": score, "eval_kl": kl, "eval_kl_ci95": 0.3})
    assert kept == [1, 3] and best.value == 2.0 and best.waited == 2
    assert spender(2.0, name="rloo").admits({"eval_kl": 2.3, "eval_kl_ci95": 0.4})
    assert KLController(Config()).admits({"eval_kl": 99.0, "eval_kl_ci95": 0.1})


def test_without_a_budget_nothing_moves() -> None:
    control = KLController(Config(kl_coef=0.3))
    control.observe(100.0, 1.0, 0)
    assert control.coef == 0.3


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"kl_budget": 2.0}, {"kl_budget": 2.0}, 0.7),
        ({"kl_budget": 2.0}, {"kl_budget": 3.0}, 0.7),
        ({"kl_coef": 0.3}, {"kl_budget": 2.0}, 0.0),
        ({"kl_coef": 0.3}, {"kl_coef": 0.1}, 0.1),
        ({"kl_coef": 0.3}, {"kl_coef": 0.3}, 0.3),  # where an earlier version had steered it to a target
    ],
)
def test_a_resumed_run_keeps_the_coefficient_that_a_budget_has_found(
    before: dict[str, float], after: dict[str, float], expected: float
) -> None:
    """It was 0.7 when the checkpoint was written."""
    with tiny.one_rank():
        saved, resumed = (on_stage(players("rloo", **options)) for options in (before, after))
        saved.kl.coef, saved.kl._base = 0.7, 0.5
        resumed.load_state_dict(saved.state_dict())
    assert resumed.kl.coef == expected


def test_an_iteration_gets_the_coefficient_of_its_own_rollout() -> None:
    """Of the policy that is about to learn; while only the critic learns, it is 0."""
    with tiny.one_rank():
        game = players("ppo", kl_budget=0.02, total_episodes=32, critic_warmup_iterations=1)
        warm_up, *rows = on_course(game)
    control, expected = KLController(game.config), list[float]()
    for iteration, row in enumerate(rows):
        control.observe(row["kl"], row["score_std"], iteration)
        expected.append(control.coef)
    assert warm_up["kl_coef"] == 0.0
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
