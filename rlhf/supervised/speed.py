"""The speed of training: tokens per second, and the share of the devices' peak."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rlhf.distributed import collectives
from rlhf.plan.cost import forward_flops, training_passes
from rlhf.plan.forecast import ModelSpec
from rlhf.plan.machine import known_gpu
from rlhf.plan.sizes import Size
from rlhf.types import Metrics


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The operations of a model in training, and what the devices can do."""

    size: Size
    row: float
    """tokens of a row, of the row that a mean token is in"""
    passes: float
    """operations of training in forward passes: 3, or 2 where an adapter freezes the weights. What gradient
    checkpointing computes again does not count"""
    peak: float
    """operations per second of all devices together"""

    def share(self, tokens: float, learned: float, seconds: float) -> float:
        """The model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) of a step on `tokens`, of which the loss of
        `learned` needs the head of a language model."""
        rows = tokens / self.row
        flops = self.passes * forward_flops(self.size, rows, self.row, learned / max(1.0, rows))
        return flops / (self.peak * seconds)


def arithmetic(spec: ModelSpec, dtype: torch.dtype, row: float) -> Arithmetic | None:
    """Of the trained model `spec` on the devices of this run; None if their peak is not known, as that of a CPU."""
    gpu = known_gpu()
    if gpu is None:
        return None
    peak = collectives.world_size() * gpu.peak(dtype.itemsize)
    return Arithmetic(spec.size(), row, training_passes(spec), peak)


class Speed:
    """Adds `tokens_per_second` and, where the peak is known, `share_of_peak` to the metrics of each step.

    A step's time begins when it is asked for: evaluations and checkpoints between steps do not count.
    """

    def __init__(self, arithmetic: Arithmetic | None) -> None:
        self._arithmetic = arithmetic
        self._tokens = self._learned = self._seconds = 0.0

    def observe(self, steps: Iterable[Metrics]) -> Iterator[Metrics]:
        """The metrics of each step, which have `tokens` of all ranks, and of a language model `tokens_learned`."""
        start = time.monotonic()
        for metrics in steps:
            seconds = max(time.monotonic() - start, 1e-9)
            tokens, learned = metrics["tokens"], metrics.get("tokens_learned", 0.0)
            self._tokens, self._learned = self._tokens + tokens, self._learned + learned
            self._seconds += seconds
            yield {**metrics, **self._numbers(tokens, learned, seconds)}
            start = time.monotonic()

    def summary(self) -> Metrics:
        """The same numbers of all steps of this process together; empty if there was none."""
        return self._numbers(self._tokens, self._learned, self._seconds) if self._seconds else {}

    def _numbers(self, tokens: float, learned: float, seconds: float) -> Metrics:
        numbers = {"tokens_per_second": tokens / seconds}
        if self._arithmetic is not None:
            numbers["share_of_peak"] = self._arithmetic.share(tokens, learned, seconds)
        return numbers
