"""Copies of the weights in training: an average, which is often better than the last weights, and the best ones."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from rlhf.distributed import collectives
from rlhf.distributed.tensor_parallel import gather_full, local_part
from rlhf.distributed.zero3 import gather_weights
from rlhf.engine.training import Engine


class WeightsCopy:
    """A copy of an engine's trained weights, in fp32 whatever the engine computes in.

    Every rank has the copies of some weights, whole, under all ZeRO stages: 4 bytes per parameter over all ranks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copies = {name: weight.clone() for name, weight in self._own_weights()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The copies of this rank, by the name of the weight."""
        yield from self._copies.items()

    def load_tensors(self, saved: Iterable[tuple[str, Tensor]]) -> None:
        """Restore this rank's copies from those of all ranks."""
        for name, copy in saved:
            if name in self._copies:
                self._copies[name].copy_(copy)

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The engine's model with the copied weights on every rank; between steps, inside `inference()` or outside."""
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        before = _exchange(trained, self._copies)
        try:
            yield
        finally:
            _exchange(trained, before)

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, weight) in enumerate(self._engine.fp32_weights()):
            if i % collectives.world_size() == collectives.rank():
                yield name, weight


class BestWeights(WeightsCopy):
    """The weights of the best evaluation so far."""

    def update(self) -> None:
        """Copy the current weights. Every rank calls this together."""
        for name, weight in self._own_weights():
            self._copies[name].copy_(weight)

    def restore(self) -> None:
        """Set the engine's weights, not the moments of its optimizer. Every rank calls this together."""
        self._engine.load_tensors(self._weights_of_all_ranks())

    def _weights_of_all_ranks(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, weight) in enumerate(self._engine.fp32_weights()):
            value = self._copies[name].clone() if name in self._copies else torch.empty_like(weight)
            collectives.broadcast(value, i % collectives.world_size())
            yield f"weight:{name}", value


class EMA(WeightsCopy):
    """Exponential moving average of an engine's trained weights.

    average <- decay * average + (1 - decay) * weight      at each `update`, from the weights at the start
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        super().__init__(engine)
        self._decay = decay

    def update(self) -> None:
        """Update the average with the current weights. Every rank calls this together."""
        for name, weight in self._own_weights():
            self._copies[name].lerp_(weight, 1 - self._decay)


def _exchange(trained: list[tuple[str, nn.Parameter]], values: dict[str, Tensor]) -> dict[str, Tensor]:
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
