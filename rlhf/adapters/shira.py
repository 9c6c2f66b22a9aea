"""SHiRA: a few weights of every matrix, chosen at random, are trained (arXiv 2406.13175), by peft."""

from typing import Any

import torch
from peft import ShiraConfig
from pydantic import Field
from torch import Tensor

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 3e-4
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.51"""


class Config(Targets):
    r: int = Field(32, ge=1)
    """as many weights of a layer as LoRA of this rank has: r * (inputs + outputs)"""
    random_seed: int = 42
    """seed of the choice, which is not saved"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0."""
    options = ShiraConfig(r=config.r, random_seed=config.random_seed, target_modules=config.target_modules)
    options.mask_fn = choose_weights  # type: ignore[assignment]  # other names of the same arguments
    return PeftAdapter(options, LEARNING_RATE)


def choose_weights(layer: Any, r: int, random_seed: int) -> Tensor:
    """A mask [outputs, inputs] of r (outputs + inputs) weights of a linear layer.

    It is peft's own, but on the CPU whatever the device of the layer: the plan's models have none.
    """
    rows, columns = layer.out_features, layer.in_features
    generator = torch.Generator("cpu").manual_seed(random_seed)
    chosen = torch.randperm(rows * columns, generator=generator, device="cpu")[: r * (rows + columns)]
    mask = torch.zeros(rows * columns, dtype=torch.bool, device="cpu")
    mask[chosen] = True
    return mask.view(rows, columns)
