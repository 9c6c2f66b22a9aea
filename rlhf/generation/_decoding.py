"""Fast decoding of one token per row on a CPU: weights in the memory order of the matrix product and, if layers are
compiled, one graph for the whole step, with the matrix products and attention of rlhf/models/cpu/kernels.py; on a GPU
with torch's. There `_graphs.py` records the step, compiled or not.

Measured with a model of 135M in bf16, two cores, 16 rows: the products of a step take half the time (Zen 4), because
otherwise oneDNN reorders every weight for each product; the graph halves the time of a step (Xeon with AMX).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from rlhf.generation._cache import MaskedStaticLayer
from rlhf.models import traits
from rlhf.models.cpu import attention, compiling, kernels
from rlhf.models.packing import packs

Step = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, DynamicCache], Tensor]


def step(lm: PreTrainedModel, ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """The logits of the next token, [B, V].

    ids, positions: [B, 1]; positions count real tokens.
    attention_mask: mask of real tokens, long [B, S] of the tokens so far, or bool [B, 1, 1, S] of the whole cache
    """
    inputs = {"input_ids": ids, "attention_mask": attention_mask, **traits.cache_input(lm, cache)}
    if traits.has_argument(lm, "position_ids"):  # BLOOM and MPT have none
        inputs["position_ids"] = positions
    outputs = lm(**inputs, use_cache=True)
    logits: Tensor = outputs.logits[:, -1]
    return logits


def plain_step(*arguments: Any) -> Tensor:
    """`step`, without compiled layers."""
    with compiling.eager():
        return step(*arguments)


@contextlib.contextmanager
def decoding(lm: PreTrainedModel) -> Iterator[Step]:
    """Yields a function for one fast decoding step of `lm`; its results are those of `step` up to rounding.

    Weights that are sharded over the ranks do not change.
    """
    cpu = lm.device.type == "cpu"
    if packs(lm) and compiling.compiled(lm):
        own_kernels = cpu and kernels.for_one_token(lm.dtype)
        rewrite = _use_kernels if own_kernels else _use_sorted_weights
        with _own_linear(), attention.inside(lm, attention.ONE_TOKEN if own_kernels else attention.NAME):
            try:
                yield _varying(compiling.compile_as_one_graph(step, rewrite))
            finally:
                _sorted_products().clear()
    else:
        with compiling.eager(), _sorted_layers(lm) if cpu else contextlib.nullcontext():
            yield step


@contextlib.contextmanager
def _own_linear() -> Iterator[None]:
    """Inside, `F.linear` is that of torch, which the graph pass looks for.

    Once a model is loaded under ZeRO-3, DeepSpeed replaces it for the rest of the process.
    """
    outside = F.linear
    F.linear = torch._C._nn.linear
    try:
        yield
    finally:
        F.linear = outside


def _varying(graph: Step) -> Step:
    """`graph` for any number of rows and tokens, without the compiler's guards if the shapes are those of the last
    step."""
    last_shape = torch.Size()

    def run(lm: PreTrainedModel, ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal last_shape
        if attention_mask.shape == last_shape:
            with compiling.unguarded():
                return graph(lm, ids, attention_mask, positions, cache)
        last_shape = attention_mask.shape
        static_layers = cast(list[MaskedStaticLayer], cache.layers)
        states = [(x, (0, 2)) for layer in static_layers for x in (layer.keys, layer.values)]
        for x, dimensions in ((ids, (0,)), (attention_mask, (0, 3)), (positions, (0,)), *states):
            compiling.mark_dynamic(x, *dimensions)
        return graph(lm, ids, attention_mask, positions, cache)

    return run


@contextlib.contextmanager
def _sorted_layers(lm: nn.Module) -> Iterator[None]:
    """Inside, modules with sorted weights stand in for the linear layers of `lm`, which runs eagerly."""
    layers = {
        name: module
        for name, module in lm.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear
        and not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
        and _sortable(module.weight)
    }
    replacements = {layer: _SortedLinear(layer) for layer in layers.values()}
    try:
        for name, layer in layers.items():
            lm.set_submodule(name, replacements[layer])
        yield
    finally:
        for name, layer in layers.items():
            lm.set_submodule(name, layer)


class _SortedLinear(nn.Linear):
    """A linear layer with the same weights, which are sorted at the first call."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._sorted: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._sorted is None:
            self._sorted = _sort(self.weight, x)
        return _multiply(x, self._sorted, self.bias)


def _sortable(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by the sorted weight; a shard has one dimension."""
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _sort(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the memory order that is best for as many rows as `x` has."""
    ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, x.numel() // x.shape[-1])
    return ordered


def _multiply(x: Tensor, ordered: Tensor, bias: Tensor | None) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, ordered, bias, "none", [], "")
    return outputs


class _SortedProducts:
    """`torch.ops.rlhf.sorted_products(x, weights, biases)`, for a compiled graph: as `kernels.products`, with sorted
    weights.

    torch's compiler does not support sorted weights, and an operator takes tensors only. So this one has the sorted
    weights, by the addresses of the weights, until `clear`.
    """

    def __init__(self) -> None:
        self._sorted: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._library = torch.library.Library("rlhf", "FRAGMENT")
        self._library.define("sorted_products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
        self._library.impl("sorted_products", self, "CPU")
        self._library.impl("sorted_products", kernels.products_shape, "Meta")

    def __call__(self, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        key = tuple(weight.data_ptr() for weight in weights)
        if key not in self._sorted:
            together = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._sorted[key] = _sort(together, x), torch.cat(biases) if biases else None
        return _multiply(x, *self._sorted[key])

    def clear(self) -> None:
        """Forget the sorted weights: training changes the weights."""
        self._sorted.clear()


@functools.cache
def _sorted_products() -> _SortedProducts:
    return _SortedProducts()


def _use_kernels(graph: fx.Graph) -> None:
    """Compute matrix products by `kernels.products`, those with the same input as one."""
    _join(_replace(graph, torch.ops.rlhf.products, kernels.fits))


def _use_sorted_weights(graph: fx.Graph) -> None:
    """The same with sorted weights."""
    _sorted_products()
    _join(_replace(graph, torch.ops.rlhf.sorted_products, _sortable))


def _replace(graph: fx.Graph, product: Any, supports: Callable[[Tensor], bool]) -> list[fx.Node]:
    """Replace products with weights of the model by `product`, if it supports the weight. Returns the new nodes."""
    replaced = []
    for node in graph.find_nodes(op="call_function", target=F.linear):
        x, weight, bias = (*node.args, None)[:3]  # as nn.Linear calls it
        if isinstance(weight, fx.Node) and weight.op == "placeholder" and supports(weight.meta["example_value"]):
            with graph.inserting_before(node):
                new = graph.call_function(product, (x, [weight], [] if bias is None else [bias]))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            replaced.append(new)
    return replaced


def _join(products: list[fx.Node]) -> None:
    """Join products with the same input into one product of concatenated weights."""
    by_states: dict[Any, list[fx.Node]] = {}
    for node in products:
        by_states.setdefault(node.args[0], []).append(node)
    for states, nodes in by_states.items():
        weights, biases = ([x for node in nodes for x in cast(list[fx.Node], node.args[i])] for i in (1, 2))
        if len(nodes) == 1 or len(biases) not in (0, len(weights)):
            continue
        graph, sizes = nodes[0].graph, [node.meta["example_value"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            joined = graph.create_node("call_function", nodes[0].target, (states, weights, biases))
            offsets = zip(accumulate(sizes, initial=0), sizes, strict=False)
            slices = [graph.call_function(torch.narrow, (joined, -1, start, size)) for start, size in offsets]
        for node, product_slice in zip(nodes, slices, strict=True):
            node.replace_all_uses_with(product_slice)
            graph.erase_node(node)
