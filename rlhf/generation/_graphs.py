"""Decode steps as CUDA graphs: on a GPU the host starts a recorded step at once, in place of 500 operations.

A recorded step reads and writes the memory that it had when it was recorded, and no number of the host reaches it. So a
step has no arguments and no result: it works on tensors that stay where they are (`_memory.py`). A step that needs the
host, such as a mixture of experts that counts the tokens of each, is not recorded.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Action = Callable[[], object]
Recorder = Callable[[Action], Action]
"""records a step without running it, and returns what runs it again"""
MOST = 32
"""graphs of a sampler: of steps that differ in rows, tokens in the cache, or temperature"""
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class CUDARecorder:
    """Records graphs that share the memory of what lives within a step: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Action) -> Action:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay


def recorder(device: torch.device) -> Recorder | None:
    """None: steps on this device are not recorded. On a CPU an operation starts without delay."""
    return CUDARecorder() if device.type == "cuda" else None


class Graphs:
    """The recorded steps of one model, for as long as its weights and the steps' tensors stay where they are."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._replays: dict[Hashable, Action] = {}  # the one that was used last is at the end
        self._can_record: bool | None = None

    def run(self, key: Hashable, step: Action, plain: Action) -> None:
        """Run a step: the recorded one, if one was recorded under `key`.

        The first step of all is `plain`, the same without a compiler: it shows whether steps can be recorded.
        """
        if self._can_record is None:
            with HostOperations() as host:
                plain()
            self._can_record = not host.first
            if host.first:
                _warn(f"{host.first} needs the host")
        elif not self._can_record:
            step()
        elif key in self._replays:
            self._replays[key] = replay = self._replays.pop(key)
            replay()
        else:
            self._run_and_record(key, step)

    def _run_and_record(self, key: Hashable, step: Action) -> None:
        step()  # libraries set up what they need, which cannot be recorded
        try:
            self._replays[key] = self._record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._can_record = False
            _warn(str(error).strip().splitlines()[0])
        if len(self._replays) > MOST:
            del self._replays[next(iter(self._replays))]


def _warn(reason: str) -> None:
    warnings.warn(
        f"decode steps run without a CUDA graph, which may take several times as long: {reason}", stacklevel=4
    )


class HostOperations(TorchDispatchMode):
    """Inside, operations are watched: those for which the host waits for the device, or that other processes share."""

    first: str = ""
    """the name of the first one; empty: there was none"""

    def __torch_dispatch__(self, op: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if not self.first and needs_host(op, args, kwargs or {}):
            self.first = op.name()
        return op(*args, **(kwargs or {}))


def needs_host(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host takes part in an operation on a device: it reads a number or a size, copies from its memory, or
    communicates."""
    if "c10d" in op.namespace or torch.Tag.data_dependent_output in op.tags:
        return True
    if op.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
        source = args[0] if op.overloadpacket is torch.ops.aten._to_copy else args[1]
        target = kwargs.get("device") or args[0].device
        return bool(source.device.type != torch.device(target).type)
    if op.overloadpacket in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        return any(x.dtype in (torch.bool, torch.uint8) or x.device != args[0].device for x in indices)
    return torch.Tag.dynamic_output_shape in op.tags


def signature(model: nn.Module) -> Hashable:
    """What a recorded pass of `model` depends on: where its weights are, and the plain attributes of its modules, such
    as the adapter that is active."""
    tensors = [*model.parameters(), *model.buffers()]
    modules = [
        (id(module), *(f"{name}={value}" for name, value in vars(module).items() if _plain(value)))
        for module in model.modules()
    ]
    return tuple(x.data_ptr() for x in tensors), tuple(modules)


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
