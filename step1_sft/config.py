"""Options of supervised fine-tuning."""

from pydantic import Field

from data.config import DataOptions
from rlhf.options import EngineOptions, OptimizerOptions, RunOptions


class SFTConfig(DataOptions, EngineOptions, OptimizerOptions, RunOptions):
    """Supervised fine-tuning of a causal language model on responses."""

    model: str = "opt-1.3b"
    """pretrained model: directory, hub id, short name or .yaml"""
    batch_size: int = Field(16, ge=1)
    """dialogues in an optimizer step, over all devices"""
    num_train_epochs: int = Field(1, ge=1)
    """passes over the data"""
    learning_rate: float = Field(2e-5, ge=0)
    """peak learning rate of AdamW"""
