"""When a checkpoint is written: in the training loop, or beside it by a thread, from a copy of the state.

The thread writes, flushes and commits exactly what the loop would (rlhf.training.checkpoints). There is one at a time:
the next save, and the end of the run, wait for the one before, and what went wrong in it is told then at the latest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import console
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.training import checkpoints
from rlhf.training.checkpoints import Resumable


class Saver:
    """Writes the checkpoints of the stage in `directory`, with the lengths of its files of patterns `growing`; each
    rank has one."""

    def __init__(self, directory: Path, options: RunOptions, growing: Sequence[str] = ()) -> None:
        self._directory, self._keep, self._growing = directory, options.keep, growing
        beside = options.async_checkpoints
        self._thread = ThreadPoolExecutor(1) if beside else None
        self._group = collectives.group_for_threads(options.timeout_s) if beside else None
        self._writing: Future[str | None] | None = None
        self._step = 0
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self, step: int, state: Resumable, about: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to. Every rank calls this together."""
        self.wait()
        self._step = step
        arguments = self._directory, step, state, about, self._keep, self._growing
        if self._thread is None:
            self._tell(checkpoints.save(*arguments))
        else:
            self._writing = self._thread.submit(checkpoints.begin(*arguments, self._copied, self._group))

    def wait(self) -> None:
        """For the checkpoint that is being written. Raises: whatever the thread raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._tell(writing.result())

    def look(self) -> None:
        """Tell what has gone wrong with a checkpoint that was being written."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """What is being written is written before others may have the directory."""
        if self._thread is not None:
            self._thread.shutdown()

    def last(self) -> str:
        """The newest checkpoint, in words."""
        manifest = checkpoints.newest_manifest(self._directory)
        if manifest is None:
            return "there is no checkpoint"
        return f"the last checkpoint is {checkpoints.folder_of(self._directory, manifest['step'])}"

    def _tell(self, failure: str | None) -> None:
        if failure is not None:
            console.say(f"warning, step {self._step}: no checkpoint, {failure}; {self.last()}")

    def _copied(self, part: str, tensors: Iterator[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Into memory that is kept from save to save: fresh pages would take longer than the copy."""
        copies = []
        for name, tensor in tensors:
            copy = self._copies.get((part, name))
            if copy is None or copy.shape != tensor.shape:
                copy = self._copies[part, name] = torch.empty(
                    tensor.shape, dtype=torch.float32, pin_memory=tensor.is_cuda
                )
            copies.append((name, copy.copy_(tensor.detach())))
        return copies
