"""Options of supervised fine-tuning."""

from typing import ClassVar, Literal

from pydantic import Field

from data.config import BatchOptions, DataOptions
from rlhf.config.options import EngineOptions, OptimizerOptions, RunOptions


class SFTConfig(DataOptions, BatchOptions, EngineOptions, OptimizerOptions, RunOptions):
    """Supervised fine-tuning of a causal language model on responses."""

    TOTALS: ClassVar[frozenset[str]] = frozenset({"num_train_epochs"})

    model: str = "opt-1.3b"
    """pretrained model: directory, hub id, short name or .yaml"""
    objective: Literal["response", "text"] = "response"
    """response = learn responses to prompts; text = continued pretraining on rows of plain text, packed end to end into
    contexts of max_length tokens, in which a token attends to the texts before its own too"""
    loss_on: Literal["last", "every", "all"] = "last"
    """what is learned of a dialogue: the last assistant turn, every assistant turn, or everything"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data"""
    learning_rate: float = Field(2e-5, ge=0)
    """peak learning rate of AdamW"""
