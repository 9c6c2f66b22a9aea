"""HRA: weights times a chain of Householder reflections (arXiv 2405.17484), by peft."""

import torch
from peft import HRAConfig
from pydantic import Field
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter, Targets
from rlhf.models.adapter_files import ONLY, tuner_layers

LEARNING_RATE = 1e-3
"""a reflection is of a vector's direction, so a step turns it by the rate over its length; docs/adapters.md has the
measurement"""


class Config(Targets):
    r: int = Field(8, ge=2, multiple_of=2)
    """reflections of each layer; even, so that they cancel in pairs at the start"""


def build(config: Config) -> "HRA":
    """The reflections start in equal pairs, which cancel."""
    return HRA(HRAConfig(r=config.r, target_modules=config.target_modules), LEARNING_RATE)


class HRA(PeftAdapter):
    """peft's pairs of reflections cancel up to rounding only, up to 0.07 nats in bf16. These cancel exactly."""

    @torch.no_grad()
    def wrap(self, model: PreTrainedModel) -> None:
        """Round each drawn vector u to one with the entries 0 and +-2^-j, of which m = 4^k are not 0.

        Then all numbers of I - 2 u u' / |u|^2 and of its square are sums of few powers of two. u keeps its largest
        entries, and nearly its length, on which the size of a step depends.
        """
        super().wrap(model)
        for _, layer in tuner_layers(model):
            vectors = layer.hra_u[ONLY]
            count = max(4**k for k in range(5) if 4**k <= len(vectors))
            largest = vectors.abs().topk(count, dim=0).indices
            size = (vectors.float().norm(dim=0) / count**0.5).log2().round().exp2().to(vectors)
            rounded = torch.zeros_like(vectors).scatter(0, largest, 1.0) * vectors.sign() * size
            vectors.copy_(rounded)
