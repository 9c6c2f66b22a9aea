"""Numbers of a rollout that are not finite: nobody learns from it, it is named and counted, too many end the run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import plugins
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.types import Samples, ScoredRollout
from step3_ppo import stage
from step3_ppo.rollout import nonfinite
from tests.support import tiny
from tests.support.players import Players, count_of_words, on_course, players, prompts_to_train_on, scored_by

pytestmark = pytest.mark.usefixtures("ranks")


def bad_at(*iterations: int) -> Callable[[Samples], Tensor]:
    """A source one of whose scores is NaN in these iterations."""
    calls = iter(range(1, 100))

    def score(samples: Samples) -> Tensor:
        scores = count_of_words(samples)
        if next(calls) in iterations:
            scores[3] = torch.nan
        return scores

    return score


def iterations(game: Players) -> Iterator[dict[str, float]]:
    return on_course(game)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_nothing_is_learned_from_a_bad_score(capsys: pytest.CaptureFixture[str]) -> None:
    game = scored_by(players("ppo", total_episodes=24), bad_at(2))
    steps = iterations(game)
    assert "policy_loss" in next(steps)
    before = game.weights()
    assert next(steps) == {"skipped_iteration": 1.0}
    assert equal(before, game.weights())
    output = capsys.readouterr().out
    assert "warning, iteration 2: score is nan, score of mine is nan (training rows " in output
    assert "skipped, nothing was learned from it (1 of 5 in a row)" in output
    assert "policy_loss" in next(steps) and not equal(before, game.weights())


def test_the_row_that_is_named_is_the_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of an iteration are drawn at random; the fourth of them is to blame."""
    game = scored_by(players("ppo", total_episodes=8), bad_at(1))
    drawn: list[tuple[Any, ...]] = []
    spied = replace(game.scorer, sources=spy(game.scorer.sources, drawn))
    next(iterations(replace(game, scorer=spied)))
    (row,) = [i for i, prompt in enumerate(prompts_to_train_on()) if prompt.row == drawn[0][3]]
    assert f"(training rows {row})" in capsys.readouterr().out


def spy(sources: Any, drawn: list[Any]) -> Any:
    class Spied:
        names = sources.names

        def __call__(self, samples: Samples) -> Any:
            drawn.append(samples.rollout.rows)
            return sources(samples)

    return Spied()


def test_enough_in_a_row_end_the_run() -> None:
    game = scored_by(players("rloo", total_episodes=80, max_bad_steps=2), bad_at(1, 3, 4))
    steps = iterations(game)
    assert "skipped_iteration" in next(steps) and "policy_loss" in next(steps) and "skipped_iteration" in next(steps)
    with pytest.raises(NonFiniteError, match=r"iteration 4: score is nan, .*, 2 times in a row;"):
        next(steps)


def scored(game: Players) -> ScoredRollout:
    return game.score(game.sample(tiny.prompts([3, 9, 8, 4])))


@pytest.mark.parametrize("name", ["sampled_logprobs", "logprobs", "ref_logprobs", "values"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_every_number_of_a_rollout_is_looked_at(name: str, value: float) -> None:
    rollout = scored(players("ppo"))
    assert nonfinite(rollout, {}) == {}
    tensor = getattr(rollout, name).clone()
    tensor[2, 0] = value
    assert nonfinite(replace(rollout, **{name: tensor}), {}) == {f"{name} is {value}": [2]}
    padded = tensor.clone()
    padded[2, 0] = 0.0
    assert nonfinite(replace(rollout, **{name: padded.masked_fill(~rollout.mask, value)}), {}) == {}  # off the mask


def test_a_source_that_counts_for_nothing_stops_nothing() -> None:
    rollout = scored(players("ppo"))
    nan = torch.full((4,), torch.nan)
    assert nonfinite(rollout, {"logged": nan}) == {}
    bad = rollout.scores.clone()
    bad[1] = torch.inf
    assert nonfinite(replace(rollout, scores=bad), {"mine": bad}) == {"score is inf": [1], "score of mine is inf": [1]}


def test_logits_of_nan_are_found_after_sampling() -> None:
    """Sampling goes on with any token, on every rank alike, and the log-prob tells."""
    game = players("ppo")
    game.actor.module.lm.model.norm.register_forward_hook(lambda norm, inputs, states: states * torch.nan)
    bad_rows = nonfinite(scored(game), {})
    assert bad_rows["sampled_logprobs is nan"] == bad_rows["logprobs is nan"] == [0, 1, 2, 3]


def test_an_algorithm_that_selects_names_the_rows_it_learned_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the chosen responses one has a loss of NaN, the one to the prompt that is named."""
    game = players("best_of_n", total_episodes=8, num_mini_batches=1, num_ppo_epochs=1, micro_batch_size=1)
    game = replace(game, config=game.config.model_copy(update={"output_dir": str(tmp_path)}))
    (tmp_path / "step3_ppo").mkdir()
    right, blamed = game.algorithm.policy_loss, []

    def policy_loss(logprobs: Tensor, rollout: ScoredRollout, *args: Any) -> Any:
        loss, metrics = right(logprobs, rollout, *args)
        if not blamed:
            blamed.append(rollout.rows[0])
        return (loss * torch.nan if rollout.rows[0] == blamed[0] else loss), metrics

    monkeypatch.setattr(game.algorithm, "policy_loss", policy_loss)
    next(iterations(game))
    (row,) = [i for i, prompt in enumerate(prompts_to_train_on()) if prompt.row == blamed[0]]
    assert f"loss is nan (training rows {row});" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompts", "episodes", "said"),
    [(100, 192, True), (100, 128, False), (96, 640, False)],  # a whole pass; less than one; nothing is left
)
def test_prompts_that_a_pass_leaves_out_are_named(
    prompts: int, episodes: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = plugins.find("step3_ppo.algorithms", "rloo").Config
    stage.describe_left_out(prompts, options(batch_size=64, num_generations=2, total_episodes=episodes))
    line = (
        "step3_ppo: each pass over the 100 prompts skips 4, different ones each time, because an iteration takes 32\n"
    )
    assert capsys.readouterr().out == line * said
