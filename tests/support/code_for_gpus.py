"""What torch's compiler writes for a GPU that is not here: the kernels that a graph launches there.

Graphs are traced on the CPU. Before the compiler plans kernels, their tensors claim to be on `cuda:0`, an H100 of
which it asks a few properties. It writes the code of all kernels, and of the program that launches them; nothing of it
is compiled further or runs. A graph runs as it was traced.
"""

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch._inductor.config
import torch.utils._triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch.fx.node import map_aggregate
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 * 2**30,
)  # fmt: skip
LAUNCH = re.compile(
    r"(?:\w+ = )?((?:triton_\w+)(?=\.run\()|(?:extern_kernels|aten|torch\.ops)\.[\w.]+(?=\())|\S+\.copy_(?=\()"
)


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    properties = {
        "is_available": True, "get_device_properties": H100, "get_compute_capability": 90, "current_device": 0,
        "is_bf16_supported": True,
    }  # fmt: skip
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    with contextlib.ExitStack() as stack:
        for name, value in properties.items():
            for kind in (CudaInterface, CudaInterface.Worker):
                if hasattr(kind, name):
                    answer: Any = staticmethod(lambda *_, value=value, **__: value)
                    stack.enter_context(patch.object(kind, name, answer))
        for module, name, result in (
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_properties", lambda *_: H100),
            (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
            (AsyncCompile, "triton", lambda *_, **__: MagicMock()),
            (torch.utils._triton, "has_triton", lambda: True),
            (torch._inductor.scheduler, "has_triton", lambda: True),
        ):
            stack.enter_context(patch.object(module, name, result, create=True))
        stack.enter_context(patch.object(driver, "_active", target))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1))
        yield


def _moved(x: Any) -> Any:
    """The same on the GPU: a device, a tensor without numbers, or a list of them."""
    if isinstance(x, torch.device):
        return CUDA if x.type == "cpu" else x
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)
    return type(x)(map(_moved, x)) if type(x) in (list, tuple) else x


def _compile_for_cuda(module: fx.GraphModule, inputs: list[Any], **options: Any) -> object:
    mode: Any = torch._guards.detect_fake_mode(inputs)
    with mode:
        for node in module.graph.nodes:
            node.args, node.kwargs = (map_aggregate(x, _moved) for x in (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = _moved(node.meta["val"])
        inputs = [_moved(x) for x in inputs]
    with _pretended():
        return compile_fx.compile_fx_inner(module, inputs, **options)


@contextlib.contextmanager
def launches() -> Iterator[list[list[str]]]:
    """Yields a list that gets, for each graph that is compiled inside, the names of what it launches in turn."""
    graphs: list[list[str]] = []
    real = compile_fx.compile_fx

    def compile_graph(module: fx.GraphModule, inputs: list[Any], **options: Any) -> object:
        if "inner_compile" in options:  # it calls itself
            return real(module, inputs, **options)
        real(module, inputs, inner_compile=_compile_for_cuda, **options)
        return module.forward

    def read(source: str) -> None:
        body = source[source.index("def call(") :].splitlines()
        found = [LAUNCH.match(line.strip()) for line in body]
        graphs.append([match[1] or "copy" for match in found if match])

    with (
        patch.object(compile_fx, "compile_fx", compile_graph),
        patch.object(GraphLowering, "save_output_code", staticmethod(read)),
    ):
        yield graphs
