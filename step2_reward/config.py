"""Options of the reward model."""

from data.config import DataOptions
from rlhf.options import EngineOptions, OptimizerOptions, RunOptions


class RewardConfig(DataOptions, EngineOptions, OptimizerOptions, RunOptions):
    """A pairwise reward model: a language model's backbone under one scalar."""

    model: str = "opt-350m"
    """pretrained model, or the directory of a finished step 1: directory, hub id, short name or .yaml"""
    batch_size: int = 16
    """pairs in an optimizer step, over all devices"""
    num_train_epochs: int = 1
    """passes over the data; more than one overfits human preferences"""
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    centering: float = 0.0
    """weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual"""
