"""Penalties, sampling that is none, steps that overflow, and batches that do not divide."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.training import checks
from step3_ppo.algorithms import grpo, ppo
from step3_ppo.inputs import check
from tests.support.players import first, players, scored_by, twice_each

pytestmark = pytest.mark.usefixtures("ranks")


def test_the_penalty_falls_on_cut_responses_alone_whatever_their_score() -> None:
    scores = torch.linspace(-2.0, 2.0, 8)
    game = scored_by(players("ppo", missing_eos_penalty=3.0), lambda samples: scores)
    rollout = game.score(game.sample(twice_each()))
    cut = ~rollout.ended
    assert cut[scores < 0].any() and cut[scores > 0].any() and not cut.all()
    assert rollout.scores is not None and torch.equal(rollout.scores, torch.where(cut, scores - 3.0, scores))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_sampling_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=rf"--temperature.*(greater than 0|a finite number), got {value}"):
        parser.parse(ppo.Config, ["--temperature", value], "ppo", "")
    for option in ("--do-sample", "--no-do-sample", "--greedy", "--top-k", "--top-p", "--repetition-penalty"):
        with pytest.raises(UserError, match=f"no option '{option}'"):
            parser.parse(ppo.Config, [option, "1"], "ppo", "")


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


@pytest.mark.parametrize(
    ("batch_size", "ranks", "parts", "message"),
    [
        (64, 3, 1, r"--batch-size 64: expected a multiple of 3 \(3 processes\); try 63"),
        (64, 1, 3, r"--batch-size 64: expected a multiple of 3 \(1 processes x --num-mini-batches 3\); try 63"),
        (64, 4, 3, r"--batch-size 64: expected a multiple of 12 \(4 processes x --num-mini-batches 3\); try 60"),
        (1, 2, 1, r"--batch-size 1: expected a multiple of 2 \(2 processes\); try 2"),
        (8, 8, 2, r"--batch-size 8: expected a multiple of 16 .*; try 16"),
        (64, 4, 16, ""),
        (64, 1, 64, ""),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_their_numbers(
    batch_size: int, ranks: int, parts: int, message: str
) -> None:
    if not message:
        checks.check_ranks(batch_size, ranks, "batch_size", parts, "num_mini_batches")
        return
    with pytest.raises(UserError, match=f"^{message}"):
        checks.check_ranks(batch_size, ranks, "batch_size", parts, "num_mini_batches")


@pytest.mark.parametrize(("ranks", "group"), [(1, 5), (2, 4), (1, 24)])
def test_groups_that_do_not_divide_are_refused(ranks: int, group: int) -> None:
    """12 responses; a rank has whole groups, or their mean would need the other ranks."""
    models = {"actor_model": "demo-llama", "reward_model": "demo-llama", "data_path": ("demo,rows=400",)}
    options = grpo.Config(algorithm="grpo", batch_size=12, num_generations=group, **models)
    wanted = rf"multiple of {ranks * group} \({ranks} processes x --num-generations {group}\)"
    with pytest.raises(UserError, match=f"^--batch-size 12: expected a {wanted}"):
        check(options, ranks=ranks)
