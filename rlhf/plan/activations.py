"""Memory of forward and backward passes, found by running them on tensors without data (torch's fake tensors)."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.maths import ops
from rlhf.plan import sizes
from rlhf.plan.sizes import Head

TRACED = (1, 2)
"""layers that are traced; each further one adds what the second did"""


@dataclass(frozen=True, slots=True)
class Passes:
    """What is run through a model at once on one device."""

    rows: int
    tokens: int
    """of a row"""
    predicted: int
    """columns that go through the head"""
    entropy: bool = False
    """whether the policy's entropy is watched"""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes beyond weights and accumulated gradients."""

    head: int
    """the most until the backward pass has left the last layer: what it saved, and the gradients of the head"""
    end: int
    """the most after it has left the first layer: gradients of the embeddings"""
    inference: int
    """the most in a forward pass without gradients"""

    @property
    def training(self) -> int:
        return max(self.head, self.end)


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and something still holds."""

    def __init__(self, given: Iterator[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _meet(self, storage: Any) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def kept_elsewhere(self, tensor: Tensor) -> None:
        """From now on a tensor counts as kept by another part of the plan."""
        self.now -= tensor.untyped_storage().nbytes()

    def reset(self) -> int:
        """The most since the last call."""
        most, self.most = self.most, self.now
        return most


@functools.cache
def activations(
    place: str, head: Head, adapter: str | None, dtype: torch.dtype, checkpointing: bool, passes: Passes
) -> Activations:
    """Of the model at `place`.

    The moment with the most is when the backward pass leaves the head, or (with short rows and a large vocabulary)
    when it reaches the embeddings: the first grows by the same with each layer, the second does not.
    """
    (few, end), (more, _) = (
        _training(*_faked(_shallow(place, count), head, adapter, dtype, checkpointing), head, passes)
        for count in TRACED
    )
    layers = sizes.size(place, head, adapter).layers
    return Activations(few + (more - few) * (layers - TRACED[0]), end, inference(place, head, dtype, passes))


@functools.cache
def inference(place: str, head: Head, dtype: torch.dtype, passes: Passes) -> int:
    """The most bytes beyond the weights in a forward pass without gradients, which layer after layer is the same."""
    model, mode = _faked(_shallow(place, TRACED[-1]), head, None, dtype, False)
    with mode, torch.no_grad():
        ids = _ids(passes)
        with _Live(iter([*model.parameters(), *model.buffers(), ids])) as live:
            _outputs(model, head, ids, passes)
        return live.most


def _shallow(place: str, count: int) -> Any:
    """The config with fewer layers, all of the first kinds."""
    config = copy.deepcopy(sizes.grown(place))
    text = config.get_text_config()
    for name in ("layer_types", "attention_layers"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:count])
    name = "num_layers" if hasattr(text, "attention_types") else "num_hidden_layers"
    setattr(text, name, count)
    return config


def _faked(
    config: Any, head: Head, adapter: str | None, dtype: torch.dtype, checkpointing: bool
) -> tuple[nn.Module, FakeTensorMode]:
    """The model with fake tensors, adapters and gradient checkpointing as in training; and the mode they belong to."""
    with torch.device("meta"):
        model = sizes.build(config, head, adapter).to(dtype).train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _replace_tensors(model)
    if checkpointing:
        _checkpoint(model)
    return model, mode


def _ids(passes: Passes) -> Tensor:
    return torch.zeros(passes.rows, passes.tokens, dtype=torch.long)


def _training(model: nn.Module, mode: FakeTensorMode, head: Head, passes: Passes) -> tuple[int, int]:
    """(most until the layers' first gradient, most after their last) in a forward and a backward pass, bytes."""
    with mode:
        ids = _ids(passes)
        live, marks = _Live(iter([*model.parameters(), *model.buffers(), ids])), dict[str, int]()
        hooks = list(_watched(model, live, marks))
        with live:
            _outputs(model, head, ids, passes).sum().backward()
        for hook in hooks:
            hook.remove()
        return marks["head"], live.most


def _replace_tensors(model: nn.Module) -> None:
    """Put fake tensors of the CPU, whose kernels the trace then takes, in the place of those of the meta device."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad)
            setattr(module, name, made.setdefault(id(weight), fake))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _watched(model: nn.Module, live: _Live, marks: dict[str, int]) -> Iterator[Any]:
    """Hooks that take gradients out of the count, and note the most before and after those of the layers."""
    layers = sizes.layers_of(model)
    inside = {id(weight) for weight in layers.parameters()}
    left = {id(weight) for weight in layers.parameters() if weight.requires_grad}

    def seen(weight: Tensor) -> None:
        if id(weight) in inside:
            if "head" not in marks:
                marks["head"] = live.reset()
            left.discard(id(weight))
            if not left:
                live.reset()
        assert weight.grad is not None
        live.kept_elsewhere(weight.grad)

    for weight in model.parameters():
        if weight.requires_grad:
            yield weight.register_post_accumulate_grad_hook(seen)


def _outputs(model: Any, head: Head, ids: Tensor, passes: Passes) -> Tensor:
    """What the losses see of a model, as rlhf.models has it: log-probs [B, K], or a scalar per token [B, S]."""
    if head == "scalar":
        hidden = model["backbone"](input_ids=ids, use_cache=False).last_hidden_state
        return model["score"](hidden).squeeze(-1)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=passes.predicted).logits
    logprobs = ops.token_logprobs(logits, ids[:, -passes.predicted :])
    if passes.entropy:
        with torch.no_grad():
            ops.entropy(logits)
    return logprobs


def _checkpoint(model: nn.Module) -> None:
    part = next(each for each in model.modules() if hasattr(each, "gradient_checkpointing_enable"))
    with contextlib.suppress(AttributeError):
        part.enable_input_require_grads()  # type: ignore[operator]  # transformers has it, `Module` does not
    part.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # the same
