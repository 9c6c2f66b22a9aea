"""Fast decoding of one token per row on a CPU: weights in the memory order of the matrix product and, if layers are
compiled, one graph for the whole step, with the matrix products and attention of cpu_operations.py.

On a GPU, where rlhf/generation/_graphs.py records the step, a graph of torch's compiler has few kernels: norms with the
sums before them, the rotation with the write to the cache, gates, sampling. Products with the same input are one.

Measured with a model of 135M in bf16, two cores, 16 rows: the products of a step take half the time (Zen 4), because
otherwise oneDNN reorders every weight for each product; the graph halves the time of a step (Xeon with AMX).
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from rlhf.kernels import attention, compiling, cpu_operations, joined

Step = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, DynamicCache], Tensor]
Choice = Callable[..., None]
"""writes the next token of each row"""
COMPILED = "decodes_compiled"
"""the attribute of a model whose decode steps are compiled, whether its layers are or not"""


def compile_decoding(model: nn.Module) -> None:
    """Compile the decode steps of the language models in `model` at their first call, on a GPU. Their weights are on
    it."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            setattr(part, COMPILED, True)
    for layer in compiling.layers(model):
        joined.join_weights(layer)


@contextlib.contextmanager
def decode_step(lm: PreTrainedModel, step: Step, choose: Choice, fixed: bool) -> Iterator[tuple[Step, Choice]]:
    """Yields functions for one fast decoding step of `lm`; their results are those of `step` and `choose` up to
    rounding.

    Weights that are sharded over the ranks do not change.
    step: ids [B, 1], mask of the tokens, positions [B, 1] and cache to logits of the next token, [B, V]
    fixed: whether the mask is bool [B, 1, 1, S] of the whole cache, so that shapes do not change with each step
    """
    if fixed and not _on_cpu(lm) and (getattr(lm, COMPILED, False) or attention.between_compiled(lm)):
        compiling.configure()
        with attention.inside(lm, attention.NAME), _multiplying(_linear_layers(lm, _whole), _JoinedLinear):
            compiled = compiling.compile_as_one_graph(step, _join_neighbours, checked=True)
            yield _varying(compiled), compiling.compile_as_one_graph(choose, _join_nothing, checked=True)
    elif fixed and attention.between_compiled(lm):
        own_kernels = cpu_operations.for_one_token(lm.dtype)
        attend = attention.ONE_TOKEN if own_kernels else attention.NAME
        layers = _linear_layers(lm, cpu_operations.fits if own_kernels else _sortable)
        with attention.inside(lm, attend), _multiplying(layers, _KernelLinear if own_kernels else _SortedLinear):
            yield _varying(compiling.compile_as_one_graph(step, _join_products)), choose
    else:
        layers = [layer for layer in _linear_layers(lm, _sortable) if not layer._forward_hooks]
        with compiling.eager(), _multiplying(layers, _SortedLinear):
            yield step, choose


def _on_cpu(lm: PreTrainedModel) -> bool:
    return lm.device.type == "cpu"


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


class _JoinedLinear(nn.Linear):
    """Multiplies by `joined.products`, in a compiled graph."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        return joined.products(x, [self.weight], [] if self.bias is None else [self.bias])


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


def _whole(weight: Tensor) -> bool:
    """Whether the weight is not a shard, which has one dimension."""
    return weight.dim() == 2


def _join_nothing(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """The graph stays as it is."""


def _join_products(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """Join products with the same input into one product of concatenated weights."""
    for nodes in _products_by_input(graph):
        _join(graph, nodes)


def _join_neighbours(graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """The same if their weights are neighbours in memory."""
    values = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
    for nodes in _products_by_input(graph):
        operands = {node: [[values[x] for x in cast(list[fx.Node], node.args[i])] for i in (1, 2)] for node in nodes}
        run: list[fx.Node] = []
        for node in sorted(nodes, key=lambda node: operands[node][0][0].data_ptr()):
            if run and not all(map(joined.adjacent, map(operator.add, operands[run[-1]], operands[node]))):
                _join(graph, run)
                run = []
            run.append(node)
        _join(graph, run)


def _products_by_input(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    by_states: dict[fx.node.Argument, list[fx.Node]] = {}
    for node in graph.nodes:
        if str(node.target).startswith(("rlhf.products", "rlhf.sorted_products", "rlhf.joined_products")):
            by_states.setdefault(node.args[0], []).append(node)
    return by_states.values()


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One product in place of several with the same input."""
    weights, biases = ([x for node in nodes for x in cast(list[fx.Node], node.args[i])] for i in (1, 2))
    if len(nodes) == 1 or len(biases) not in (0, len(weights)):
        return
    sizes = [node.meta["example_value"].shape[-1] for node in nodes]
    order = list(graph.nodes)
    with graph.inserting_before(min(nodes, key=order.index)):
        joint = graph.create_node("call_function", nodes[0].target, (nodes[0].args[0], weights, biases))
        offsets = zip(accumulate(sizes, initial=0), sizes, strict=False)
        slices = [graph.call_function(torch.narrow, (joint, -1, start, size)) for start, size in offsets]
    for node, product_slice in zip(nodes, slices, strict=True):
        node.replace_all_uses_with(product_slice)
        graph.erase_node(node)
