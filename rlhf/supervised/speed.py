"""The speed of training, in tokens per second."""

import time
from collections.abc import Iterable, Iterator

from rlhf.types import Metrics


class Speed:
    """Adds `tokens_per_second` to the metrics of each step.

    A step's time begins when it is asked for: evaluations and checkpoints between steps do not count.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, steps: Iterable[Metrics]) -> Iterator[Metrics]:
        """The metrics of each step, which have `tokens` of all ranks."""
        start = time.monotonic()
        for metrics in steps:
            seconds = max(time.monotonic() - start, 1e-9)
            self._tokens, self._seconds = self._tokens + metrics["tokens"], self._seconds + seconds
            yield {**metrics, "tokens_per_second": metrics["tokens"] / seconds}
            start = time.monotonic()

    def summary(self) -> Metrics:
        """The same of all steps of this process together; empty if there was none."""
        return {"tokens_per_second": self._tokens / self._seconds} if self._seconds else {}
