"""Layers under torch.compile: what is computed of each token alone takes one pass over memory instead of a dozen.

One graph serves all layers of all models of an architecture, for any number of tokens. Attention stays as it is.
"""

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.cpu import attention


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of the transformers model in `model`, when it is first run."""
    import torch._dynamo.config as settings

    _cache_by_width()
    settings.recompile_limit = 64  # with and without gradients, a mask or packed rows, for each architecture
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            attention.leave_out(part)
    for layer in _layers(model):
        layer.compile(dynamic=True, backend=_or_as_written)


def _or_as_written(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A part of a layer, compiled; one that torch cannot compile runs as it was written, which is said once.

    Other errors pass: with some of them the compiler asks to be called again."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError

    try:
        return compile_fx(module, inputs)
    except InductorError as error:
        _say_uncompiled("a part of each layer", error)
        return module.forward


def _say_uncompiled(what: str, error: Exception) -> None:
    reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    _say_once(f"--torch-compile: {what} runs uncompiled: {reason}")


@functools.cache
def _say_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def _cache_by_width() -> None:
    """Let graphs of each vector width have entries of their own in the compiler's cache on disk.

    Without this a graph made with AVX-512 is read where AVX2 is the most there is (a cache that unequal machines share,
    or ATEN_CPU_CAPABILITY): its loops take 16 numbers a turn, compute 8, and leave the others as memory had them.
    """
    import torch._inductor.config as settings

    settings.cpp.simdlen = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())


def compiled(model: nn.Module) -> bool:
    """Whether `compile_layers` was asked for it."""
    return any(layer._compiled_call_impl is not None for layer in _layers(model))


@functools.cache
def whole(function: Callable[..., Tensor], rewrite: Callable[[fx.Graph], None]) -> Callable[..., Tensor]:
    """`function`, which runs a model and knows no gradients, as one graph, after `rewrite`: without the work between
    operations. Where it cannot be one it runs as it was written, which is said once.
    """
    from torch._dynamo.exc import TorchDynamoException

    new, possible = False, True

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal new
        from torch._inductor.compile_fx import compile_fx

        new = True
        rewrite(module.graph)
        module.recompile()
        return compile_fx(module, inputs)

    graph = torch.compile(function, fullgraph=True, backend=backend)

    def run(*arguments: Any) -> Tensor:
        nonlocal new, possible
        if possible:
            try:
                found = graph(*arguments)
                if new:
                    new = False
                    gc.collect()  # what the compiler leaves refers to `arguments`, such as a cache
                return found
            except TorchDynamoException as error:
                possible = False
                _say_uncompiled("a decode step", error)
        with eager():
            return function(*arguments)

    return run


def vary(x: Tensor, *dimensions: int) -> None:
    """Tell the compiler that these dimensions of `x` have other sizes in other calls."""
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(x, dimension)


def round_alike() -> None:
    """Have what is compiled from now on round like separate operations. In bf16 log-probs of scoring and of training,
    which are different graphs, are 0.03 apart otherwise; it takes a tenth more time."""
    import torch._inductor.config as settings

    settings.emulate_precision_casts = True


def _layers(model: nn.Module) -> list[nn.Module]:
    """Those that transformers never splits over devices."""
    names = {
        name for part in model.modules() if isinstance(part, PreTrainedModel) for name in part._no_split_modules or ()
    }
    return [part for part in model.modules() if type(part).__name__ in names]


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Meanwhile layers run as they were written: with a cache that grows they would be compiled for every length."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def unguarded() -> Any:
    """For calls like the last: it is not looked at whether a graph still holds, only what tells it from others."""
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def require_compiler(device: torch.device) -> None:
    """Raises: UserError where torch finds nothing to compile with."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "--torch-compile: torch finds no C++ compiler; install one (g++), name it in CXX, or leave the option out"
        ) from None
