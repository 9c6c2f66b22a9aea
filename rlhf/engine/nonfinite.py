"""Numbers that training must not go on from: named and counted, and after too many in a row the end of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.distributed import collectives
from rlhf.storage import disk
from rlhf.types import SampledRollout, Sequences

SHOWN = 8
"""rows that a message lists"""


class NonFiniteError(ArithmeticError):
    """The run must end. `batch` is what the last number that is not finite was made of, `rows` its numbers in the
    training data."""

    def __init__(self, message: str, batch: Any = None, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.batch, self.rows = batch, tuple(rows)


@dataclass
class Tolerance:
    """Counts what was left out because a number was not finite: a few may pass, `limit` in a row end the run."""

    limit: int
    in_a_row: int = 0

    def passed(self) -> None:
        """All numbers were finite."""
        self.in_a_row = 0

    def left_out(self, where: str, what: Sequence[str], rows: Sequence[int], batch: Any) -> None:
        """Say what was left out; every rank calls this together.

        where: `step 7`; what: `loss is nan`, as this rank knows it; rows: the training rows it may come from.
        Raises: NonFiniteError, on every rank, if it is the `limit`th in a row.
        """
        self.in_a_row += 1
        seen = collectives.gather_objects((tuple(what), tuple(rows)))
        names = dict.fromkeys(name for names, _ in seen for name in names)
        said = f"{where}: {', '.join(names)}{_rows(sorted({row for _, part in seen for row in part}))}"
        if self.in_a_row >= self.limit:
            times = f", {self.limit} times in a row" if self.limit > 1 else ""
            advice = "expected a finite number. Lower --learning-rate, or look for a broken row in this batch"
            raise NonFiniteError(f"{said}{times}; {advice}", batch, rows)
        console.say(
            f"warning, {said}; left out, nothing was learned from it ({self.in_a_row} of {self.limit} in a row)"
        )


def _rows(rows: Sequence[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f" (training rows {', '.join(map(str, rows[:SHOWN]))}{more})"


def save_batch(folder: Path, error: NonFiniteError, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write this rank's part of the offending batch: its tensors, and as JSON the message, the rows and their text."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    texts: list[str] = []
    _collect(error.batch, "", tensors, texts, tokenizer)
    name = f"rank-{collectives.rank()}"
    disk.save_tensors(tensors, folder / f"{name}.safetensors")
    disk.write_json(folder / f"{name}.json", {"message": str(error), "rows": list(error.rows), "texts": texts})


def _collect(
    value: Any, path: str, tensors: dict[str, Tensor], texts: list[str], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Every tensor of nested records and tuples by its path, and the text of every sequence."""
    if isinstance(value, Tensor):
        tensors[path.rstrip(".")] = value.detach().cpu().clone().contiguous()
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            _collect(part, f"{path}{i}.", tensors, texts, tokenizer)
    elif is_dataclass(value):
        if isinstance(value, SampledRollout | Sequences) and tokenizer is not None:
            whole = value.sequences if isinstance(value, SampledRollout) else value
            texts += [str(tokenizer.decode(ids[kept])) for ids, kept in zip(whole.ids, whole.mask, strict=True)]
        for field in fields(value):
            _collect(getattr(value, field.name), f"{path}{field.name}.", tensors, texts, tokenizer)
