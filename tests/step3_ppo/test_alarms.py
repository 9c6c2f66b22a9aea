"""Runs of a tiny policy that go wrong in earnest, what is said of them, and what limits the damage."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from rlhf.maths import losses
from rlhf.types import Metrics, ScoredRollout
from step3_ppo.metrics import credit_metrics, rollout_metrics
from step3_ppo.warnings import Watch
from tests.support.players import Players, first, players, twice_each

pytestmark = pytest.mark.usefixtures("ranks")


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


# --- a KL that explodes


@pytest.mark.parametrize(("target_kl", "steps"), [(None, 8), (1e9, 8), (1e-6, 2)])
def test_target_kl_ends_the_passes_of_an_iteration(target_kl: float | None, steps: int) -> None:
    """The first minibatch finds the policy that sampled, so it is the second at the earliest."""
    game = players("ppo", num_ppo_epochs=4, num_mini_batches=2, target_kl=target_kl)
    metrics = game.update(game.score(game.sample(twice_each())))
    assert metrics["optimizer_steps"] == steps and abs(metrics["first_approx_kl"]) < 1e-6


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
