"""A key-value cache that is allocated once, for all tokens to come."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from rlhf.models.packing import States


class Room(DynamicLayer):
    """The keys and values of one layer, [B, heads, tokens so far, d] each: views of what has room for more.

    transformers' own layer copies all of them for every new token.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._all = (keys, values)
        self._see(tokens)

    def _see(self, tokens: int) -> None:
        self.keys, self.values = (states[:, :, :tokens] for states in self._all)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        self._see(start + key_states.shape[2])
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        tokens, (keys, values) = self.get_seq_length(), self._all
        self._all = (_first(keys, indices), _first(values, indices))
        self._see(tokens)


def _first(states: Tensor, indices: Tensor) -> Tensor:
    """Those at `indices`, where the first ones were: of memory in one piece nothing is freed before all is."""
    return states[: len(indices)].copy_(states[indices])


class WholeRoom(Room):
    """Attention gets all of the room, with a mask over what is yet empty: oneDNN would copy a part of it."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys, values, keys.shape[2])
        self._at = at  # long [1], the place of the next token in each layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._at, key_states)
        self.values.index_copy_(2, self._at, value_states)
        return self.keys, self.values


class Rooms:
    """The keys and values of all layers, filled from prompts that were read together, left-padded to the longest.

    They lie in one piece of memory, which the next rollout finds free again as a whole.
    """

    def __init__(self, states: Sequence[States], lengths: Tensor, room: int) -> None:
        """states: of each layer, for their shapes. lengths: tokens of each row [B], of `room` for all."""
        shapes = [(len(lengths), x.shape[1], room, x.shape[2]) for layer in states for x in layer]
        sizes = [math.prod(shape) for shape in shapes]
        whole = states[0][0].new_zeros(sum(sizes))
        self._states = [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
        self._lengths, self._width = lengths, int(lengths.max())

    def fill(self, states: Sequence[States], rows: Tensor, starts: Tensor) -> None:
        """rows: those that prompts become, [R] long; what several responses continue is read once. starts: the first
        token of each among those of `states`, [R] long."""
        column = torch.arange(self._width, device=starts.device) - self._width
        tokens = (starts + self._lengths[rows])[:, None] + column
        tokens = tokens.clamp(0, len(states[0][0]) - 1)  # left of a row, any
        for into, read in zip(self._states, chain.from_iterable(states), strict=True):
            into[rows, :, : self._width] = read[tokens].transpose(1, 2)

    def cache(self, at: Tensor | None) -> DynamicCache:
        """at: attention gets all of the room; there the next token goes, long [1]. None = it gets the tokens so far."""
        cache = DynamicCache()
        for keys, values in zip(self._states[::2], self._states[1::2], strict=True):
            cache.layers.append(Room(keys, values, self._width) if at is None else WholeRoom(keys, values, at))
        return cache
