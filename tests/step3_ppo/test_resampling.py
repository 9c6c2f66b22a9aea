"""Prompts to which all responses score alike give their places to others, the same on one and on two ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.types import Samples, ScoredRollout
from step3_ppo.algorithms import Iteration
from step3_ppo.metrics import group_metrics
from step3_ppo.resampling import resample
from tests.step3_ppo.test_metrics import on_two_ranks
from tests.support.players import on_course, on_stage, players, prompts_to_train_on, scored_by

pytestmark = pytest.mark.usefixtures("ranks")
PROMPTS: Any = prompts_to_train_on()
TEXTS = [prompt.row.prompt[-1].content for prompt in PROMPTS]


def live_where(live: set[int]) -> Callable[[Samples], Tensor]:
    """Responses to the prompts with these numbers score by their place in the group; all others score 1."""

    def source(samples: Samples) -> Tensor:
        numbers = [TEXTS.index(row.prompt[-1].content) for row in samples.rollout.rows]
        return torch.tensor([float(n in live) * (i % 2) + 1.0 for i, n in enumerate(numbers)])

    return source


def drawn(live: set[int], indices: list[int], **options: Any) -> tuple[Iteration, ScoredRollout, ScoredRollout]:
    """The iteration and the rollout after resampling, and the rollout before it."""
    game = scored_by(players("rloo", num_generations=2, **options), live_where(live))
    learner = on_stage(game)
    iteration = Iteration(3, [i for i in indices for _ in range(2)])
    before = learner.score(learner.sample(PROMPTS, iteration.indices, 3))
    return *resample(learner, PROMPTS, iteration, before), before


def test_a_dead_group_gives_its_place_to_a_prompt_that_the_iteration_does_not_have() -> None:
    iteration, after, before = drawn({0, 2, 4, 5, 6, 7}, [0, 1, 2, 3], resample_groups=1)
    groups = iteration.indices[::2]
    assert groups[0] == 0 and groups[2] == 2 and {groups[1], groups[3]} < {4, 5, 6, 7} and len({*groups}) == 4
    assert iteration.indices == [i for i in groups for _ in range(2)] and iteration.resampled == 2
    assert [TEXTS.index(row.prompt[-1].content) for row in after.rows] == iteration.indices
    assert (
        group_metrics(before.scores, 2)["equal_groups"] == 0.5 and group_metrics(after.scores, 2)["equal_groups"] == 0
    )
    for i in (0, 1, 4, 5):  # the others are the same responses, with the same numbers
        assert after.response_tokens()[i] == before.response_tokens()[i]
        size = len(after.response_tokens()[i])
        for name in ("logprobs", "ref_logprobs", "sampled_logprobs"):
            assert torch.equal(getattr(after, name)[i, :size], getattr(before, name)[i, :size]), name


def test_the_new_responses_are_those_that_the_iteration_would_have_sampled() -> None:
    """As if the prompts had been in the batch from the start: their numbers are those of the training pass."""
    iteration, after, _ = drawn({0, 2, 4, 5, 6, 7}, [0, 1, 2, 3], resample_groups=1)
    _, whole, _ = drawn({*range(8)}, iteration.indices[::2], resample_groups=1)
    assert after.response_tokens() == whole.response_tokens()
    assert torch.equal(after.scores, whole.scores)
    torch.testing.assert_close(after.logprobs, whole.trimmed().logprobs)


def test_it_ends_after_so_many_draws_or_without_prompts() -> None:
    once, several = (drawn({0}, [0, 1, 2, 3], resample_groups=n)[0] for n in (1, 5))
    assert once.resampled == 3 and several.resampled == 4  # eight prompts, of which four are in the iteration
    iteration, after, before = drawn({0}, [0, 1, 2, 3], resample_groups=0)
    assert after is before and iteration.resampled == 0
    assert drawn({*range(8)}, [0, 1, 2, 3], resample_groups=2)[0].resampled == 0
    learner = on_stage(players("ppo", resample_groups=2))  # responses without a group are no equal ones
    alone = Iteration(3, [0, 1, 2, 3])
    before = learner.score(learner.sample(PROMPTS, alone.indices, 3))
    assert resample(learner, PROMPTS, alone, before) == (alone, before)


def test_an_iteration_learns_from_the_prompts_that_it_drew() -> None:
    game = players("grpo", num_generations=2, batch_size=8, total_episodes=16, resample_groups=2)
    for metrics in on_course(scored_by(game, live_where({1, 3, 5, 7}))):
        assert metrics["resampled_groups"] > 0 == metrics["equal_groups"]
        assert metrics["seconds_generate"] > 0
    plain = replace(game, config=game.config.model_copy(update={"resample_groups": 0}))
    assert all("resampled_groups" not in metrics for metrics in on_course(plain))


def test_group_metrics_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups (1, 1), (0, 4), (2, 3), of deviations 0, 2 and 0.5, on one rank and on two."""
    scores = torch.tensor([1.0, 1.0, 0.0, 4.0, 2.0, 3.0])
    expected = {"equal_groups": pytest.approx(1 / 3), "group_score_std": pytest.approx(2.5 / 3)}
    assert group_metrics(scores, 2) == expected and group_metrics(scores, 1) == {}
    halves = (scores[:2], scores[2:])
    assert on_two_ranks(lambda rank: group_metrics(halves[rank], 2), monkeypatch) == [expected, expected]
