"""A device `gpu:0` without a GPU: tensors that claim to be there and compute on the CPU.

An operation on tensors of two devices raises, and every wait of the host for the device is counted by the line of the
product that causes it. On a real GPU the host runs ahead of the device, and such a wait leaves the device without work.
Gradients work too: torch has one device type for backends of others, which may be written in Python.

`install` cannot be undone, so it is for processes that a test starts (tests/support/device_runs.py).
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = torch.device("cpu"), "gpu:0"
aten = torch.ops.aten

SIZED_BY_DATA = {  # their results have a size that only the data decide
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.equal.default,
}
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
NUMBERS = {*INDEXING, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}

_waits: Counter[str] = Counter()


class OnGPU(Tensor):
    """A tensor that claims to be on `gpu:0`; `value` is on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> "OnGPU":
        wrapper: OnGPU = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.shape, value.stride(), value.storage_offset(), dtype=value.dtype, device=torch.device(GPU)
        )
        wrapper.value = value
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGPU({self.value})"

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Any) -> None:  # as DeepSpeed lets weights be views of one flat tensor
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.value = other.value

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor on a GPU has no numpy(); copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation on tensors of one device, which are on that device."""
    own: list[OnGPU] = []
    cpu_tensors: list[Tensor] = []

    def on_cpu(x: Any) -> Any:
        if isinstance(x, Tensor):
            (own if isinstance(x, OnGPU) else cpu_tensors).append(x)
            return x.value if isinstance(x, OnGPU) else x
        if isinstance(x, list | tuple):
            return [on_cpu(each) for each in x]
        return CPU if _is_gpu(x) else x

    def on_gpu(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(on_gpu(each) for each in x)
        if not isinstance(x, Tensor):
            return x
        return inputs[id(x)] if id(x) in inputs else OnGPU(x)

    target = kwargs.get("device")
    values, named = on_cpu(args), {name: on_cpu(x) for name, x in kwargs.items()}
    if op not in COPIES:
        _refuse_mixed(op, args, own, cpu_tensors)
    _count(op, args, kwargs, target)
    result = op(*values, **named)
    if target is not None and not _is_gpu(torch.device(target)):
        return result
    if op is aten.copy_.default and not isinstance(args[0], OnGPU):
        return args[0]
    inputs = {id(x.value): x for x in own}  # operations in place return their argument
    return on_gpu(result)


def _is_gpu(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "gpu"


def _refuse_mixed(op: Any, args: Any, own: list[Any], cpu_tensors: list[Tensor]) -> None:
    """As CUDA: a number without dimensions may be on the CPU in an operation per element."""
    if op in INDEXING:
        args = (args[0], *args[2:3])  # indices may be on the CPU, from where they are copied
        cpu_tensors = [x for x in args if isinstance(x, Tensor) and not isinstance(x, OnGPU)]
    alone = [x for x in cpu_tensors if x.dim() or not (torch.Tag.pointwise in op.tags or op in NUMBERS)]
    if own and alone:
        shapes = [list(x.shape) for x in alone]
        raise RuntimeError(f"{op}: got tensors on gpu:0 and on cpu {shapes}, expected one device")


def _count(op: Any, args: Any, kwargs: Any, target: Any) -> None:
    """Count the operation if the host waits in it."""
    waits = op in SIZED_BY_DATA
    if op in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        waits = isinstance(args[0], OnGPU) and any(x.dtype == torch.bool or not isinstance(x, OnGPU) for x in indices)
    elif op is aten._to_copy.default:
        moves = target is not None and _is_gpu(torch.device(target)) != isinstance(args[0], OnGPU)
        waits = moves and not kwargs.get("non_blocking")
    elif op is aten.copy_.default:
        blocking = not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
        waits = isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU) and blocking
    if waits and (op not in COPIES or args[0].numel()):
        _waits[f"{_line()} {op.name().removeprefix('aten::')}"] += 1


def _line() -> str:
    """File, line and function of the product from which the operation was called."""
    frame = sys._getframe(1)
    while frame is not None:
        path, anonymous = Path(frame.f_code.co_filename), frame.f_code.co_name.startswith("<")
        if (
            not anonymous
            and path.is_relative_to(ROOT)
            and not path.is_relative_to(ROOT / "tests")
            and "site-packages" not in path.parts
        ):
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name} line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of `torch.gpu`. The device has no random numbers of its own: nor may the product use any."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _: Any = None) -> None:
        torch.set_rng_state(state)


def _swap(parameter: Any, moved: Any) -> None:
    """Let a parameter be `moved`, as on CUDA: else a module that moves had new parameters, and tied ones were tied no
    longer. torch's own function refuses parameters that something refers to weakly."""
    for name in ("__class__", "__dict__"):
        before = getattr(parameter, name)
        setattr(parameter, name, getattr(moved, name))
        setattr(moved, name, before)
    torch._C._swap_tensor_impl(parameter, moved)


def install() -> torch.device:
    """Give this process the device, for good; before any backward pass, which would start no thread for it."""
    backend_registration._setup_privateuseone_for_python_backend("gpu", _Module())
    torch._C._set_only_lift_cpu_tensors(True)  # for torch.tensor(..., device=)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = _swap
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    own.impl("_pin_memory", lambda x, device=None: x.clone(), "CPU")
    _Module.libraries = every, own  # type: ignore[attr-defined]  # they end with their objects
    return torch.device(GPU)


def current() -> torch.device:
    """The device of this process: the GPU after `use_for_training`, before it the CPU."""
    from rlhf.distributed import collectives

    return collectives.local_device()


@contextlib.contextmanager
def waits() -> Iterator[Counter[str]]:
    """Yields how often the host waits inside, by line of the product and operation."""
    before, counted = Counter(_waits), Counter[str]()
    yield counted
    counted.update(_waits - before)


def use_for_training(device: torch.device) -> None:
    """Let DeepSpeed, and the product, take the device for that of this process."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from rlhf.distributed import collectives

    class Accelerator(CPU_Accelerator):
        def device_name(self, index: int | None = None) -> str:
            return device.type if index is None else f"{device.type}:{index}"

        def current_device_name(self) -> str:
            return GPU

        def current_device(self) -> int:
            return 0

        def is_fp16_supported(self) -> bool:  # a CPU computes it, slowly
            return True

    real_accelerator.set_accelerator(Accelerator())
    collectives.local_device = lambda: device
