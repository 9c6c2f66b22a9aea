"""Models whose weights lie in parts on the ranks (ZeRO-3): built so, read whole, and run whole or layer by layer."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.distributed import collectives
from rlhf.types import Sequences


def zero3(offload: dict[str, Any] | None) -> dict[str, Any]:
    """DeepSpeed's section for ZeRO-3. offload: where the parts are kept between uses, None = on the device.

    Without the threshold of 0 small weights stay whole, and in tests all of them.
    """
    kept = {} if offload is None else {"offload_param": offload}
    return {"stage": 3, "stage3_param_persistence_threshold": 0, **kept}


@dataclass(frozen=True, slots=True)
class Shards:
    """How a model is built of which no rank ever holds all weights."""

    dtype: torch.dtype
    offload: dict[str, Any] | None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, `from_pretrained` of transformers leaves each rank its part of every weight it reads.

        Random numbers are as if nothing had been drawn, as they are where a model is read whole.
        """
        from transformers.integrations import HfDeepSpeedConfig
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        made = deepspeed_settings(self.dtype) | {"zero_optimization": zero3(self.offload)}
        kept = HfDeepSpeedConfig(made)  # transformers refers to it weakly
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            unset_hf_deepspeed_config()
            del kept


def deepspeed_settings(dtype: torch.dtype, micro_batch_size: int = 1) -> dict[str, Any]:
    """What DeepSpeed is told of any model that computes in `dtype`.

    Gradients are summed over micro-batches and ranks in fp32: in the compute dtype each of 1,024 rows would be rounded
    beside the sum of those before it (a relative error of 12 % in bf16).
    """
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,  # the step's micro-batches are counted in Engine.step
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Under ZeRO-1 a gradient in bf16 is freed once it is added to the sum, not after the whole backward pass.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "fp16": {"enabled": dtype == torch.float16},
        "steps_per_print": 1 << 60,
    }


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, of which this rank may have a part only."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


@contextlib.contextmanager
def whole(weights: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """The sharded ones among `weights` whole on every rank meanwhile; every rank does this together.

    With `changed`, what rank 0 has written into them lasts. Those that are whole already stay so, and are left alone.
    """
    sharded: list[Any] = [weight for weight in weights if is_sharded(weight)]
    sharded = [weight for weight in sharded if weight.ds_status.name == "NOT_AVAILABLE"]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if changed else None):
        yield


@contextlib.contextmanager
def gathered(offload: Any) -> Iterator[None]:
    """Every weight of a model under ZeRO-3 whole on every rank, and the hooks that fetch and release them taken off.

    With the hooks on, each forward pass would gather again (10 times slower to generate), and ranks with different
    numbers of passes would wait for each other for ever. offload: DeepSpeed's ZeRO-3 part of an engine.
    """
    model = offload.module
    with whole(list(model.parameters())):
        for hook in [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            # The order matters: a pass first resets the coordinator, then fetches.
            offload.fwd_pre_hook = model.register_forward_pre_hook(lambda *_: _reset(offload))
            offload._register_deepspeed_module(model)


def _reset(offload: Any) -> None:
    offload.get_param_coordinator().reset_step()


class InStep:
    """A model under ZeRO-3 whose every forward pass fetches each layer's weights from all ranks and lets them go.

    Ranks take part in each other's fetches, so all must run equally many passes: a rank that leaves the context early
    goes on with passes over a single token until the last has left. Other collectives have no place inside.
    """

    def __init__(self, offload: Any) -> None:
        self._offload, self._model = offload, offload.module
        self._inside = False

    def __enter__(self) -> None:
        model = self._model
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]
        if hasattr(model, "lm"):  # generation asks the language model of a policy without the policy
            self._hooks.append(model.lm.register_forward_pre_hook(self._begin_inner, prepend=True))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is not None:
            return
        while (others := _passes([0, 0]))[0] + others[1]:
            assert others[0] * others[1] == 0, "ranks run different parts of the model at the same time"
            ids = torch.zeros(1, 2, dtype=torch.long, device=collectives.local_device())
            if others[0]:
                mask = torch.ones_like(ids, dtype=torch.bool)
                self._model(Sequences(ids, mask, mask & (torch.arange(2, device=ids.device) > 0)))
            else:
                _reset(self._offload)
                self._model.lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def _begin(self, *_: Any) -> None:
        self._inside = True
        _passes([1, 0])

    def _end(self, *_: Any) -> None:
        self._inside = False

    def _begin_inner(self, *_: Any) -> None:
        if not self._inside:
            _passes([0, 1])
            _reset(self._offload)  # as a pass of the whole model does


def _passes(mine: list[int]) -> list[int]:
    """How many ranks begin a pass of the whole model, and of its language model alone; 0 and 0 when none does."""
    return [int(count) for count in collectives.sum_over_ranks(torch.tensor(mine)).tolist()]
