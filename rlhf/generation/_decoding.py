"""Fast decoding of one token per row on a CPU: weights in the memory order of the matrix product and, if layers are
compiled, one graph for the whole step, with the matrix products and attention of rlhf/models/cpu/kernels.py.

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
    position_ids = (
        {"position_ids": positions} if traits.has_argument(lm, "position_ids") else {}
    )  # BLOOM and MPT have none
    outputs = lm(input_ids=ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **position_ids)
    logits: Tensor = outputs.logits[:, -1]
    return logits


@contextlib.contextmanager
def decoding(lm: PreTrainedModel) -> Iterator[Step]:
    """Yields a function for one fast decoding step of `lm`; its results are those of `step` up to rounding.

    Weights that are sharded over the ranks do not change.
    """
    cpu, graph = lm.device.type == "cpu", packs(lm) and compiling.compiled(lm)
    own_kernels = cpu and graph and kernels.for_one_token(lm.dtype)
    with _products_by(_Unsorted if own_kernels else _Sorted, lm) if cpu else contextlib.nullcontext():
        if graph:
            with attention.inside(lm, attention.ONE_TOKEN if own_kernels else attention.NAME):
                yield _varying(compiling.compile_as_one_graph(step, _join))
        else:
            with compiling.eager():
                yield step


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
def _products_by(kind: type["_Unsorted"] | type["_Sorted"], lm: PreTrainedModel) -> Iterator[None]:
    dtypes = [torch.float32] if torch.backends.mkldnn.is_available() else []
    if dtypes and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.append(torch.bfloat16)
    linear = [
        module
        for module in lm.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.dim() == 2  # not a shard
        and module.weight.dtype in dtypes
        and (kind is _Sorted or kernels.fits(module.weight))
    ]
    _library()
    try:
        for module in linear:
            module.__class__ = kind
        yield
    finally:
        for module in linear:
            module.__class__ = nn.Linear
        _in_order().clear()


class _Unsorted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return kernels.products(input, [self.weight], [] if self.bias is None else [self.bias])


class _Sorted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.rlhf.sorted_products(input, [self.weight], [] if self.bias is None else [self.bias])
        return outputs


@functools.cache
def _in_order() -> dict[tuple[int, ...], tuple[Tensor, Tensor | None]]:
    """(reordered concatenation of weights, concatenated biases) by the memory addresses of the weights."""
    return {}


def _products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    key = tuple(weight.data_ptr() for weight in weights)
    reordered = _in_order()
    if key not in reordered:
        together = weights[0] if len(weights) == 1 else torch.cat(weights)
        ordered = torch.ops.mkldnn._reorder_linear_weight(together, x.numel() // x.shape[-1])
        reordered[key] = ordered, torch.cat(biases) if biases else None
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, *reordered[key], "none", [], "")
    return outputs


@functools.cache
def _library() -> torch.library.Library:
    """A custom operator, because torch's compiler does not support reordered weights."""
    library = torch.library.Library("rlhf", "FRAGMENT")
    library.define("sorted_products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
    library.impl("sorted_products", _products, "CPU")
    library.impl("sorted_products", kernels.products_shape, "Meta")
    return library


def _join(graph: fx.Graph) -> None:
    """Join matrix products with the same input into one product of concatenated weights."""
    by_states: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target) in ("rlhf.products", "rlhf.sorted_products"):
            by_states.setdefault((node.target, node.args[0]), []).append(node)
    for (product, states), nodes in by_states.items():
        weights, biases = ([x for node in nodes for x in cast(list[fx.Node], node.args[i])] for i in (1, 2))
        if len(nodes) == 1 or len(biases) not in (0, len(weights)):
            continue
        sizes = [node.meta["example_value"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(product, (states, weights, biases))
            offsets = zip(accumulate(sizes, initial=0), sizes, strict=False)
            slices = [graph.call_function(torch.narrow, (joined, -1, start, size)) for start, size in offsets]
        for node, product_slice in zip(nodes, slices, strict=True):
            node.replace_all_uses_with(product_slice)
            graph.erase_node(node)
