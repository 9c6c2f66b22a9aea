"""Random numbers for sampling: a stream of its own for every response, whoever draws it and beside what."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniforms(keys: Sequence[Sequence[int]], length: int) -> Tensor:
    """Numbers in [0, 1), [B, length] in float64: row b is the start of the stream that `keys[b]` names.

    So a response depends neither on the number of ranks nor on what else is generated at once.
    """
    return torch.from_numpy(np.stack([np.random.default_rng(key).random(length) for key in keys]))
