"""Random numbers for sampling: every response has its own stream, on every rank and in every batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Uniform numbers in [0, 1), [B, length] in float64: row b is the start of the stream with the seed `keys[b]`.

    A response therefore depends neither on the number of ranks nor on the other responses of its batch.
    """
    return torch.from_numpy(np.stack([np.random.default_rng(key).random(length) for key in keys]))
