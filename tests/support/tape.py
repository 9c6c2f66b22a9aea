"""A graph without a GPU: operations are recorded with the memory that they had, and run again on it.

As a CUDA graph it knows nothing of Python: a number or a tensor that the host exchanges afterwards does not reach it.
As CUDA it refuses to record what needs the host, and recording changes no memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.generation._graphs import Action, needs_host


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree.tree_leaves(x) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """The operations of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # of each memory that is written, its bytes, and a copy

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if needs_host(op, args, kwargs):
            raise RuntimeError(f"{op} is not permitted while a graph is recorded")
        for argument, x in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        result = op(*args, **kwargs)
        self.operations.append((op, args, kwargs, tensors(result)))
        return result

    def rewind(self) -> None:
        for x, before in self._before.values():
            x.copy_(before)

    def replay(self) -> None:
        for op, args, kwargs, results in self.operations:
            again = tensors(op(*args, **kwargs))
            for x, new in zip(results, again, strict=True):
                if x.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    x.copy_(new)


class Recorder:
    """In place of `CUDARecorder`; `tapes` has all that were recorded."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __call__(self, step: Action) -> Action:
        tape = Tape()
        with tape:
            step()
        tape.rewind()
        self.tapes.append(tape)
        return tape.replay
