"""An average of the weights a policy went through, which is often better than the last of them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlhf import dist
from rlhf.engine import Engine


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
            if i % dist.world_size() == dist.rank():
                yield name, weight

    def update(self) -> None:
        """Take the weights of this moment in. Every rank calls this together."""
        for name, weight in self._mine():
            self._average[name].lerp_(weight, 1 - self._decay)

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The model of `Engine.inference()` with averaged weights, on every rank."""
        trained: list[tuple[str, Any]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        last = [parameter.detach().clone() for _, parameter in trained]
        for i, (name, parameter) in enumerate(trained):
            average = self._average.get(name)
            if average is None:
                average = torch.empty(parameter.shape, device=parameter.device)
            dist.broadcast(average, i % dist.world_size())
            parameter.data.copy_(average)
        try:
            yield
        finally:
            for (_, parameter), value in zip(trained, last, strict=True):
                parameter.data.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages that this rank keeps, by the weight's name."""
        return self._average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert set(state) == set(self._average), "an average of other weights, or of another number of ranks"
        for name, average in state.items():
            self._average[name].copy_(average)
