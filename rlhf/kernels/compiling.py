"""Layers under torch.compile: operations per token take one pass over memory instead of a dozen.

One graph serves all layers of all models of an architecture, for any number of tokens. Attention is not compiled.
"""

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.kernels import attention

R = TypeVar("R")


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of the transformers model in `model` at its first call."""
    configure()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            attention.exclude_from_compiling(part)
    for layer in layers(model):
        layer.compile(dynamic=True, backend=_compile_or_run_eagerly)


def _compile_or_run_eagerly(module: fx.GraphModule, inputs: list[Tensor]) -> object:
    """Compile a graph of a layer. If torch cannot compile it, it runs eagerly, with one warning.

    Other errors are not caught: the compiler uses some of them to request a retry.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError

    try:
        return compile_fx(module, inputs)
    except InductorError as error:
        _warn_uncompiled("a part of each layer", error)
        return module.forward


def _warn_uncompiled(subject: str, error: Exception) -> None:
    """One warning with the reason. A library of the cache that cannot be loaded has a cure: a compilation that was
    killed leaves half a file there, which torch takes for a whole one ever after."""
    reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    cure = ""
    if ".so:" in reason:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cure = f"; a killed run may have left half a file: delete torch's cache of compiled code, {cache_dir()}"
    _warn_once(f"--torch-compile: {subject} runs uncompiled: {reason}{cure}")


@functools.cache
def _warn_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def configure() -> None:
    """Graphs of each vector width have their own entries in the compiler's cache on disk.

    Otherwise a graph compiled with AVX-512 is used on a machine with AVX2 only (different machines that share a cache,
    or ATEN_CPU_CAPABILITY): its loops advance by 16 numbers but compute 8, and leave the others uninitialised.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = 64  # with and without gradients, a mask or packed rows, for each architecture
    inductor.cpp.simdlen = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())


def round_like_eager() -> None:
    """Make graphs that are compiled from now on round like eager operations.

    Otherwise bf16 log-probs of scoring and of training, which are different graphs, differ by 0.03. It costs 10 % time.
    """
    import torch._inductor.config as inductor

    inductor.emulate_precision_casts = True


@functools.cache
def compile_as_one_graph(
    function: Callable[..., R], rewrite: Callable[[fx.Graph, Sequence[Tensor]], None], checked: bool = False
) -> Callable[..., R]:
    """Compile `function`, which runs without gradients, as one graph changed by `rewrite`, which also gets its inputs.

    One graph has no Python overhead between operations. If it cannot be compiled, it runs eagerly, with one warning.
    checked: the graph rounds like separate operations, and its first results, if it has any, are compared with those of
    `function`, which can run twice on the same arguments.
    """
    from torch._dynamo.exc import TorchDynamoException

    newly_compiled, possible = False, True

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal newly_compiled
        from torch._inductor.compile_fx import compile_fx

        newly_compiled = True
        rewrite(module.graph, inputs)
        module.recompile()
        return compile_fx(module, inputs, config_patches={"emulate_precision_casts": True} if checked else None)

    graph = torch.compile(function, fullgraph=True, backend=backend)

    def run(*arguments: object) -> R:
        nonlocal newly_compiled, possible
        if possible:
            try:
                result = graph(*arguments)
                if newly_compiled:
                    newly_compiled = False
                    gc.collect()  # objects of the compiler refer to `arguments`, such as a cache
                    if checked and isinstance(result, Tensor):
                        with eager():
                            _require_alike(result, function(*arguments))
                return result
            except (TorchDynamoException, _Wrong) as error:
                possible = False
                _warn_uncompiled("a decode step", error)
        with eager():
            return function(*arguments)

    return run


class _Wrong(Exception):
    """A graph has other results than its function."""


def _require_alike(result: Tensor, expected: object) -> None:
    """Raises: _Wrong if the results of a graph are further from those of its function than rounding moves them, which
    is a hundredth in bf16; a mistake of indices gives other numbers altogether."""
    assert isinstance(expected, Tensor)
    finite = expected.isfinite()  # a token that is not in the vocabulary has a logit of -inf
    difference, size = (x.float().masked_fill(~finite, 0.0).norm() for x in (result - expected, expected))
    if not difference <= 0.1 * size:
        raise _Wrong("its results are wrong")


def layers(model: nn.Module, names: frozenset[str] = frozenset()) -> list[nn.Module]:
    """The layers: the outermost modules that transformers never splits over devices; `names`: of their classes.

    Their own modules, thousands with several adapters, are not visited.
    """
    if isinstance(model, PreTrainedModel):
        names |= frozenset(model._no_split_modules or ())
    if type(model).__name__ in names:
        return [model]
    return list(dict.fromkeys(layer for child in model.children() for layer in layers(child, names)))


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Inside, layers run eagerly: with a growing cache they would be compiled for every length."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def require_compiler(device: torch.device) -> None:
    """Raises: UserError if torch finds no compiler."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "--torch-compile: torch finds no C++ compiler; install one (g++), name it in CXX, or remove the option"
        ) from None
