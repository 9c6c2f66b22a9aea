"""Memory of forward and backward passes, measured by a dry run on tensors without data (torch's fake tensors)."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.maths import ops
from rlhf.models import lm_head
from rlhf.models.lm_head import Entropy
from rlhf.plan import sizes
from rlhf.plan.sizes import Setup
from rlhf.roles import Kind

TRACED = (1, 2)
"""numbers of layers that are traced: each further layer adds as many bytes as the second one"""
IS_BELOW = "is_below"
"""the attribute of the result of a comparison `x < 0`, which no random number fulfils: OPT of transformers before 5.20
skips a layer if one is below its layerdrop"""


@dataclass(frozen=True, slots=True)
class PassShape:
    """The shape of one forward pass on one device."""

    rows: int
    tokens: int
    """in one row"""
    predicted: int
    """tokens of a row that go through the language-model head"""
    entropy: Entropy = "none"
    """whether the policy's entropy is computed too, and has a gradient"""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    """whether the backward pass computes activations again"""
    whole_logits: bool = False
    """whether the logits of many tokens exist at once, too (under ZeRO-3)"""


@dataclass(frozen=True, slots=True)
class Activations:
    """Peak bytes beside weights and accumulated gradients."""

    head: int = 0
    """until the backward pass leaves the last layer: the saved activations, and the gradients of the head"""
    embeddings: int = 0
    """after the backward pass has left the first layer: the gradients of the embeddings"""
    inference: int = 0
    """in a forward pass without gradients"""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have allocated and that are still referenced.

    tensors: those that exist already; they do not count
    """

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return not hasattr(args[0], IS_BELOW)
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lt.Scalar:
            setattr(out, IS_BELOW, True)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    self._count(part.untyped_storage())
        self.peak = max(self.peak, self.current)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self.current += storage.nbytes()
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.current -= size

    def exclude(self, tensor: Tensor) -> None:
        """Stop counting a tensor, because another item of the plan counts it."""
        self.current -= tensor.untyped_storage().nbytes()

    def reset_peak(self) -> int:
        """The peak since the last call; a new one starts from what is allocated now."""
        peak, self.peak = self.peak, self.current
        return peak


def more_on_gpu(logits: int) -> int:
    """Bytes by which the softmax on a GPU exceeds the traced one, which is that of a CPU: more logits are in fp32
    together, in three tensors (`ops.logprobs_and_entropy`). logits: number of a pass"""
    on_gpu, on_cpu = (min(logits, ops.logits_at_once(kind)) for kind in ("cuda", "cpu"))
    return 3 * 4 * (on_gpu - on_cpu)


@functools.cache
def training(model_path: str, kind: Kind, setup: Setup, shape: PassShape) -> Activations:
    """Peaks of the model at `model_path` in training, with as many layers as its config has.

    The largest peak is where the backward pass leaves the head, or (with short rows and a large vocabulary) where
    it reaches the embeddings. The first grows by the same number of bytes with each layer, the second is constant.
    """
    config = sizes.resized_config(model_path, setup)
    models = (
        _fake_model(with_layers(config, count), kind, setup, shape.dtype, shape.checkpointing) for count in TRACED
    )
    (few, embeddings), (more, _) = (_training_peaks(model, mode, kind, shape) for model, mode in models)
    layers = sizes.size(model_path, kind, setup).layers
    return Activations(few + (more - few) * (layers - TRACED[0]), embeddings)


@functools.cache
def inference(model_path: str, kind: Kind, setup: Setup, shape: PassShape) -> int:
    """Peak bytes beside the weights in a forward pass without gradients; every layer has the same peak."""
    config = with_layers(sizes.resized_config(model_path, setup), TRACED[-1])
    model, mode = _fake_model(config, kind, setup, shape.dtype, False)
    with mode, torch.no_grad():
        ids = _input_ids(shape)
        with _LiveBytes(iter([*model.parameters(), *model.buffers(), ids])) as live:
            _outputs(model, kind, ids, shape)
        return live.peak


def with_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """A model's config with its first `count` layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("layer_types", "attention_layers"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:count])
    name = "num_layers" if hasattr(text, "attention_types") else "num_hidden_layers"
    setattr(text, name, count)
    return config


def _fake_model(
    config: PreTrainedConfig, kind: Kind, setup: Setup, dtype: torch.dtype, checkpointing: bool
) -> tuple[nn.Module, FakeTensorMode]:
    """(model of fake tensors, with adapters and gradient checkpointing as in training; the mode of these tensors)."""
    with torch.device("meta"):
        model = sizes.build(config, kind, setup).to(dtype).train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _replace_tensors(model)
    if checkpointing:
        _checkpoint(model)
    return model, mode


def _input_ids(shape: PassShape) -> Tensor:
    return torch.zeros(shape.rows, shape.tokens, dtype=torch.long)


def _training_peaks(
    model: nn.Module, mode: AbstractContextManager[Any], kind: Kind, shape: PassShape
) -> tuple[int, int]:
    """(peak until the first gradient of the layers, peak after their last one) of forward and backward, in bytes."""
    with mode:
        ids = _input_ids(shape)
        live, peaks = _LiveBytes(iter([*model.parameters(), *model.buffers(), ids])), dict[str, int]()
        hooks = list(_gradient_hooks(model, live, peaks))
        with live:
            _outputs(model, kind, ids, shape).sum().backward()
        for hook in hooks:
            hook.remove()
        return peaks["head"], live.peak


def _replace_tensors(model: nn.Module) -> None:
    """Replace tensors of the meta device by fake tensors of the CPU, so that the trace runs the CPU's kernels."""
    replaced = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad)
            setattr(module, name, replaced.setdefault(id(weight), fake))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _gradient_hooks(model: nn.Module, live: _LiveBytes, peaks: dict[str, int]) -> Iterator[RemovableHandle]:
    """Hooks that exclude gradients from the count, and record the peak before and after those of the layers."""
    layers = sizes.layers_of(model)
    if not any(weight.requires_grad for weight in layers.parameters()):
        yield from _output_hooks(layers, live, peaks)
    layer_weights = {id(weight) for weight in layers.parameters()}
    remaining = {id(weight) for weight in layers.parameters() if weight.requires_grad}

    def record(weight: Tensor) -> None:
        if id(weight) in layer_weights:
            if "head" not in peaks:
                peaks["head"] = live.reset_peak()
            remaining.discard(id(weight))
            if not remaining:
                live.reset_peak()
        assert weight.grad is not None
        live.exclude(weight.grad)

    for weight in model.parameters():
        if weight.requires_grad:
            yield weight.register_post_accumulate_grad_hook(record)


def _output_hooks(layers: nn.ModuleList, live: _LiveBytes, peaks: dict[str, int]) -> Iterator[RemovableHandle]:
    """The same where no layer has trained weights: at the outputs of the last and of the first layer."""

    def on_gradient(layer: nn.Module, name: str) -> RemovableHandle:
        def record(_: Tensor) -> None:
            peaks[name] = live.reset_peak()

        def hook(_: nn.Module, inputs: object, output: Any) -> None:
            (output[0] if isinstance(output, tuple) else output).register_hook(record)

        return layer.register_forward_hook(hook)

    yield on_gradient(layers[-1], "head")
    yield on_gradient(layers[0], "layers")


def _outputs(model: Any, kind: Kind, ids: Tensor, shape: PassShape) -> Tensor:
    """The inputs of a loss, computed as in rlhf.models: log-probs [B, K], or a scalar per token [B, S]."""
    if kind == "scalar":
        hidden = model["backbone"](input_ids=ids, use_cache=False).last_hidden_state
        return model["score"](hidden).squeeze(-1)
    setattr(model, lm_head.SPLITS, not shape.whole_logits)
    states = torch.arange(ids.numel()).view(ids.shape)[:, -shape.predicted :].flatten()
    predicted = ids.flatten()[states]
    (logprobs, entropies), _ = lm_head.predict(model, {"input_ids": ids}, states, predicted, entropy=shape.entropy)
    return logprobs if entropies is None or shape.entropy == "watched" else logprobs + entropies


def _checkpoint(model: nn.Module) -> None:
    transformer = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    with contextlib.suppress(AttributeError):
        transformer.enable_input_require_grads()
    transformer.gradient_checkpointing_enable({"use_reentrant": False})
