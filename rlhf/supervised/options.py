"""Options of a stage that learns from a data set. Torch-free."""

from typing import ClassVar

from pydantic import Field

from data.config import BatchOptions, DataOptions
from rlhf.config.options import EngineOptions, OptimizerOptions, RunOptions


class SupervisedOptions(DataOptions, BatchOptions, EngineOptions, OptimizerOptions, RunOptions):
    """One model that is trained in passes over one data set."""

    STEP_ROWS: ClassVar[str | None] = "batch_size"
    TOTALS: ClassVar[frozenset[str]] = frozenset({"num_train_epochs"})

    model: str
    """model to start from"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data"""
