"""Fast decoding of one token per row on a CPU: weights in the memory order of the matrix product and, if layers are
compiled, one graph for the whole step, with the matrix products and attention of cpu_operations.py; on a GPU with
torch's. There rlhf/generation/_graphs.py records the step, compiled or not.

Measured with a model of 135M in bf16, two cores, 16 rows: the products of a step take half the time (Zen 4), because
otherwise oneDNN reorders every weight for each product; the graph halves the time of a step (Xeon with AMX).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from rlhf.kernels import attention, compiling, cpu_operations

Step = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, DynamicCache], Tensor]


@contextlib.contextmanager
def decode_step(lm: PreTrainedModel, step: Step, fixed: bool) -> Iterator[Step]:
    """Yields a function for one fast decoding step of `lm`; its results are those of `step` up to rounding.

    Weights that are sharded over the ranks do not change.
    step: ids [B, 1], mask of the tokens, positions [B, 1] and cache to logits of the next token, [B, V]
    fixed: whether the mask is bool [B, 1, 1, S] of the whole cache, so that shapes do not change with each step
    """
    on_cpu = lm.device.type == "cpu"
    if fixed and attention.between_compiled(lm):
        own_kernels = on_cpu and cpu_operations.for_one_token(lm.dtype)
        attend = attention.ONE_TOKEN if own_kernels else attention.NAME
        layers = _linear_layers(lm, cpu_operations.fits if own_kernels else _sortable)
        with attention.inside(lm, attend), _multiplying(layers, _KernelLinear if own_kernels else _SortedLinear):
            yield _varying(compiling.compile_as_one_graph(step, _join_products))
    else:
        layers = [layer for layer in _linear_layers(lm, _sortable) if not layer._forward_hooks]
        with compiling.eager(), _multiplying(layers, _SortedLinear):
            yield step


def _varying(graph: Step) -> Step:
    """`graph` for any number of rows and tokens, without the compiler's guards if the shapes are those of the last
    step."""
    last_shape = torch.Size()

    def run(lm: PreTrainedModel, ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal last_shape
        if attention_mask.shape == last_shape:
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
                return graph(lm, ids, attention_mask, positions, cache)
        last_shape = attention_mask.shape
        states = [(x, (0, 2)) for layer in cast(list[DynamicLayer], cache.layers) for x in (layer.keys, layer.values)]
        for x, dimensions in ((ids, (0,)), (attention_mask, (0, 3)), (positions, (0,)), *states):
            torch._dynamo.maybe_mark_dynamic(x, dimensions)
        return graph(lm, ids, attention_mask, positions, cache)

    return run


def _linear_layers(lm: nn.Module, supported: Callable[[Tensor], bool]) -> list[nn.Linear]:
    return [module for module in lm.modules() if type(module) is nn.Linear and supported(module.weight)]


@contextlib.contextmanager
def _multiplying(layers: list[nn.Linear], kind: type[nn.Linear]) -> Iterator[None]:
    """Inside, `layers` are of a class with another forward pass. `F.linear` cannot tell whose weights it gets, and
    DeepSpeed replaces it once a model is loaded under ZeRO-3."""
    try:
        for layer in layers:
            layer.__class__ = kind
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
        _sorted_products().clear()


class _KernelLinear(nn.Linear):
    """Multiplies by `cpu_operations.products`, in a compiled graph."""

    def forward(self, x: Tensor) -> Tensor:
        return cpu_operations.products(x, [self.weight], [] if self.bias is None else [self.bias])


class _SortedLinear(nn.Linear):
    """Multiplies by sorted weights."""

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch.ops.rlhf.sorted_products if torch.compiler.is_compiling() else _sorted_products()
        output: Tensor = multiply(x, [self.weight], [] if self.bias is None else [self.bias])
        return output


def _sortable(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by the sorted weight; a shard has one dimension."""
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class _SortedProducts:
    """As `cpu_operations.products`, with weights in the memory order that is best for as many rows as `x` has at first.

    torch's compiler does not support sorted weights, and an operator takes tensors only. So this has the sorted
    weights, by the addresses of the weights, until `clear`; in a compiled graph it is `torch.ops.rlhf.sorted_products`.
    """

    def __init__(self) -> None:
        self._sorted: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._library = torch.library.Library("rlhf", "FRAGMENT")
        self._library.define("sorted_products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
        self._library.impl("sorted_products", self, "CPU")
        self._library.impl("sorted_products", cpu_operations.products_shape, "Meta")

    def __call__(self, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        key = tuple(weight.data_ptr() for weight in weights)
        if key not in self._sorted:
            together = weights[0] if len(weights) == 1 else torch.cat(weights)
            ordered = torch.ops.mkldnn._reorder_linear_weight(together, x.numel() // x.shape[-1])
            self._sorted[key] = ordered, torch.cat(biases) if biases else None
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, *self._sorted[key], "none", [], "")
        return output

    def clear(self) -> None:
        """Forget the sorted weights: training changes the weights."""
        self._sorted.clear()


@functools.cache
def _sorted_products() -> _SortedProducts:
    return _SortedProducts()


def _join_products(graph: fx.Graph) -> None:
    """Join products with the same input into one product of concatenated weights."""
    by_states: dict[fx.node.Argument, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target) in ("rlhf.products", "rlhf.sorted_products"):
            by_states.setdefault(node.args[0], []).append(node)
    for states, nodes in by_states.items():
        weights, biases = ([x for node in nodes for x in cast(list[fx.Node], node.args[i])] for i in (1, 2))
        if len(nodes) == 1 or len(biases) not in (0, len(weights)):
            continue
        sizes = [node.meta["example_value"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            joined = graph.create_node("call_function", nodes[0].target, (states, weights, biases))
            offsets = zip(accumulate(sizes, initial=0), sizes, strict=False)
            slices = [graph.call_function(torch.narrow, (joined, -1, start, size)) for start, size in offsets]
        for node, product_slice in zip(nodes, slices, strict=True):
            node.replace_all_uses_with(product_slice)
            graph.erase_node(node)
