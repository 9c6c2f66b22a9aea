"""Options of supervised fine-tuning."""

from data.config import DataOptions
from rlhf.options import EngineOptions, OptimizerOptions, RunOptions


class SFTConfig(DataOptions, EngineOptions, OptimizerOptions, RunOptions):
    """Supervised fine-tuning of a causal language model on responses."""

    model: str = "opt-1.3b"
    """pretrained model: directory, hub id, short name or .yaml"""
    batch_size: int = 16
    """dialogues in an optimizer step, over all devices"""
    num_train_epochs: int = 1
    """passes over the data"""
    learning_rate: float = 2e-5
    """peak learning rate of AdamW"""
