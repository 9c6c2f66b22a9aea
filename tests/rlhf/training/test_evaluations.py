"""Evaluations between steps: when they are due, what is kept as the best, and when patience ends a run."""

import json

import pytest

from rlhf.training.evaluations import Best, EvaluationSchedule, with_evaluations
from rlhf.types import Metrics


@pytest.mark.parametrize(("every", "at"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_every_so_many_iterations_and_the_last_have_held_out_numbers(every: int, at: list[int]) -> None:
    looks: list[int] = []

    def evaluate(iteration: int) -> Metrics:
        looks.append(iteration)
        return {"eval_score": float(iteration)}

    rows = list(with_evaluations(({"score": float(i)} for i in range(1, 6)), EvaluationSchedule(every, 5), evaluate))
    assert [row["score"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert looks == at
    assert [row["eval_score"] for row in rows if "eval_score" in row] == at


def test_a_run_that_was_stopped_goes_on_with_its_looks_and_its_patience() -> None:
    values = {3: 0.5, 4: 0.2, 6: 0.1, 7: 0.1}
    saves: list[int] = []
    first = Best("eval_score", 2, lambda: saves.append(3))
    list(
        with_evaluations(
            [{}, {}, {}], EvaluationSchedule(2, 9, done=1), lambda at: {"eval_score": values.get(at, 0.4)}, first
        )
    )
    assert first.state_dict() == {"value": 0.4, "step": 2, "waited": 1} and saves == [3]
    again = Best("eval_score", 2, lambda: saves.append(6))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rows = list(
        with_evaluations([{}] * 5, EvaluationSchedule(3, 9, done=4), lambda at: {"eval_score": values[at]}, again)
    )
    assert rows == [{}, {"eval_score": 0.1}] and again.is_over and saves == [3]
    assert list(with_evaluations([{}], EvaluationSchedule(3, 9, done=6), lambda at: {"eval_score": 1.0}, again)) == []
    last = Best("eval_score", 1, lambda: None)
    last.load_state_dict({"value": 1.0, "step": 0, "waited": 0})
    assert len(list(with_evaluations([{}], EvaluationSchedule(0, 1), lambda at: {"eval_score": 0.0}, last))) == 1


def test_evaluations_of_a_model_that_has_not_changed_use_up_no_patience() -> None:
    """As during the warm-up of the critic: the held-out responses are the same each time."""
    saves: list[int] = []
    best = Best("eval_score", 2, lambda: saves.append(1))
    schedule = EvaluationSchedule(1, 9, unchanged=4)
    assert len(list(with_evaluations([{}] * 9, schedule, lambda step: {"eval_score": 0.5}, best))) == 6
    assert saves == [1] and best.is_over


@pytest.mark.parametrize(
    ("patience", "bests", "iterations"),
    [(None, [0.1, 0.4, 0.5], 8), (1, [0.1, 0.4], 3), (2, [0.1, 0.4], 4), (3, [0.1, 0.4, 0.5], 8)],
)
def test_the_best_is_kept_and_patience_ends(patience: int | None, bests: list[float], iterations: int) -> None:
    values = [0.1, 0.4, 0.4, 0.3, 0.5, 0.2, 0.5, 0.1]
    saves: list[float] = []
    now = 0.0

    def evaluate(iteration: int) -> Metrics:
        nonlocal now
        now = values[iteration - 1]
        return {"eval_score": now}

    best = Best("eval_score", patience, lambda: saves.append(now))
    rows = list(with_evaluations(({"score": 0.0} for _ in values), EvaluationSchedule(1, len(values)), evaluate, best))
    assert len(rows) == iterations
    assert saves == bests


def test_a_loss_is_best_when_it_is_low_and_the_last_step_may_be_left_out() -> None:
    values = {2: 0.4, 4: 0.5, 6: 0.3, 7: 0.2}
    for at_end, value, step in ((True, 0.2, 7), (False, 0.3, 6)):
        saves: list[int] = []
        best = Best("eval_loss", 2, lambda saves=saves: saves.append(len(saves)), lower=True)
        schedule = EvaluationSchedule(2, 7, at_end=at_end)
        rows = list(with_evaluations([{}] * 7, schedule, lambda at: {"eval_loss": values[at]}, best))
        assert len(rows) == 7 and (best.value, best.step, best.waited) == (value, step, 0)
        assert len(saves) == 2 + at_end
