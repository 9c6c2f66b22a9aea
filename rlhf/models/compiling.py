"""Layers under torch.compile: what is computed of each token alone takes one pass over memory instead of a dozen.

One graph serves all layers of all models of an architecture, for any number of tokens. Attention stays as it is.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from rlhf.config import UserError
from rlhf.models import attention


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of the transformers model in `model`, when it is first run."""
    import torch._dynamo.config as settings

    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attention))
    settings.recompile_limit = 64  # with and without gradients, a mask or packed rows, for each architecture
    settings.suppress_errors = True  # what cannot be compiled runs as it was written
    for layer in _layers(model):
        layer.compile(dynamic=True)


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
