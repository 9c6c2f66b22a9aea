"""Ends a run whose policy has moved too far from the reference to recover."""

from collections.abc import Iterable, Iterator

from rlhf.engine.nonfinite import NonFiniteError
from rlhf.types import Metrics


class RunawayError(NonFiniteError):
    """Training cannot recover, so the run ends."""


class KLGuard:
    """Ends a run once `kl`, nats per response, was above `limit` in `in_a_row` iterations in a row; no limit: never.

    `kl` is the same on every rank, so all ranks end together. A skipped iteration has no `kl` and is not counted.
    """

    def __init__(self, limit: float | None, in_a_row: int, closer: str = "raise --kl-coef") -> None:
        """closer: the advice of `KLController`"""
        self._closer = closer
        self._limit, self._in_a_row, self._count, self._kl = limit, in_a_row, 0, 0.0

    def guarded(self, steps: Iterable[Metrics], done: int = 0) -> Iterator[Metrics]:
        """Yield the iterations after `done`, including the one that ends the run. A run that has been ended stays so
        when it resumes, unless the limit is higher by then.

        Raises: RunawayError, naming the iteration.
        """
        self._require_below_limit(done)
        for iteration, metrics in enumerate(steps, start=done + 1):
            if self._limit is not None and "kl" in metrics:
                self._kl = metrics["kl"]
                self._count = self._count + 1 if self._kl > self._limit else 0
            yield metrics
            self._require_below_limit(iteration)

    def _require_below_limit(self, iteration: int) -> None:
        if self._limit is not None and self._count >= self._in_a_row and self._kl > self._limit:
            times = f" for {self._in_a_row} iterations" if self._in_a_row > 1 else ""
            problem = f"kl is {self._kl:.4g} nats per response, above --abort-kl {self._limit:g}{times}"
            advice = f"lower --learning-rate, {self._closer}, or set --target-kl; a higher --abort-kl resumes from here"
            raise RunawayError(f"iteration {iteration}: {problem}; {advice}")

    def state_dict(self) -> dict[str, float]:
        """Iterations in a row above the limit, and the last KL."""
        return {"count": self._count, "kl": self._kl}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._count, self._kl = int(state["count"]), state["kl"]
