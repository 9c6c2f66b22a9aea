"""What makes one token a row cheap on a CPU: weights in the order that its products read, and, where layers are
compiled, one graph for the whole step, with products and attention of our own (rlhf/models/cpu/kernels.py).

Measured with a model of 135M in bf16, two cores, 16 rows: the products of a step take half the time (Zen 4), because
oneDNN otherwise sorts every weight anew for each product; the graph takes half off the step (Xeon with AMX).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache, PreTrainedModel

from rlhf.generation._cache import WholeRoom
from rlhf.models import traits
from rlhf.models.cpu import attention, compiling, kernels
from rlhf.models.packing import packs

Step = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, DynamicCache], Tensor]


def step(lm: PreTrainedModel, ids: Tensor, seen: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """The logits of the token after this one, [B, V].

    ids, positions: [B, 1]; positions count real tokens.
    seen: tokens that are real, of those so far long [B, S], or of the whole room bool [B, 1, 1, S].
    """
    counted = {"position_ids": positions} if traits.takes(lm, "position_ids") else {}  # BLOOM and MPT do not
    found = lm(input_ids=ids, attention_mask=seen, past_key_values=cache, use_cache=True, **counted)
    logits: Tensor = found.logits[:, -1]
    return logits


@contextlib.contextmanager
def decoding(lm: PreTrainedModel) -> Iterator[Step]:
    """Meanwhile `lm` takes single tokens quickly, by the step given; results are the same up to rounding.

    Weights that lie in parts on the ranks stay as they are.
    """
    model = traits.base(lm)
    cpu, graph = model.device.type == "cpu", packs(lm) and compiling.compiled(model)
    own = cpu and graph and kernels.for_one_token(model.dtype)
    with _products_by(_Unsorted if own else _Sorted, model) if cpu else contextlib.nullcontext():
        if graph:
            with attention.inside(model, attention.ONE_TOKEN if own else attention.NAME):
                yield _varying(compiling.whole(step, _join))
        else:
            with compiling.eager():
                yield step


def _varying(graph: Step) -> Step:
    """`graph`, told that a rollout may have any number of rows and of tokens, and when a step is like the last."""
    known = torch.Size()

    def run(lm: PreTrainedModel, ids: Tensor, seen: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        nonlocal known
        if seen.shape == known:
            with compiling.unguarded():
                return graph(lm, ids, seen, positions, cache)
        known = seen.shape
        rooms = cast(list[WholeRoom], cache.layers)
        states = [(x, (0, 2)) for layer in rooms for x in (layer.keys, layer.values)]
        for x, dimensions in ((ids, (0,)), (seen, (0, 3)), (positions, (0,)), *states):
            compiling.vary(x, *dimensions)
        return graph(lm, ids, seen, positions, cache)

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
        and module.weight.dim() == 2  # not a part of it
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
        found: Tensor = torch.ops.rlhf.sorted_products(input, [self.weight], [] if self.bias is None else [self.bias])
        return found


@functools.cache
def _in_order() -> dict[tuple[int, ...], tuple[Tensor, Tensor | None]]:
    """Weights below each other in the order of their product, and their biases, by the addresses of the weights."""
    return {}


def _products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    key = tuple(weight.data_ptr() for weight in weights)
    known = _in_order()
    if key not in known:
        together = weights[0] if len(weights) == 1 else torch.cat(weights)
        ordered = torch.ops.mkldnn._reorder_linear_weight(together, x.numel() // x.shape[-1])
        known[key] = ordered, torch.cat(biases) if biases else None
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, *known[key], "none", [], "")
    return found


@functools.cache
def _library() -> torch.library.Library:
    """An operator of our own: torch's compiler knows nothing of such an order."""
    library = torch.library.Library("rlhf", "FRAGMENT")
    library.define("sorted_products(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor")
    library.impl("sorted_products", _products, "CPU")
    library.impl("sorted_products", kernels.products_shape, "Meta")
    return library


def _join(graph: fx.Graph) -> None:
    """Products of the same states become one."""
    of: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target) in ("rlhf.products", "rlhf.sorted_products"):
            of.setdefault((node.target, node.args[0]), []).append(node)
    for (product, states), nodes in of.items():
        weights, biases = ([x for node in nodes for x in cast(list[fx.Node], node.args[i])] for i in (1, 2))
        if len(nodes) == 1 or len(biases) not in (0, len(weights)):
            continue
        sizes = [node.meta["example_value"].shape[-1] for node in nodes]
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(product, (states, weights, biases))
            places = zip(accumulate(sizes, initial=0), sizes, strict=False)
            parts = [graph.call_function(torch.narrow, (joined, -1, start, size)) for start, size in places]
        for node, part in zip(nodes, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
