"""A key-value cache that is allocated once and filled from prompts of equal length together."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer


class _Room(DynamicLayer):
    """The keys and values of one layer, [B, heads, tokens so far, d] each: views of what has room for `tokens`.

    transformers' own layer copies all of them for every new token. On a CPU keys lie transposed in memory, as one new
    token wants to read them; the kernels of GPUs want them as they are.
    whole: attention gets all of the room, with a mask over what is yet empty. oneDNN would copy a part of it.
    """

    def __init__(self, tokens: int, whole: bool) -> None:
        super().__init__()
        self._tokens, self._whole = tokens, whole

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Begin with these, [B, heads, length, d]."""
        self.lazy_initialization(keys, values)
        rows, heads, _, width = keys.shape
        if keys.device.type == "cpu":
            self._keys = keys.new_zeros(rows, heads, width, self._tokens).transpose(2, 3)
        else:
            self._keys = keys.new_zeros(rows, heads, self._tokens, width)
        self._values = values.new_zeros(rows, heads, self._tokens, values.shape[-1])
        self._put(keys, values, 0, length)

    def _put(self, keys: Tensor, values: Tensor, start: int, end: int) -> None:
        self._keys[:, :, start:end], self._values[:, :, start:end] = keys, values
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self._put(key_states, value_states, start, end)
        seen = slice(None) if self._whole else slice(end)
        return self._keys[:, :, seen], self._values[:, :, seen]

    def get_mask_sizes(self, *new: int) -> tuple[int, int]:
        return (self._tokens, 0) if self._whole else super().get_mask_sizes(*new)

    def batch_select_indices(self, indices: Tensor) -> None:
        end = self.get_seq_length()
        turned = self._keys.device.type == "cpu"
        self._keys = self._keys.mT[indices].mT if turned else self._keys[indices]
        self._values = self._values[indices]
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]


def left_padded(parts: list[tuple[DynamicCache, Tensor]], lengths: Tensor, room: int, whole: bool) -> DynamicCache:
    """One cache, with room for that many tokens a row, of prompts that were read in parts.

    parts: caches of right-padded rows, and which rows of the whole each row of them becomes (a prompt that several
    responses continue is read once): long [rows of the part, 2] of (row of the part, row of the whole).
    lengths: real tokens of each row of the whole, [B]; they end at the same column, that of the longest.
    whole: attention gets all of the room.
    """
    width = int(lengths.max())
    cache = DynamicCache()
    for i, layer in enumerate(parts[0][0].layers):
        both = []
        for name in ("keys", "values"):
            first = getattr(layer, name)
            states = first.new_zeros(len(lengths), first.shape[1], width, first.shape[3])
            for part, (source, target) in ((part, where.unbind(1)) for part, where in parts):
                read = getattr(part.layers[i], name)
                column = torch.arange(width, device=read.device) - width + lengths[target, None]
                column = column.clamp(0, read.shape[2] - 1)[:, None, :, None]
                states[target] = read[source].gather(2, column.expand(-1, read.shape[1], -1, read.shape[3]))
            both.append(states)
        kept = _Room(room, whole)
        kept.fill(both[0], both[1], width)
        cache.layers.append(kept)
    return cache
