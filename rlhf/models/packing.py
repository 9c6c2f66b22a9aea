"""Packed rows: rows of unequal length in one sequence [1, N] without padding. Only attention separates them.

All other operations of a transformer are per token. Our attention (rlhf/kernels/attention.py) has kernels for rows
of any length; without one it groups rows of similar length, so that it has little padding too.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import kernels
from rlhf.maths import ops
from rlhf.models import variable_length
from rlhf.models.traits import has_argument, reach
from rlhf.models.variable_length import Rows
from rlhf.types import JoinedPairs, Sequences, to_device

SIMILAR = 0.75
"""least length of a row in a group, as a share of the longest row; a group attends as one padded batch"""
VECTOR = 64
"""bytes of a CPU's vector; if a row of scores is not a multiple of it, softmax takes up to three times as long, and
torch's attention up to twice"""
LONGEST = "longest_packed_row"
"""the attribute of a model with the result of `detect_support`: the most tokens of a row that it takes packed"""
States = tuple[Tensor, Tensor]
"""keys and values of N tokens in one layer, [N, heads, d] each"""


@dataclass(frozen=True)
class Layout:
    """How N tokens are divided into consecutive rows."""

    lengths: Tensor
    """[B] long, of each row"""
    dtype: torch.dtype
    """of the model"""
    device: torch.device
    """of the model; `lengths` may be on the CPU"""
    branch: Tensor | None = None
    """[N] long, of pairs in one row: as in `JoinedPairs`; None = a token sees the tokens before it in its row"""
    cache_states: list[States] | None = None
    """a list to which each layer appends its states, for a cache"""

    @functools.cached_property
    def padded(self) -> "Padded":
        return _padded(self)

    @functools.cached_property
    def rows(self) -> Rows:
        """The same for kernels that take rows of any length."""
        return Rows(self.lengths, self.branch, self.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """As `variable_length.attend`."""
        return variable_length.attend(q, k, v, self.rows, scale)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Append the keys and values of a layer, [1, heads, N, d] each, to `cache_states`, if there is a cache."""
        if self.cache_states is not None:
            self.cache_states.append((k[0].transpose(0, 1), v[0].transpose(0, 1)))


@dataclass(frozen=True, slots=True)
class Padded:
    """N tokens in padded rows: groups [B, L] of rows, with G slots for tokens in total."""

    groups: tuple[tuple[int, int, Tensor | None], ...]
    """B, L, and the additive mask [B, 1, L, L]; None = a token sees the tokens before it in its row"""
    tokens: Tensor
    """[G] long, the number of the token in each slot; arbitrary for padding"""
    empty: Tensor
    """[G] bool, True for padding"""
    slots: Tensor
    """[N] long, the slot of each token"""

    def attend_padded(self, attend: Callable[..., tuple[Tensor, None]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend(q, k, v, mask)` for every row. q, k, v [1, heads, N, d] -> [1, N, heads, d]"""
        padded = [_Gather.apply(x[0].transpose(0, 1), self.tokens, self.slots, None) for x in (q, k, v)]
        sizes = [rows * width for rows, width, _ in self.groups]
        outputs = []
        for (rows, width, mask), *chunks in zip(self.groups, *(x.split(sizes) for x in padded), strict=True):
            qkv = [chunk.unflatten(0, (rows, width)).transpose(1, 2) for chunk in chunks]
            outputs.append(attend(*qkv, mask)[0].flatten(0, 1))
        collected: Tensor = _Gather.apply(torch.cat(outputs), self.slots, self.tokens, self.empty)
        return collected[None]


class _Gather(torch.autograd.Function):
    """x[index]. Except for padding, each element is read once, so the gradient is gathered with `inverse`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, empty: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, empty)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, empty = ctx.saved_tensors
        gradient = gradients[0].index_select(0, inverse)
        if empty is not None:
            gradient.masked_fill_(empty[:, None, None], 0.0)
        return gradient, None, None, None


def _padded(layout: Layout) -> Padded:
    lengths, dtype = layout.lengths, layout.dtype
    groups, tokens, empty = [], [], []
    starts, step = _starts(lengths), VECTOR // dtype.itemsize
    for rows in _similar(lengths):
        width = math.ceil(int(lengths[rows].max()) / step) * step
        column = torch.arange(width, device=lengths.device)
        missing = column >= lengths[rows, None]
        mask = None
        if layout.branch is not None:
            i = torch.arange(width, device=layout.device)
            common, second = to_device(layout.rows.spans[rows, 1:3].T, layout.device)[:, :, None]
            apart = (i >= second)[:, :, None] & ((i >= common) & (i < second))[:, None]
            mask = torch.zeros((), dtype=dtype, device=layout.device)
            mask = mask.masked_fill(apart | (i[:, None] < i), torch.finfo(dtype).min)[:, None]
        groups.append((len(rows), width, mask))
        tokens.append((starts[rows, None] + column).masked_fill(missing, 0).flatten())
        empty.append(missing.flatten())
    token, padding = torch.cat(tokens), torch.cat(empty)
    slots = torch.empty(int(lengths.sum()), dtype=torch.long, device=lengths.device)
    slots[token[~padding]] = (~padding).nonzero().squeeze(1)
    return Padded(tuple(groups), *(to_device(x, layout.device) for x in (token, padding, slots)))


def _starts(lengths: Tensor) -> Tensor:
    """Number of the first token of each row. [B] -> [B]"""
    return lengths.cumsum(0) - lengths


def _similar(lengths: Tensor) -> Iterator[Tensor]:
    """Row numbers in groups of similar lengths, the longest first."""
    order = lengths.argsort(descending=True, stable=True)
    start, ordered = 0, lengths[order].tolist()
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] < SIMILAR * ordered[start]:
            yield order[start:end]
            start = end


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of a causal model for rows, and how to read its output."""

    inputs: Mapping[str, object]
    """the arguments of its forward pass, over [R, W] tokens, on its device"""
    states: Tensor
    """[B, S] long, the index in [R * W] of the state of each token; arbitrary off the mask. On the device of the
    rows"""


def model_inputs(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache_states: list[States] | None = None
) -> ModelInputs:
    """Inputs for the tokens under the mask, ids and mask [B, S]: packed if the model supports it, else padded.

    ids, mask: on the CPU, or on the device of the model, for which the host then waits
    cache_states: for packed rows, as in `Layout`
    """
    positions = ops.positions(mask)
    lengths = mask.sum(1)
    if packs(model, int(lengths.max())):
        states = positions + _starts(lengths)[:, None]
        rows = Layout(lengths, model.dtype, model.device, cache_states=cache_states)
        return ModelInputs(_packed(ids[mask], positions[mask], rows), states.clamp(max=int(lengths.sum()) - 1))
    flushed = ops.flush_left(ids, mask)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    inputs = {"input_ids": to_device(flushed, model.device)}
    return ModelInputs(inputs, positions.clamp(max=flushed.shape[1] - 1) + row * flushed.shape[1])


def pair_inputs(model: PreTrainedModel, pairs: JoinedPairs) -> ModelInputs:
    """Inputs for pairs in one row each; `states` are those at the ends of both sides, [B, 2]."""
    if packs_rows(model, pairs):
        lengths = pairs.ends[:, 1] + 1
        rows = Layout(lengths, model.dtype, model.device, pairs.branch[pairs.mask])
        states = pairs.ends + _starts(lengths)[:, None]
        return ModelInputs(_packed(pairs.ids[pairs.mask], pairs.positions[pairs.mask], rows), states)
    on_device = pairs.to(model.device)
    hidden = torch.zeros((), dtype=model.dtype, device=model.device)
    hidden = hidden.masked_fill(~on_device.visible()[:, None], torch.finfo(model.dtype).min)
    row = torch.arange(len(pairs), device=pairs.ids.device)[:, None]
    inputs = {"input_ids": on_device.ids, "attention_mask": hidden, "position_ids": on_device.positions}
    return ModelInputs(inputs, pairs.ends + row * pairs.ids.shape[1])


def _packed(ids: Tensor, positions: Tensor, rows: Layout) -> dict[str, object]:
    # With a mask of four dimensions transformers makes none of its own.
    mask = torch.zeros(1, 1, 1, 1, device=rows.device)
    ids, positions = to_device(ids[None], rows.device), to_device(positions[None], rows.device)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "layout": rows}


def packs(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a model supports packed rows of up to so many tokens, according to `detect_support`, and still has our
    attention, which knows no window."""
    return tokens <= getattr(model, LONGEST, 0) and kernels.installed(model)


def packs_rows(model: PreTrainedModel, rows: Sequences | JoinedPairs) -> bool:
    """Whether these rows are packed, so that no padding is computed."""
    return packs(model, int(rows.lengths.max()))


@torch.no_grad()
def detect_support(model: PreTrainedModel, unsharded: bool) -> None:
    """Test whether `model` supports packed rows: its states must depend on nothing but attention and positions.

    A model whose weights are whole (`unsharded`) is run: packed rows must be much nearer to padded rows (a hundredth in
    fp32, half in bf16, whose rounding has no bound that holds for every model) than a single row of all tokens is.
    """
    setattr(model, LONGEST, reach(model.config) if _suited(model) else 0)
    if unsharded and not _agrees(model):
        setattr(model, LONGEST, 0)


def _agrees(model: PreTrainedModel) -> bool:
    """Whether packed rows are near enough to padded ones, in a run."""
    lengths = torch.tensor([7, 12, 5, 11])
    if not packs(model, int(lengths.max())):
        return False
    mask = torch.arange(12) < lengths[:, None]
    vocabulary = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]  # an embedding: its weight is a tensor
    ids = torch.randint(vocabulary, mask.shape, generator=torch.Generator().manual_seed(0))
    single, rows = to_device(ids[mask][None], model.device), to_device(ids, model.device)
    inputs_to_compare = (model_inputs(model, ids, mask).inputs, {"input_ids": single}, {"input_ids": rows})
    try:
        packed, single_row, padded = (model(**inputs, use_cache=False)[0].float() for inputs in inputs_to_compare)
    except (ValueError, RuntimeError, IndexError, TypeError):
        return False
    share = 1e-2 if model.dtype == torch.float32 else 0.5
    return bool((packed[0] - padded[mask]).norm() < share * (single_row[0] - padded[mask]).norm())


def _suited(model: PreTrainedModel) -> bool:
    # Latent attention has a compressed cache, for which `cache_states` would be wrong.
    unsuitable = getattr(model.config, "alibi", False) or getattr(model.config, "kv_lora_rank", None)
    return has_argument(model, "position_ids") and not unsuitable
