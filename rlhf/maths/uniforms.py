"""Streams of random numbers: each has a purpose and a key of its own, so no two draws of a run are the same numbers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ORDER, RESPONSES, MINI_BATCHES, EVALUATION, RESAMPLING = 1, 3, 4, 5, 6
"""purposes, the first word of a seed: the order of rows in an epoch; responses of a rollout; the order of its rows in
an update; responses of `rlhf evaluate`, `rlhf pairs` and `rlhf chat`; prompts in place of those whose responses score
alike. With other numbers a seed means another run."""


def stream(purpose: int, *key: int) -> np.random.Generator:
    """The stream of a purpose with this key, such as a seed and the number of an epoch."""
    return np.random.default_rng((purpose, *key))


def torch_stream(purpose: int, *key: int) -> torch.Generator:
    """The same of torch, on the CPU."""
    [seed] = np.random.SeedSequence((purpose, *key)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed))


def uniforms(keys: Sequence[Sequence[int]], length: int, purpose: int = RESPONSES) -> Tensor:
    """Uniform numbers in [0, 1), [B, length] in float64: row b is the start of the stream with the key `keys[b]`.

    A response therefore depends neither on the number of ranks nor on the other responses of its batch.
    """
    return torch.from_numpy(np.stack([stream(purpose, *key).random(length) for key in keys]))
