"""Scores before an algorithm sees them: against the plain statistics of all scores so far."""

import json
from typing import Any
from unittest import mock

import pytest
import torch

from step3_ppo.config import Step3Config
from step3_ppo.rollout import ScoreScaling
from tests.support import tiny
from tests.support.players import count_of_words, on_course, players, scored_by

BATCHES = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 3 + torch.arange(5)[:, None] - 7


@pytest.mark.parametrize("centred", [False, True])
def test_scores_over_the_deviation_of_all_so_far(centred: bool) -> None:
    scale = ScoreScaling(Step3Config(use_score_scaling=True, use_score_norm=centred))
    for i, scores in enumerate(BATCHES):
        so_far = BATCHES[: i + 1].double()
        expected = (scores.double() - (so_far.mean() if centred else 0)) / so_far.std(correction=0)
        torch.testing.assert_close(scale(scores).double(), expected, rtol=0, atol=1e-5)


def test_a_far_mean_and_a_small_deviation_do_not_cancel() -> None:
    scores = 1e4 + BATCHES[0].double() / 100
    scaled = ScoreScaling(Step3Config(use_score_scaling=True, use_score_norm=True))(scores)
    torch.testing.assert_close(scaled, (scores - scores.mean()) / scores.std(correction=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [3.0, 0.1, 0.7, 3.3333, -1e4])
def test_equal_scores_stay_as_they_are(value: float) -> None:
    """Of their variance only rounding is left, which must not be divided by."""
    scale, scores = ScoreScaling(Step3Config(use_score_scaling=True)), torch.full((7,), value)
    assert all(torch.equal(scale(scores), scores) for _ in range(40))


def test_clipped_after_scaling_and_without_it() -> None:
    scores = torch.tensor([-30.0, -1.0, 0.0, 1.0, 30.0])
    assert ScoreScaling(Step3Config(score_clip=2.0))(scores).tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]
    scaled = ScoreScaling(Step3Config(use_score_scaling=True, score_clip=1.0))(scores)
    assert scaled[0] == -1 and scaled[4] == 1 and scaled[1] == pytest.approx(-1 / 18.98947, abs=1e-4)
    assert ScoreScaling(Step3Config())(scores) is scores


@pytest.mark.parametrize("options", [{"score_clip": 1.5}, {"use_score_scaling": True, "use_score_norm": True}])
def test_the_algorithm_sees_scores_as_they_are_scaled(options: dict[str, Any]) -> None:
    """In the loop of step 3: credit is of clipped and scaled scores, and not of the first ones."""
    with tiny.one_rank():
        game = players("rloo", total_episodes=8, kl_coef=0.0, **options)
        with mock.patch.object(game.algorithm, "credit", wraps=game.algorithm.credit) as credit:
            (metrics,) = on_course(scored_by(game, count_of_words))
        rollout, _ = credit.call_args.args
        scaled, raw = rollout.scores, rollout.source_scores[:, 0]
        assert not torch.equal(raw, scaled) and torch.equal(scaled, ScoreScaling(game.config)(raw))
    assert metrics["shaped_score"] == pytest.approx(scaled.double().mean().item())
    assert metrics["score"] == metrics["score_mine"] == pytest.approx(raw.double().mean().item())


def test_the_state_goes_through_json() -> None:
    options = Step3Config(use_score_scaling=True, use_score_norm=True)
    one, other = ScoreScaling(options), ScoreScaling(options)
    for scores in BATCHES[:3]:
        one(scores)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert torch.equal(one(BATCHES[3]), other(BATCHES[3]))
