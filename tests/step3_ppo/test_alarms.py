"""Runs of a tiny policy that go wrong in earnest, what is said of them, and what ends them."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlhf.maths import losses, ops
from rlhf.rewards import Sources, WeightedSource
from rlhf.training.evaluations import Best, EvaluationSchedule, with_evaluations
from rlhf.types import Metrics, Samples, ScoredRollout
from step3_ppo.algorithms import ppo
from step3_ppo.guard import KLGuard, RunawayError
from step3_ppo.metrics import credit_metrics, rollout_metrics
from step3_ppo.warnings import IN_A_ROW, Watch
from tests.step3_ppo.test_bandit import ACTIONS, BATCH, logprobs_of, sampled
from tests.support import tiny
from tests.support.players import ONE_STEP, Players, first, players, twice_each


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with tiny.one_rank():
        yield


def metrics_of(game: Players, rollout: ScoredRollout) -> Metrics:
    """What an iteration says of itself, its update included."""
    credit = game.algorithm.credit(rollout, first(game.algorithm))
    return rollout_metrics(rollout) | credit_metrics(rollout, credit) | game.update(rollout, credit)


def iterations(game: Players, count: int) -> Iterator[Metrics]:
    for draw in range(count):
        yield metrics_of(game, game.score(game.sample(twice_each(), draw)))


def alarms(steps: Iterable[Metrics]) -> dict[str, int]:
    """The iteration at which each warning of a run was first said."""
    first_steps: dict[str, int] = {}
    watch = Watch()
    for step, metrics in enumerate(steps, start=1):
        for notice in watch.check(step, metrics):
            first_steps.setdefault(notice.name, step)
    return first_steps


def scored_by(game: Players, score: Callable[[Samples], Tensor]) -> Players:
    return replace(game, scorer=replace(game.scorer, sources=Sources((WeightedSource("own", 1.0, score),))))


def length(samples: Samples) -> Tensor:
    return samples.rollout.lengths.float()


# --- a KL that explodes


@pytest.mark.parametrize(("target_kl", "steps"), [(None, 8), (1e9, 8), (1e-6, 2)])
def test_target_kl_ends_the_passes_of_an_iteration(target_kl: float | None, steps: int) -> None:
    """The first minibatch finds the policy that sampled, so it is the second at the earliest."""
    game = players("ppo", num_ppo_epochs=4, num_mini_batches=2, target_kl=target_kl)
    metrics = game.update(game.score(game.sample(twice_each())))
    assert metrics["optimizer_steps"] == steps and abs(metrics["first_approx_kl"]) < 1e-6


@pytest.mark.parametrize(
    ("kls", "in_a_row", "ended_at"),
    [
        ([1, 11, 12, 13, 14], 3, 4),
        ([11, 12, 9, 13, 14, 9, 11, 12], 3, None),
        ([11, 12, 9, 13, 14, 15, 1], 3, 6),
        ([1, 10.01, 1], 1, 2),
        ([10, 10, 10, 10], 1, None),
        ([11] * 9, 10, None),
    ],
)
def test_a_kl_above_the_limit_for_long_ends_the_run(kls: list[float], in_a_row: int, ended_at: int | None) -> None:
    recorded: list[float] = []

    def run() -> None:
        for metrics in KLGuard(10.0, in_a_row).guarded({"kl": float(kl)} for kl in kls):
            recorded.append(metrics["kl"])

    if ended_at is None:
        run()
        assert recorded == kls
        return
    times = rf" for {in_a_row} iterations" if in_a_row > 1 else ""
    with pytest.raises(RunawayError, match=rf"^iteration {ended_at}: kl is .*above --abort-kl 10{times}; lower"):
        run()
    assert recorded == kls[:ended_at]  # the iteration that ended it was recorded


def test_an_iteration_that_was_left_out_counts_for_nothing() -> None:
    rows = [{"kl": 11.0}, {"skipped_iteration": 1.0}, {"kl": 11.0}]
    with pytest.raises(RunawayError, match=r"^iteration 3:"):
        list(KLGuard(10.0, 2).guarded(rows))


def test_a_run_that_was_ended_stays_so_unless_the_limit_is_higher() -> None:
    ended = KLGuard(10.0, 2)
    with pytest.raises(RunawayError):
        list(ended.guarded([{"kl": 11.0}, {"kl": 12.0}]))
    for limit, iterations in ((10.0, 0), (11.5, 0), (12.0, 3)):
        guard = KLGuard(limit, 2)
        guard.load_state_dict(json.loads(json.dumps(ended.state_dict())))
        after = guard.guarded([{"kl": 1.0}] * 3, done=2)
        if iterations:
            assert len(list(after)) == iterations
        else:
            with pytest.raises(RunawayError, match=f"^iteration 2: kl is 12 nats .*, above --abort-kl {limit:g} "):
                next(after)


def test_without_a_limit_nothing_ends() -> None:
    """Nor where the run was ended by a limit, and goes on without one."""
    for count in (0, 1):
        guard = KLGuard(None, 1)
        guard.load_state_dict({"count": count, "kl": 1e9})
        assert len(list(guard.guarded({"kl": 1e9} for _ in range(9)))) == 9


def test_a_run_may_resume_at_an_iteration_that_is_left_out() -> None:
    guard = KLGuard(10.0, 1)
    guard.load_state_dict({"count": 0, "kl": 1.0})
    assert len(list(guard.guarded([{"skipped_iteration": 1.0}, {"kl": 1.0}]))) == 2


def test_a_run_that_explodes_is_warned_of_and_ended_and_its_best_policy_stays() -> None:
    fast = {"num_mini_batches": 1, "micro_batch_size": 8}
    game = players("ppo", learning_rate=0.3, critic_learning_rate=0.3, kl_coef=0.0, **fast)
    saved_weights: list[dict[str, Tensor]] = []
    best = Best("eval_score", None, lambda: saved_weights.append(game.weights()))
    looks = iter(range(0, -99, -1))  # the first look is the best
    steps = with_evaluations(
        iterations(game, 12), EvaluationSchedule(1, 12), lambda _: {"eval_score": float(next(looks))}, best
    )
    with pytest.raises(RunawayError, match="--abort-kl 10 for 2 iterations; lower --learning-rate"):
        alarms(KLGuard(10.0, 2).guarded(steps))
    assert len(saved_weights) == 1 and all(torch.isfinite(weight).all() for weight in saved_weights[0].values())
    calm = players("ppo", learning_rate=1e-4, critic_learning_rate=1e-4, **fast)
    assert len(list(KLGuard(10.0, 2).guarded(iterations(calm, 4)))) == 4


@pytest.mark.parametrize("apart", [50.0, 90.0, 1e4])
def test_a_token_that_ran_away_spoils_no_step(apart: float) -> None:
    """Its ratio, beyond what fp32 holds, is far beyond the clip: of a good token nothing is left to learn."""
    old, advantages, mask = torch.tensor([[-apart, -1.0]]), torch.ones(1, 2), torch.ones(1, 2).bool()
    logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
    for sign in (1.0, -1.0):
        loss, metrics = losses.clipped_policy(logprobs, old, sign * advantages, mask, (0.2, 0.2), 2.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert torch.isfinite(gradient).all() and all(torch.isfinite(x) for x in (loss, *metrics.values()))
        assert gradient[0, 1] == -0.5 * sign and (sign < 0 or gradient[0, 0] == 0.0)


# --- a KL below 0


def sharpened(factor: float) -> Players:
    """A policy whose logits are `factor` times those of the reference."""
    game = players("ppo")
    with torch.no_grad():
        game.actor.module.lm.get_output_embeddings().weight.mul_(factor)
    return game


@pytest.mark.parametrize(("factor", "temperature"), [(1.5, 3.0), (0.6, 0.05)])
def test_sampling_from_another_distribution_is_told_by_a_negative_kl(factor: float, temperature: float) -> None:
    """Hot samples of a policy sharper than the reference; nearly greedy ones (as top-k 1) of one that is flatter."""
    game = sharpened(factor)
    other = replace(game, config=game.config.model_copy(update={"temperature": temperature}))
    wrong, right = (
        [rollout_metrics(game.score(sampler.sample(twice_each(), draw))) for draw in range(3)]
        for sampler in (other, game)
    )
    assert alarms(wrong)["negative_kl"] == 3 and "negative_kl" not in alarms(right)
    # Which side is at fault: sampling and scoring differ by more than rounding.
    assert min(row["sampling_mismatch"] for row in wrong) > 0.1 > 1e-4 > max(row["sampling_mismatch"] for row in right)


# --- a first ratio that is not 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_in_the_policy_trips_the_first_ratio(dropout: float) -> None:
    game = players("ppo", **ONE_STEP)
    game.actor.module.lm.model.norm.register_forward_hook(
        lambda norm, inputs, states: nn.functional.dropout(states, dropout, norm.training)
    )
    warned = alarms(iterations(game, 1))
    assert warned.get("first_ratio") == (1 if dropout else None)


# --- rewards that are hacked, policies that collapse


def test_a_reward_for_length_is_hacked_and_told() -> None:
    options = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2, "kl_coef": 0.0, "response_length": 32}
    game = scored_by(players("ppo", **options, num_mini_batches=1, micro_batch_size=8), length)
    rows = list(iterations(game, 5))
    warned = alarms(rows)
    assert warned["score_follows_length"] == IN_A_ROW
    assert rows[-1]["response_length"] > 2 * rows[0]["response_length"]  # and it works


def entropies(kl_coef: float) -> list[Metrics]:
    """PPO on the bandit of tests/step3_ppo/test_bandit.py for long: the entropy of the policy at each iteration."""
    draw = torch.Generator().manual_seed(0)
    scores, ref_logits = torch.randn(2, ACTIONS, generator=draw).unbind()
    algorithm = ppo.build(ppo.Config(algorithm="ppo", kl_coef=kl_coef))
    logits, baseline = ref_logits.clone().requires_grad_(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([logits, baseline], lr=0.05)
    metrics = []
    for _ in range(200):
        with torch.no_grad():
            rollout = sampled(logits, ref_logits, baseline, scores, draw)
            credit = algorithm.credit(rollout, first(algorithm))
            metrics.append({"entropy": ops.entropy(logits[None, None]).item()})
        count = rollout.mask.sum()
        loss, _ = algorithm.policy_loss(
            logprobs_of(logits, rollout.response_ids), rollout, credit, count, first(algorithm)
        )
        optimizer.zero_grad()
        (loss + algorithm.value_loss(baseline.expand(BATCH, 1), rollout, credit, count, first(algorithm))[0]).backward()
        optimizer.step()
    return metrics


def test_a_policy_without_kl_collapses_and_is_told() -> None:
    free, penalized = entropies(kl_coef=0.0), entropies(kl_coef=0.5)
    assert alarms(free).keys() == {"entropy_collapse"} and alarms(free)["entropy_collapse"] > 10
    assert free[-1]["entropy"] < 0.1 < 0.5 < penalized[-1]["entropy"] and alarms(penalized) == {}
