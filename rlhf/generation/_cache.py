"""A key-value cache that is allocated once, for all tokens of a rollout."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from rlhf.models.packing import States
from rlhf.types import to_device


class StaticLayer(DynamicLayer):
    """The keys and values of one layer, [B, heads, tokens so far, d] each: views of larger buffers.

    transformers' own layer copies all keys and values for every new token.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._buffers = (keys, values)
        self._set_length(tokens)

    def _set_length(self, tokens: int) -> None:
        self.keys, self.values = (states[:, :, :tokens] for states in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        self._set_length(start + key_states.shape[2])
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        tokens, (keys, values) = self.get_seq_length(), self._buffers
        self._buffers = (_first(keys, indices), _first(values, indices))
        self._set_length(tokens)


def _first(states: Tensor, indices: Tensor) -> Tensor:
    """The rows at `indices`, moved to the first rows of the same memory, which cannot be freed in parts."""
    return states[: len(indices)].copy_(states[indices])


class MaskedStaticLayer(StaticLayer):
    """A layer whose attention gets the whole buffers, with a mask over unused tokens: oneDNN would copy a slice."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__(keys, values, keys.shape[2])
        self._position = position  # long [1], the index of the next token in each layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._position, key_states)
        self.values.index_copy_(2, self._position, value_states)
        return self.keys, self.values


class StaticCache:
    """The keys and values of all layers, filled from prompts that were processed together, left-padded to the longest.

    They share one block of memory, which is freed as a whole before the next rollout.
    """

    def __init__(self, states: Sequence[States], lengths: Tensor, capacity: int) -> None:
        """states: of each layer, for the shapes. lengths [B]: prompt tokens of each row, on the CPU. capacity: tokens
        per row."""
        shapes = [(len(lengths), x.shape[1], capacity, x.shape[2]) for layer in states for x in layer]
        sizes = [math.prod(shape) for shape in shapes]
        buffer = states[0][0].new_zeros(sum(sizes))
        self._states = [tensor.view(shape) for tensor, shape in zip(buffer.split(sizes), shapes, strict=True)]
        self._lengths, self._width = lengths, int(lengths.max())

    def fill(self, states: Sequence[States], rows: Tensor, starts: Tensor) -> None:
        """Copy prompts into rows of the cache; several rows may share a prompt.

        rows [R] long: row numbers. starts [R] long: index of the row's first prompt token in `states`. Both on the CPU
        """
        column, device = torch.arange(self._width) - self._width, self._states[0].device
        tokens = (starts + self._lengths[rows])[:, None] + column
        tokens = to_device(tokens.clamp(0, len(states[0][0]) - 1), device)  # padding may have any states
        rows = to_device(rows, device)
        for target, source in zip(self._states, chain.from_iterable(states), strict=True):
            target[rows, :, : self._width] = source[tokens].transpose(1, 2)

    def cache(self, position: Tensor | None) -> DynamicCache:
        """A cache for transformers.

        position: index of the next token, long [1]: attention over the whole buffers with a mask; None: attention over
        the tokens so far
        """
        cache = DynamicCache()
        for keys, values in zip(self._states[::2], self._states[1::2], strict=True):
            if position is None:
                cache.layers.append(StaticLayer(keys, values, self._width))
            else:
                cache.layers.append(MaskedStaticLayer(keys, values, position))
        return cache
