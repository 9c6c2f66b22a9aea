"""Options of the reward model."""

from typing import ClassVar

from pydantic import Field

from data.config import BatchOptions, DataOptions
from rlhf.config.options import EngineOptions, OptimizerOptions, RunOptions


class RewardConfig(DataOptions, BatchOptions, EngineOptions, OptimizerOptions, RunOptions):
    """A pairwise reward model: a language model's backbone under one scalar."""

    TOTALS: ClassVar[frozenset[str]] = frozenset({"num_train_epochs"})

    model: str = "opt-350m"
    """pretrained model, or the directory of a finished step 1: directory, hub id, short name or .yaml"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data; more than one overfits human preferences"""
    learning_rate: float = Field(1e-5, ge=0)
    """peak learning rate of AdamW"""
    centering: float = Field(0.0, ge=0)
    """weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual"""
