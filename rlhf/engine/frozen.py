"""Models that are only asked, the reference and learned reward models: whole on every device or in parts (ZeRO-3)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlhf.config.options import FrozenOptions
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import Shards, SynchronizedPasses, deepspeed_settings, gather_model, zero3_config
from rlhf.models.cpu import compiling


class FrozenEngine:
    """One model that no step changes. `inference()` is that of `rlhf.engine.training.Engine`.

    DeepSpeed holds a model without an optimizer at stage 0 or 3 only, so these are the stages there are.
    """

    def __init__(self, model: nn.Module, options: FrozenOptions, dtype: torch.dtype) -> None:
        self.device = collectives.local_device()
        self._options = options
        self._sharded: Any = None
        self.module: Any = model.requires_grad_(False).eval()
        if options.zero_stage == 3:
            import deepspeed

            config = deepspeed_settings(dtype) | {"zero_optimization": zero3_config(_kept(options))}
            engine, *_ = deepspeed.initialize(model=model.to(self.device), config=config)
            self.module, self._sharded = engine.module, engine.optimizer
        elif not options.offload:
            model.to(self.device)
        if options.torch_compile and options.zero_stage != 3:
            compiling.compile_layers(model)

    @contextlib.contextmanager
    def inference(self) -> Iterator[Any]:
        """The whole model on the device, without gradients; sharded weights are gathered once, or (`gather_whole`
        off) layer by layer in step with the other ranks."""
        with torch.no_grad(), self._at_hand():
            yield self.module

    @contextlib.contextmanager
    def _at_hand(self) -> Iterator[None]:
        if self._sharded is not None:
            with (
                SynchronizedPasses(self._sharded)
                if self._options.gather_whole is False
                else gather_model(self._sharded)
            ):
                yield
            return
        self.module.to(self.device)
        try:
            yield
        finally:
            if self._options.offload:
                self.module.to("cpu")


def shards_of(options: FrozenOptions, dtype: torch.dtype) -> Shards | None:
    """How such a model is loaded, None = whole."""
    return Shards(dtype, _kept(options)) if options.zero_stage == 3 else None


def _kept(options: FrozenOptions) -> dict[str, Any] | None:
    return {"device": "cpu"} if options.offload else None
