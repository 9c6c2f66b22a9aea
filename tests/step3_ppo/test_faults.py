"""Penalties, sampling that is none, steps that overflow, and batches that do not divide."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.players import first, players, scored_by, twice_each

pytestmark = pytest.mark.usefixtures("ranks")


def test_the_penalty_falls_on_cut_responses_alone_whatever_their_score() -> None:
    scores = torch.linspace(-2.0, 2.0, 8)
    game = scored_by(players("ppo", missing_eos_penalty=3.0), lambda samples: scores)
    rollout = game.score(game.sample(twice_each()))
    cut = ~rollout.ended
    assert cut[scores < 0].any() and cut[scores > 0].any() and not cut.all()
    assert rollout.scores is not None and torch.equal(rollout.scores, torch.where(cut, scores - 3.0, scores))


class Overflowing:
    """An engine that leaves out the steps of these numbers."""

    def __init__(self, left_out: set[int]) -> None:
        self.left_out, self.calls, self.module = left_out, 0, None

    def step(self, *_: Any) -> dict[str, float]:
        self.calls += 1
        return {"loss": 0.0, "skipped": float(self.calls in self.left_out)}


def test_a_minibatch_that_overflows_in_the_actor_is_left_out_for_the_critic() -> None:
    actor, critic = Overflowing({1, 3}), Overflowing({2})
    game = players("ppo")
    rollout = game.score(game.sample(twice_each()))
    played: Any = replace(game, actor=actor, critic=critic)
    metrics = played.update(rollout, game.algorithm.credit(rollout, first(game.algorithm)))
    assert metrics["optimizer_steps"] == 4.0
    assert (actor.calls, critic.calls) == (4, 2)
    assert metrics["skipped_steps"] == 3.0  # two of both, one of the critic alone
