"""Frozen models, the reference and learned reward models: whole on every device, or sharded (ZeRO-3)."""

import contextlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rlhf import kernels
from rlhf.config import Tree
from rlhf.config.options import FrozenOptions
from rlhf.distributed import collectives
from rlhf.distributed.zero3 import Shards, SynchronizedPasses, deepspeed_settings, gather_model, zero3_config
from rlhf.models.policy import generator
from rlhf.models.trunk import prepare_inference

M = TypeVar("M", bound=nn.Module)


class FrozenEngine(Generic[M]):
    """One model that is not trained. `inference()` is as in `rlhf.engine.training.Engine`.

    DeepSpeed supports a model without an optimizer only at stage 0 or 3.
    """

    def __init__(self, model: M, options: FrozenOptions, dtype: torch.dtype) -> None:
        self.device = collectives.local_device()
        self._options = options
        self._sharded: Any = None
        self.module: M = model.requires_grad_(False).eval()
        if options.zero_stage == 3:
            import deepspeed

            config = deepspeed_settings(dtype) | {"zero_optimization": zero3_config(_offload_device(options))}
            engine, *_ = deepspeed.initialize(model=model.to(self.device), config=config)
            self.module, self._sharded = engine.module, engine.optimizer
        elif not options.offload:
            model.to(self.device)
        if options.torch_compile and options.zero_stage != 3:
            kernels.compile_layers(model)

    @contextlib.contextmanager
    def inference(self) -> Iterator[M]:
        """The whole model on the device, without gradients; sharded weights are gathered once, or (`gather_whole`
        off) layer by layer in step with the other ranks."""
        prepare_inference(self.module)
        with torch.no_grad(), self._on_device():
            yield self.module

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._sharded is not None:
            with (
                SynchronizedPasses(self._sharded, generator(self.module))
                if self._options.gather_whole is False
                else gather_model(self._sharded)
            ):
                yield
            return
        if not self._options.offload:  # it is on the device
            yield
            return
        self.module.to(self.device)
        try:
            yield
        finally:
            self.module.to("cpu")


def shards_of(options: FrozenOptions, dtype: torch.dtype) -> Shards | None:
    """How a frozen model is sharded while it is loaded; None = whole."""
    return Shards(dtype, _offload_device(options)) if options.zero_stage == 3 else None


def _offload_device(options: FrozenOptions) -> Tree | None:
    return {"device": "cpu"} if options.offload else None
