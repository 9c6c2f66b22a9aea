"""Checkpoints are written in the training loop, or (--async-checkpoints) by a thread, from a copy of the state.

The thread writes, flushes and commits the same files as the loop (rlhf.training.checkpoints). Only one checkpoint is
written at a time: the next save and the end of the run wait for it, and report its failure at the latest.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf import console
from rlhf.config.options import RunOptions
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.hub.untrusted import PlainErrors
from rlhf.training import checkpoints
from rlhf.training.checkpoints import Background, Resumable


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Errors of a disk that is full, whichever library reports them, become a UserError that names the folder."""
    try:
        with PlainErrors():
            yield
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ValueError) and "os error" not in str(error):  # tokenizers knows no OSError
            raise
        raise UserError(f"{folder}: cannot be written ({error}); free space there and run again") from None


class Saver:
    """Writes the checkpoints of the stage in `directory`; each rank has one Saver."""

    def __init__(self, directory: Path, options: RunOptions) -> None:
        self._directory, self._keep = directory, options.keep
        in_thread = options.async_checkpoints
        self._thread = ThreadPoolExecutor(1) if in_thread else None
        self._group = collectives.group_for_threads(options.timeout_s) if in_thread else None
        self._writing: Future[str | None] | None = None
        self._step = 0
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self, step: int, state: Resumable, about: Mapping[str, object]) -> None:
        """Write the checkpoint of `step`, or start writing it. Every rank calls this together."""
        self.wait()
        self._step = step
        if self._thread is None:
            self._report(checkpoints.save(self._directory, step, state, about, self._keep))
            return
        final, background = checkpoints.folder_of(self._directory, step), Background(self._copy, self._group)
        self._writing = self._thread.submit(
            checkpoints.begin(final, state, {**about, "step": step}, self._keep, background)
        )

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises: any error of the thread."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._report(writing.result())

    def report_failure(self) -> None:
        """Report a failure of the checkpoint that is being written, if it is done. Does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """Wait for the thread, before other processes may use the directory."""
        if self._thread is not None:
            self._thread.shutdown()

    def last(self) -> str:
        """A clause for messages that names the newest checkpoint."""
        manifest = checkpoints.newest_manifest(self._directory)
        if manifest is None:
            return "there is no checkpoint"
        return f"the last checkpoint is {checkpoints.folder_of(self._directory, manifest['step'])}"

    def _report(self, failure: str | None) -> None:
        if failure is not None:
            console.say(f"warning, step {self._step}: no checkpoint, {failure}; {self.last()}")

    def _copy(self, part: str, tensors: Iterator[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Copy into memory that is reused from save to save: new pages would take longer than the copy."""
        copies = []
        for name, tensor in tensors:
            copy = self._copies.get((part, name))
            if copy is None or copy.shape != tensor.shape:
                copy = self._copies[part, name] = torch.empty(
                    tensor.shape, dtype=torch.float32, pin_memory=tensor.is_cuda
                )
            copies.append((name, copy.copy_(tensor.detach())))
        return copies
