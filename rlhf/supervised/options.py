"""Options of a stage that learns from a data set. Torch-free."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from data.config import BatchOptions, DataOptions
from rlhf.config.options import ModelPath, RunOptions, TrainingOptions

_INTERVAL = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>epochs?)?")


def _interval(text: str) -> str:
    parsed = _INTERVAL.fullmatch(text)
    if parsed is None or float(parsed["number"]) == 0 or not (parsed["unit"] or parsed["number"].isdecimal()):
        raise ValueError("expected a number of optimizer steps such as 100, or of epochs such as 0.5epochs")
    return text


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Interval = Annotated[str, BeforeValidator(_as_text), AfterValidator(_interval)]
"""`100`: optimizer steps; `0.5epochs`: a multiple of the optimizer steps of an epoch."""


class SupervisedOptions(DataOptions, BatchOptions, TrainingOptions, RunOptions):
    """One model that is trained in passes over one data set."""

    STEP_ROWS: ClassVar[str | None] = "batch_size"
    TOTALS: ClassVar[frozenset[str]] = frozenset({"num_train_epochs"})
    NOTED: ClassVar[frozenset[str]] = frozenset({"eval_every", "patience"})

    model: ModelPath
    """model to start from"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """share of activations that are dropped in training, wherever the architecture has a dropout (Llama: in attention);
    0 whatever the model's config has; with LoRA in the frozen model"""
    eval_every: Interval | None = None
    """optimizer steps (100) or epochs (0.5epochs) between evaluations on the held-out rows; none: after every epoch. It
    does not change training"""
    keep_best: str | None = None
    """metric of these evaluations; the model with its best value is the result, not the last model"""
    patience: int | None = Field(None, ge=1)
    """evaluations in a row without a better keep_best after which the run ends; none: no limit"""

    def idle(self) -> Iterator[str]:
        if self.patience is not None and self.keep_best is None:
            yield f"--patience {self.patience} without --keep-best"
        if self.keep_best is not None and self.eval_every is None and self.num_train_epochs == 1:
            yield f"--keep-best {self.keep_best} without --eval-every in one epoch, which has one evaluation"

    @model_validator(mode="after")
    def _dropout_on_whole_models(self) -> Self:
        if self.dropout and self.tensor_parallel_size > 1:
            raise ValueError(
                "dropout: expected tensor_parallel_size 1, because the ranks of a split model would drop different "
                "activations of the same row"
            )
        return self


def steps_between(interval: str | None, steps_per_epoch: int) -> int:
    """The optimizer steps of an Interval, at least 1; of None those of an epoch."""
    parsed = _INTERVAL.fullmatch(interval or "1epochs")
    assert parsed is not None, interval
    number = float(parsed["number"])
    return max(1, round(number * steps_per_epoch)) if parsed["unit"] else int(number)
