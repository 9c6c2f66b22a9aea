"""A rollout's key-value cache beside one that is put together row by row."""

import pytest
import torch
from torch import Tensor

from rlhf.generation._cache import Block, MaskedStaticLayer, StaticCache, StaticLayer

LAYERS, HEADS, SIZE, ROOM = 2, 3, 4, 9
LENGTHS = (2, 5, 3, 5)


def filled(at: Tensor | None) -> tuple[list[StaticLayer], list[tuple[Tensor, Tensor]]]:
    """The layers of a cache, and the states [tokens, heads, size] of which rows 0 and 2, then 1 and 3, are made; the
    last two are one prompt that several responses continue."""
    draw = torch.Generator().manual_seed(0)
    first, second = (
        [tuple(torch.randn(n, HEADS, SIZE, generator=draw) for _ in range(2)) for _ in range(LAYERS)] for n in (5, 5)
    )
    rooms = StaticCache(Block(first, len(LENGTHS), ROOM).part(len(LENGTHS), ROOM), torch.tensor(LENGTHS))
    rooms.fill(first, torch.tensor([0, 2]), torch.tensor([0, 2]))
    rooms.fill(second, torch.tensor([1, 3]), torch.tensor([0, 0]))
    return rooms.cache(at).layers, [*first, *second]  # type: ignore[return-value]


@pytest.mark.parametrize("at", [None, torch.tensor([5])])
def test_each_row_holds_its_prompt_and_ends_where_the_longest_does(at: Tensor | None) -> None:
    layers, states = filled(at)
    for i, layer in enumerate(layers):
        for cached, first, second in zip((layer.keys, layer.values), states[i], states[LAYERS + i], strict=True):
            assert cached.shape == (4, HEADS, ROOM if at is not None else 5, SIZE)
            for row, expected in enumerate((first[:2], second, first[2:], second)):
                assert torch.equal(cached[row, :, 5 - len(expected) : 5], expected.transpose(0, 1))


@pytest.mark.parametrize("at", [None, torch.tensor([5])])
def test_dropping_rows_moves_the_others_and_takes_no_new_memory(at: Tensor | None) -> None:
    layers, _ = filled(at)
    assert len({layer.keys.untyped_storage().data_ptr() for layer in layers}) == 1
    addresses = [layer.keys.data_ptr() for layer in layers]
    expected = [layer.keys[[1, 3]].clone() for layer in layers]
    for layer in layers:
        layer.batch_select_indices(torch.tensor([1, 3]))
    assert [layer.keys.data_ptr() for layer in layers] == addresses
    token = torch.randn(2, HEADS, 1, SIZE, generator=torch.Generator().manual_seed(1))
    for layer, before in zip(layers, expected, strict=True):
        keys, _ = layer.update(token, token)
        assert keys.shape[2] == (6 if at is None else ROOM)
        assert torch.equal(keys[:, :, :5], before[:, :, :5])
        assert torch.equal(keys[:, :, 5:6], token)
        assert isinstance(layer, MaskedStaticLayer) == (at is not None)
