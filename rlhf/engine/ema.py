"""An average of the weights of a policy during training, which is often better than its last weights."""

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

    Every rank has the averages of some weights, whole, under all ZeRO stages: 4 bytes per parameter over all ranks.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._average = {name: weight.clone() for name, weight in self._own_weights()}

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, weight) in enumerate(self._engine.fp32_weights()):
            if i % collectives.world_size() == collectives.rank():
                yield name, weight

    def update(self) -> None:
        """Update the average with the current weights. Every rank calls this together."""
        for name, weight in self._own_weights():
            self._average[name].lerp_(weight, 1 - self._decay)

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The engine's model with averaged weights on every rank; between steps, inside `inference()` or outside."""
        trained: list[tuple[str, Any]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        before = _exchange(trained, self._average)
        try:
            yield
        finally:
            _exchange(trained, before)

    def size(self) -> int:
        """Bytes of the averages of all ranks."""
        return self._engine.size() // 3

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The averages of this rank, by the name of the weight."""
        yield from self._average.items()

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        """Restore this rank's averages from those of all ranks."""
        for name, average in saved:
            if name in self._average:
                self._average[name].copy_(average)


def _exchange(trained: list[tuple[str, Any]], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set every weight from the `values`, fp32, of the rank that has it; returns the old values of this rank's
    weights."""
    before = {}
    for i, (name, parameter) in enumerate(trained):
        with gather_weights([parameter], changed=True):
            value, current = values.get(name), gather_full(parameter, parameter.detach())
            if i % collectives.world_size() == collectives.rank():
                before[name] = current.float().clone()
            if value is None:
                value = torch.empty(current.shape, device=parameter.device)
            collectives.broadcast(value, i % collectives.world_size())
            parameter.data.copy_(local_part(parameter, value))
    return before
