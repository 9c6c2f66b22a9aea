"""Models whose weights are sharded over the ranks (ZeRO-3): building them, gathering weights, and forward passes."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.types import Sequences

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


def zero3_config(offload: Tree | None) -> Tree:
    """DeepSpeed's section for ZeRO-3. offload: where shards are stored between uses, None = on the device.

    The threshold of 0 also shards small weights. Otherwise these stay whole; in tests all weights are small.
    """
    offload_config = {} if offload is None else {"offload_param": offload}
    return {"stage": 3, "stage3_param_persistence_threshold": 0, **offload_config}


@dataclass(frozen=True, slots=True)
class Shards:
    """How to build a model so that no rank ever holds all its weights."""

    dtype: torch.dtype
    offload: Tree | None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A context in which `from_pretrained` of transformers leaves each rank its shard of every weight.

        The random state afterwards is as before, as it is when a model is loaded without shards.
        """
        settings = deepspeed_settings(self.dtype) | {"zero_optimization": zero3_config(self.offload)}
        with _announced(settings), torch.random.fork_rng(devices=[]):
            yield


@contextlib.contextmanager
def _announced(settings: Tree) -> Iterator[None]:
    """A context in which transformers and peft know that weights are sharded, by DeepSpeed's configuration."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    reference = HfDeepSpeedConfig(settings)  # transformers has only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del reference


@contextlib.contextmanager
def library_support(model: nn.Module) -> Iterator[None]:
    """A context in which peft gathers the weights of `model` that it reads, if they are sharded."""
    if any(is_sharded(weight) for weight in model.parameters()):
        with _announced({"zero_optimization": zero3_config(None)}):
            yield
    else:
        yield


def deepspeed_settings(dtype: torch.dtype, micro_batch_size: int = 1) -> Tree:
    """DeepSpeed's configuration of any model that computes in `dtype`.

    Gradients are summed over micro-batches and ranks in fp32. Summing 1,024 rows in bf16 would give a relative error of
    12 %.
    """
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,  # Engine.step counts the micro-batches
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # Under ZeRO-1, a bf16 gradient is freed as soon as it is added to the sum, not after the whole backward pass.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "fp16": {"enabled": dtype == torch.float16},
        "steps_per_print": 1 << 60,
        # Its clock lets the host wait for the device in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
    }


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "ds_id")


def full_shape(weight: Tensor) -> torch.Size:
    """The full shape of a weight, of which this rank may have only a shard."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


@contextlib.contextmanager
def gather_weights(weights: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """A context in which the sharded ones among `weights` are whole on every rank. All ranks must enter it.

    changed: keep what rank 0 writes into them. Weights that are whole already are left unchanged.
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
def gather_model(offload: "DeepSpeedZeRoOffload") -> Iterator[None]:
    """A context in which all weights of a model under ZeRO-3 are whole on every rank, and its hooks are removed.

    With the hooks, each forward pass would gather the weights again (generation would be 10 times slower), and ranks
    with different numbers of passes would deadlock. offload: the ZeRO-3 object of a DeepSpeed engine.
    """
    model = offload.module
    with gather_weights(list(model.parameters())):
        for hook in [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            # The order matters: a pass first resets the coordinator, then gathers.
            offload.fwd_pre_hook = model.register_forward_pre_hook(lambda *_: _reset(offload))
            offload._register_deepspeed_module(model)


def _reset(offload: "DeepSpeedZeRoOffload") -> None:
    offload.get_param_coordinator().reset_step()


class SynchronizedPasses:
    """A context for a model under ZeRO-3 that gathers each layer's weights in every forward pass and releases them.

    Gathering needs all ranks, so all must run equally many passes: a rank that leaves the context early runs dummy
    passes until the last rank has left. Other collectives must not run inside.
    """

    def __init__(self, offload: "DeepSpeedZeRoOffload", inner: nn.Module | None) -> None:
        """offload: the ZeRO-3 object of a DeepSpeed engine. inner: the part of the model that is also called directly,
        the language model in a policy, by generation."""
        self._offload, self._model, self._inner = offload, offload.module, inner
        self._inside = False

    def __enter__(self) -> None:
        model = self._model
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]
        if self._inner is not None:
            self._hooks.append(self._inner.register_forward_pre_hook(self._begin_inner, prepend=True))
            self._hooks.append(self._inner.register_forward_hook(self._end_inner))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is not None:
            return
        while (passes := _passes([0, 0]))[0] + passes[1]:
            assert passes[0] * passes[1] == 0, "ranks run different parts of the model at the same time"
            ids = torch.zeros(1, 2, dtype=torch.long, device=collectives.local_device())
            if passes[0]:
                mask = torch.ones_like(ids, dtype=torch.bool)
                self._model(Sequences(ids, mask, mask & (torch.arange(2, device=ids.device) > 0)))
            else:
                assert self._inner is not None
                _reset(self._offload)
                self._inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def _begin(self, *_: object) -> None:
        self._inside = True
        _passes([1, 0])
        self._gather_on_access(True)

    def _end(self, *_: object) -> None:
        self._inside = False
        self._gather_on_access(False)

    def _begin_inner(self, *_: object) -> None:
        if not self._inside:
            _passes([0, 1])
            _reset(self._offload)  # as a pass of the whole model does
            self._gather_on_access(True)

    def _end_inner(self, *_: object) -> None:
        if not self._inside:
            self._gather_on_access(False)

    def _gather_on_access(self, inside: bool) -> None:
        """As DeepSpeed's engine does in its own passes: a weight that a layer reads from another module, such as most
        adapters from their dictionaries, is gathered when it is first read, and with the layer from then on."""
        for module in self._model.modules():
            parameters: Any = module._parameters
            parameters._in_forward = inside


def _passes(own: list[int]) -> list[int]:
    """How many ranks begin a pass of the whole model, and of its language model alone. own: this rank's two numbers."""
    return [int(count) for count in collectives.sum_over_ranks(torch.tensor(own)).tolist()]
