"""Responses to which a reward function does not apply: they teach nothing, and change no number of the others."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf import rewards
from rlhf.rewards import NO_SCORE, Sources, WeightedSource
from rlhf.types import Samples, ScoredRollout
from step3_ppo.heldout import compare, gather_evaluation, nonfinite_scores, write_rollout
from step3_ppo.metrics import rollout_metrics
from step3_ppo.rollout import score
from tests.rlhf.rewards import responses
from tests.step3_ppo.test_metrics import by_hand
from tests.support import tiny
from tests.support.players import Players, first, on_stage, players, scored_by, twice_each

pytestmark = pytest.mark.usefixtures("ranks")
GIVEN = torch.tensor([1.0, 2.0, NO_SCORE, 6.0, 4.0, 4.5, NO_SCORE, NO_SCORE])


def scored(game: Players, given: Tensor, group: int) -> ScoredRollout:
    game = scored_by(game, lambda _: given)
    return score(game.sample(twice_each()), game.actor, game.critic, game.scorer, group)


def test_a_missing_score_leaves_the_baseline_of_its_group_as_it_is() -> None:
    """Groups of four by hand: of the first the mean is 3, of the second 4.25."""
    game = players("grpo", num_generations=4)
    rollout = scored(game, GIVEN, 4)
    assert rollout.scores.tolist() == [1.0, 2.0, 3.0, 6.0, 4.0, 4.5, 4.25, 4.25]
    assert torch.equal(rollout.source_scores[:, 0], GIVEN)
    advantages = game.algorithm.credit(rollout, first(game.algorithm)).advantages
    assert advantages[GIVEN == NO_SCORE].abs().max() == 0 and advantages[0, 0] < 0 < advantages[3, 0]


def test_a_group_without_any_has_the_mean_of_all() -> None:
    rollout = scored(players("rloo"), GIVEN, 2)
    assert rollout.scores.tolist() == [1.0, 2.0, 6.0, 6.0, 4.0, 4.5, 3.5, 3.5]  # (1 + 2 + 6 + 4 + 4.5) / 5
    assert scored(players("rloo"), torch.full((8,), NO_SCORE), 2).scores.tolist() == [0.0] * 8


def test_the_algorithm_gets_normalized_scores_and_the_metrics_plain_ones() -> None:
    given = torch.tensor([0.0, 100.0, 3.0, 5.0, 1.0, 1.0, 2.0, 4.0])
    game = scored_by(players("rloo", num_generations=2, reward_combine="normalized"), lambda _: given)
    learner = on_stage(game)
    rollout = learner.score(game.sample(twice_each()))
    half = 0.5**0.5
    assert rollout.scores.tolist() == given.tolist()
    expected = [-half, half, -half, half, 0, 0, -half, half]
    assert learner.shape(rollout).scores.tolist() == pytest.approx(expected, abs=1e-4)


def test_metrics_of_a_source_are_of_the_responses_to_which_it_applies() -> None:
    rollout = by_hand()
    by_source = {"some": torch.tensor([NO_SCORE, 2.0, 6.0]), "none": torch.full((3,), NO_SCORE)}
    metrics = rollout_metrics(rollout, by_source)
    assert (metrics["score_some"], metrics["score_some_std"], metrics["unscored"]) == (4.0, 2.0, pytest.approx(1 / 3))
    without = rollout_metrics(rollout, {"all": torch.tensor([1.0, 2.0, 6.0])})
    assert without["score_all"] == 3.0 and "unscored" not in without
    others = {name: value for name, value in metrics.items() if "some" not in name and "none" not in name}
    assert others.items() - {("unscored", metrics["unscored"])} <= without.items()


def test_held_out_numbers_of_a_source_are_of_those_too() -> None:
    by_source = {"some": torch.tensor([NO_SCORE, 2.0, 6.0]), "all": torch.tensor([1.0, 2.0, 6.0])}
    evaluation = gather_evaluation(by_hand(), None, tiny.tokenizer(), by_source)
    assert nonfinite_scores(evaluation) is None
    assert compare(evaluation, evaluation)["eval_score_some"] == 4.0


def test_an_exported_rollout_has_null(tmp_path: Path) -> None:
    game = players("rloo")
    rollout = scored(game, GIVEN, 2)
    samples = Samples(("p",) * 8, ("r",) * 8, rollout, ())
    write_rollout(tmp_path / "rollouts.jsonl", 1, rollout, ("mine",), samples)
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["mine"] for row in rows] == [1.0, 2.0, None, 6.0, 4.0, 4.5, None, None]


def test_a_model_whose_score_overflows_has_not_left_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf of a reward model is a number that is not finite, for which nothing is learned."""
    samples = responses.samples(responses.rollout())
    monkeypatch.setattr("rlhf.rewards.learned.build", lambda *_: lambda _: torch.tensor([1.0, NO_SCORE, 2.0]))
    scores = rewards.open_unchecked("learned", responses.context(tmp_path))(samples)
    assert scores.isnan().tolist() == [False, True, False]
    both, _ = Sources((WeightedSource("a", 1.0, lambda _: scores),))(samples)
    assert both.isnan().tolist() == [False, True, False]
