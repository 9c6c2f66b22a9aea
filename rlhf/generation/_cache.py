"""A key-value cache that is allocated once and filled from prompts of equal length together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from rlhf.models.packing import States


@dataclass(frozen=True, slots=True)
class Part:
    """Prompts that were read together."""

    states: Sequence[States]
    """of each layer"""
    rows: Tensor
    """[R] long, those of the whole that they become; a prompt that several responses continue is read once"""
    starts: Tensor
    """[R] long, number of the first token of each among the N"""


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
        tokens = self.get_seq_length()
        self._all = (self._all[0][indices], self._all[1][indices])
        self._see(tokens)


class WholeRoom(Room):
    """Attention gets all of the room, with a mask over what is yet empty: oneDNN would copy a part of it."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys, values, keys.shape[2])
        self._at = at  # long [1], the place of the next token in each layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._at, key_states)
        self.values.index_copy_(2, self._at, value_states)
        return self.keys, self.values


def left_padded(parts: Sequence[Part], lengths: Tensor, room: int, at: Tensor | None) -> DynamicCache:
    """One cache, with room for that many tokens a row, of prompts that were read in parts.

    lengths: real tokens of each row of the whole, [B]; they end at the same column, that of the longest.
    at: attention gets all of the room; there the next token goes, long [1]. None = it gets the tokens so far.
    """
    width = int(lengths.max())
    column = torch.arange(width, device=lengths.device) - width
    tokens = [  # left of a row, any
        ((part.starts + lengths[part.rows])[:, None] + column).clamp(0, len(part.states[0][0]) - 1) for part in parts
    ]
    cache = DynamicCache()
    for layer in zip(*(part.states for part in parts), strict=True):
        both = []
        for kind in zip(*layer, strict=True):  # keys, then values
            _, heads, size = kind[0].shape
            states = kind[0].new_zeros(len(lengths), heads, room, size)
            for part, token, read in zip(parts, tokens, kind, strict=True):
                states[part.rows, :, :width] = read[token].transpose(1, 2)
            both.append(states)
        cache.layers.append(Room(both[0], both[1], width) if at is None else WholeRoom(both[0], both[1], at))
    return cache
