"""Non-finite numbers: they are reported and counted, their step is skipped, and too many in a row end the run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.distributed import collectives
from rlhf.storage import disk
from rlhf.types import Metrics, SampledRollout, Sequences

SHOWN = 8
"""rows that a message lists"""


class NonFiniteError(ArithmeticError):
    """The run must end.

    batch: the batch of the last non-finite number; rows: its row numbers in the training data
    """

    def __init__(self, message: str, batch: object = None, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.batch, self.rows = batch, tuple(rows)


@dataclass
class Tolerance:
    """Counts the steps that were skipped because of a non-finite number; `limit` in a row end the run."""

    limit: int
    in_a_row: int = 0

    def reset(self) -> None:
        """All numbers were finite."""
        self.in_a_row = 0

    def skip(self, title: str, problems: Sequence[str], rows: Sequence[int], batch: object) -> None:
        """Count and report a skipped step; every rank calls this together.

        title: such as `step 7`; problems: of this rank, such as `loss is nan`; rows: training rows that may cause it
        Raises: NonFiniteError, on every rank, if it is the `limit`th in a row.
        """
        self.in_a_row += 1
        reports = collectives.gather_objects((tuple(problems), tuple(rows)))
        names = dict.fromkeys(name for names, _ in reports for name in names)
        message = f"{title}: {', '.join(names)}{_rows(sorted({row for _, rank_rows in reports for row in rank_rows}))}"
        if self.in_a_row >= self.limit:
            times = f", {self.limit} times in a row" if self.limit > 1 else ""
            advice = "expected a finite number. Lower --learning-rate, or check the rows of this batch"
            raise NonFiniteError(f"{message}{times}; {advice}", batch, rows)
        console.say(
            f"warning, {message}; skipped, nothing was learned from it ({self.in_a_row} of {self.limit} in a row)"
        )


def is_skipped(metrics: Metrics) -> bool:
    """Whether nothing was learned from a step, or from any optimizer step of an iteration."""
    whole = metrics.get("skipped") or metrics.get("skipped_iteration")
    return bool(whole) or 0 < metrics.get("optimizer_steps", 0.0) <= metrics.get("skipped_steps", 0.0)


def _rows(rows: Sequence[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f" (training rows {', '.join(map(str, rows[:SHOWN]))}{more})"


def save_batch(folder: Path, error: NonFiniteError, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write this rank's share of the non-finite batch: its tensors, and as JSON the message, the rows and their
    text."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    texts: list[str] = []
    _collect(error.batch, "", tensors, texts, tokenizer)
    name = f"rank-{collectives.rank()}"
    disk.save_tensors(tensors, folder / f"{name}.safetensors")
    disk.write_json(folder / f"{name}.json", {"message": str(error), "rows": list(error.rows), "texts": texts})


def _collect(
    value: object, path: str, tensors: dict[str, Tensor], texts: list[str], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Every tensor of nested records and tuples by its path, and the text of every sequence."""
    if isinstance(value, Tensor):
        tensors[path.rstrip(".")] = value.detach().cpu().clone().contiguous()
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _collect(item, f"{path}{i}.", tensors, texts, tokenizer)
    elif is_dataclass(value):
        if isinstance(value, SampledRollout | Sequences) and tokenizer is not None:
            sequences = value.sequences if isinstance(value, SampledRollout) else value
            texts += [str(tokenizer.decode(ids[mask])) for ids, mask in zip(sequences.ids, sequences.mask, strict=True)]
        for field in fields(value):
            _collect(getattr(value, field.name), f"{path}{field.name}.", tensors, texts, tokenizer)
