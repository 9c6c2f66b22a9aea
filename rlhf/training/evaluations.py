"""Evaluations on held-out rows during training: when they are due, the best model so far, and an early end."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlhf import console
from rlhf.types import Metrics


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """Evaluate after every `every`th step (0: none) and, with `at_end`, after the last of `total`.

    `done` steps are past. The first `unchanged` ones leave the evaluated model as it is, as those that train only the
    critic: their evaluations use up no patience. A step is an optimizer step, or an iteration of a stage with rollouts.
    """

    every: int
    total: int
    done: int = 0
    at_end: bool = True
    unchanged: int = 0

    def due(self, step: int) -> bool:
        if step == self.total:
            return self.at_end
        return self.every > 0 and step % self.every == 0


def with_evaluations(
    steps: Iterable[Metrics],
    schedule: EvaluationSchedule,
    evaluate: Callable[[int], Metrics],
    best: "Best | None" = None,
) -> Iterator[Metrics]:
    """The metrics of the steps that are left, with those of `evaluate(step)` where the schedule asks for it.

    The steps end early if `best` runs out of patience.
    """
    if best is not None and best.is_over:  # resumed after the evaluation that ended it
        return
    for step, metrics in enumerate(steps, start=schedule.done + 1):
        if not schedule.due(step):
            yield metrics
            continue
        evaluation = evaluate(step)
        if best is not None:
            best.update(step, evaluation, changed=step > schedule.unchanged)
        yield {**metrics, **evaluation}
        if best is not None and best.is_over and step != schedule.total:
            console.say(
                f"step {step} of {schedule.total} is the last: {best.name} has not "
                f"{'fallen below' if best.lower else 'risen above'} {best.value:.4g} for {best.waited} evaluations"
            )
            return


class Best:
    """Keeps the model with the best value of a held-out metric, and ends a run in which it has long not improved."""

    def __init__(
        self,
        name: str,
        patience: int | None,
        keep: Callable[[], None],
        lower: bool = False,
        admits: Callable[[Metrics], bool] = lambda _: True,
    ) -> None:
        """keep: keeps the model as it is now. lower: whether a lower value is better. admits: the evaluations of models
        that may be kept"""
        self.name, self.lower, self.waited, self.step = name, lower, 0, 0
        self.value = float("inf") if lower else float("-inf")
        self._patience, self._keep, self._admits = patience, keep, admits

    def update(self, step: int, evaluation: Metrics, changed: bool = True) -> None:
        """Compare a new evaluation with the best one, and keep the model if it is better and may be kept.

        changed: since its start
        """
        value = evaluation[self.name]
        self.waited += changed
        if (value < self.value if self.lower else value > self.value) and self._admits(evaluation):
            self.value, self.step, self.waited = value, step, 0
            self._keep()

    @property
    def is_over(self) -> bool:
        """Whether `patience` evaluations in a row were no better."""
        return self._patience is not None and self.waited >= self._patience

    def state_dict(self) -> dict[str, float]:
        """The best value, its step, and the number of evaluations since."""
        return {"value": self.value, "step": self.step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.step, self.waited = state["value"], int(state["step"]), int(state["waited"])
