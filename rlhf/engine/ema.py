"""An average of the weights a policy went through, which is often better than the last of them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.distributed import collectives
from rlhf.distributed.tensor_parallel import gather_full, local_part
from rlhf.distributed.zero3 import gather_weights
from rlhf.engine.training import Engine


class EMA:
    """Exponential moving average of an engine's trained weights, in fp32 whatever the engine computes in.

        average <- decay * average + (1 - decay) * weight      at each `update`, from the weights at the start

    Every rank keeps the average of some of the weights, whole, under all ZeRO stages: together 4 bytes a weight.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._average = {name: weight.clone() for name, weight in self._mine()}

    def _mine(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, weight) in enumerate(self._engine.fp32_weights()):
            if i % collectives.world_size() == collectives.rank():
                yield name, weight

    def update(self) -> None:
        """Take the weights of this moment in. Every rank calls this together."""
        for name, weight in self._mine():
            self._average[name].lerp_(weight, 1 - self._decay)

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The engine's model with averaged weights, on every rank; between steps, inside of `inference()` or not."""
        trained: list[tuple[str, Any]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        last = _exchanged(trained, self._average)
        try:
            yield
        finally:
            _exchanged(trained, last)

    def size(self) -> int:
        """Bytes of the averages that all ranks keep."""
        return self._engine.size() // 3

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The averages that this rank keeps, by the weight's name."""
        yield from self._average.items()

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        """Go on from the averages of all ranks, of which this one takes its own."""
        for name, average in saved:
            if name in self._average:
                self._average[name].copy_(average)


def _exchanged(trained: list[tuple[str, Any]], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set every weight on every rank from the `values`, fp32, of the rank that keeps it; gives what it had there."""
    before = {}
    for i, (name, parameter) in enumerate(trained):
        with gather_weights([parameter], changed=True):
            value, held = values.get(name), gather_full(parameter, parameter.detach())
            if i % collectives.world_size() == collectives.rank():
                before[name] = held.float().clone()
            if value is None:
                value = torch.empty(held.shape, device=parameter.device)
            collectives.broadcast(value, i % collectives.world_size())
            parameter.data.copy_(local_part(parameter, value))
    return before
