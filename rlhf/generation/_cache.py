"""A key-value cache that is allocated once, for all tokens of a rollout."""

import math
from collections.abc import Sequence
from itertools import chain

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
        self.show(tokens)

    def show(self, tokens: int) -> None:
        """Let attention have the first `tokens` tokens of the buffers."""
        self.keys, self.values = (states[:, :, :tokens] for states in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        self.show(start + key_states.shape[2])
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        tokens, (keys, values) = self.get_seq_length(), self._buffers
        self._buffers = (move_to_front(keys, indices), move_to_front(values, indices))
        self.show(tokens)


def move_to_front(x: Tensor, indices: Tensor) -> Tensor:
    """The rows at `indices`, moved to the first rows of the same memory, which cannot be freed in parts."""
    return x[: len(indices)].copy_(x[indices])


class MaskedStaticLayer(StaticLayer):
    """A layer whose attention gets unused tokens too, with a mask over them: its shapes do not change with each step.

    On a CPU it gets the whole buffers: oneDNN would copy a slice.
    """

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__(keys, values, keys.shape[2])
        self._position = position  # long [1], the index of the next token in each layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._position, key_states)
        self.values.index_copy_(2, self._position, value_states)
        return self.keys, self.values


class Block:
    """Zeroed memory for the keys and values of all layers, in one piece."""

    def __init__(self, states: Sequence[States], rows: int, capacity: int) -> None:
        """states: of each layer, for heads, widths and dtype. capacity: tokens per row."""
        shapes = [(rows, heads, capacity, d) for heads, d in _shapes(states)]
        sizes = [math.prod(shape) for shape in shapes]
        self._memory = states[0][0].new_zeros(sum(sizes))
        self._tensors = [x.view(shape) for x, shape in zip(self._memory.split(sizes), shapes, strict=True)]
        self._kind, self._rows, self._capacity = _kind(states), rows, capacity

    @property
    def bytes(self) -> int:
        return self._memory.nbytes

    def fits(self, states: Sequence[States], rows: int, capacity: int) -> bool:
        """Whether a rollout of this many rows and tokens has space in it."""
        return self._kind == _kind(states) and rows <= self._rows and capacity <= self._capacity

    def zero(self) -> None:
        """Forget all states: hidden ones that are not finite would spoil those that are seen."""
        self._memory.zero_()

    def part(self, rows: int, capacity: int) -> list[Tensor]:
        """Keys and values of each layer in turn, [rows, heads, capacity, d] each."""
        return [x[:rows, :, :capacity] for x in self._tensors]


def _shapes(states: Sequence[States]) -> list[tuple[int, int]]:
    return [(x.shape[1], x.shape[2]) for layer in states for x in layer]


def _kind(states: Sequence[States]) -> tuple[object, ...]:
    return _shapes(states), states[0][0].dtype, states[0][0].device


class StaticCache:
    """The keys and values of all layers, filled from prompts that were processed together, left-padded to the longest.

    They share one block of memory.
    """

    def __init__(self, states: list[Tensor], lengths: Tensor) -> None:
        """states: a part of a `Block`. lengths [B]: prompt tokens of each row, on the CPU"""
        self._states, self._lengths, self._width = states, lengths, int(lengths.max())

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
