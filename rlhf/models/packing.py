"""Rows of unequal length one after the other, [1, N], with no padding between: only attention tells them apart.

Whatever else a transformer computes it computes of each token alone. Attention of ours (rlhf/models/cpu/attention.py)
gathers rows of similar length, so that little is padding even there.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.maths import ops
from rlhf.models.cpu import attention, compiling, kernels
from rlhf.models.traits import keeps_all, takes
from rlhf.types import JoinedPairs

SIMILAR = 0.75
"""rows attend in one group that are at least this share of its longest"""
VECTOR = 64
"""bytes of a row of scores that a CPU computes at once; with a few more or less in the last ones, softmax takes up to
three times as long, and torch's attention up to twice"""
FLAG = "takes_packed_rows"
Visible = Callable[[Tensor], Tensor]
States = tuple[Tensor, Tensor]
"""keys and values of N tokens in one layer, [N, heads, d] each"""


@dataclass(frozen=True)
class Layout:
    """How N tokens are divided into rows, one after the other."""

    lengths: Tensor
    """[B] long, of each row"""
    dtype: torch.dtype
    """of the model"""
    visible: Visible | None = None
    """`visible(rows)`: which tokens of these rows see which, bool [rows, L, L], at least as wide as the longest;
    None = a token sees what stands before it in its row"""
    kept: list[States] | None = None
    """where each layer leaves its own, for a cache"""
    spans: Tensor | None = None
    """the rows and what they see, as `kernels.attend_rows` takes them; None = this machine cannot"""

    @functools.cached_property
    def padded(self) -> "Padded":
        return _padded(self.lengths, self.dtype, self.visible)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Leave the keys and values of a layer, [1, heads, N, d] each, for a cache if there will be one."""
        if self.kept is not None:
            self.kept.append((k[0].transpose(0, 1), v[0].transpose(0, 1)))


@dataclass(frozen=True, slots=True)
class Padded:
    """Where N tokens stand in padded rows, of which groups [B, L] lie beneath each other: G places."""

    groups: tuple[tuple[int, int, Tensor | None], ...]
    """B, L, and what is added to scores in [B, 1, L, L], None = a token sees what stands before it in its row"""
    tokens: Tensor
    """[G] long, the number of the token at each place; of padding, any"""
    empty: Tensor
    """[G] bool, True of padding"""
    places: Tensor
    """[N] long, the place of each token"""

    def attended(self, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What `attend(q, k, v, mask)` gives row by row. q, k, v [1, heads, N, d] -> [1, N, heads, d]"""
        spread = [_Taken.apply(x[0].transpose(0, 1), self.tokens, self.places, None) for x in (q, k, v)]
        sizes = [rows * width for rows, width, _ in self.groups]
        found = []
        for (rows, width, mask), *parts in zip(self.groups, *(x.split(sizes) for x in spread), strict=True):
            given = [part.unflatten(0, (rows, width)).transpose(1, 2) for part in parts]
            found.append(attend(*given, mask)[0].flatten(0, 1))
        collected: Tensor = _Taken.apply(torch.cat(found), self.places, self.tokens, self.empty)
        return collected[None]


class _Taken(torch.autograd.Function):
    """x[index]; but for padding every element is asked for once, so `back` tells where its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, empty: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, empty)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back, empty = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        if empty is not None:
            gradient.masked_fill_(empty[:, None, None], 0.0)
        return gradient, None, None, None


def _padded(lengths: Tensor, dtype: torch.dtype, visible: Visible | None) -> Padded:
    groups, tokens, empty = [], [], []
    starts, step = _starts(lengths), VECTOR // dtype.itemsize
    for rows in _similar(lengths):
        width = math.ceil(int(lengths[rows].max()) / step) * step
        column = torch.arange(width, device=lengths.device)
        missing = column >= lengths[rows, None]
        mask = None
        if visible is not None:
            seen = visible(rows)[:, None, :width, :width]
            short = width - seen.shape[-1]
            seen = torch.nn.functional.pad(seen, (0, short, 0, short))
            mask = torch.zeros((), dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
        groups.append((len(rows), width, mask))
        tokens.append((starts[rows, None] + column).masked_fill(missing, 0).flatten())
        empty.append(missing.flatten())
    token, padding = torch.cat(tokens), torch.cat(empty)
    places = torch.empty(int(lengths.sum()), dtype=torch.long, device=lengths.device)
    places[token[~padding]] = (~padding).nonzero().squeeze(1)
    return Padded(tuple(groups), token, padding, places)


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
class Reading:
    """How a causal model is asked about rows."""

    inputs: dict[str, Any]
    """the arguments of its forward pass, over [R, W] tokens"""
    states: Tensor
    """[B, S] long, where in [R * W] the state of each token is; off the mask, anywhere"""


def reading(model: Any, ids: Tensor, mask: Tensor, kept: list[States] | None = None) -> Reading:
    """Of the tokens of each row under its mask, ids and mask [B, S]: packed where the model takes that, else padded.

    kept: of packed rows, gets what `Layout.kept` says.
    """
    positions = ops.positions(mask)
    if packs(model):
        lengths = mask.sum(1)
        states = positions + _starts(lengths)[:, None]
        rows = Layout(lengths, model.dtype, kept=kept, spans=_spans(model, lengths, lengths, lengths))
        return Reading(_packed(ids[mask], positions[mask], rows), states.clamp(max=int(lengths.sum()) - 1))
    flushed = ops.flush_left(ids, mask)
    row = torch.arange(len(ids), device=ids.device)[:, None]
    return Reading({"input_ids": flushed}, positions.clamp(max=flushed.shape[1] - 1) + row * flushed.shape[1])


def reading_pairs(model: Any, pairs: JoinedPairs) -> Reading:
    """Of pairs in one row each; `states` of the ends of both sides, [B, 2]."""
    if packs(model):
        lengths = pairs.ends[:, 1] + 1
        second = pairs.ends[:, 0] + 1
        spans = _spans(model, lengths, torch.minimum((pairs.branch == 0).sum(1), second), second)
        rows = Layout(lengths, model.dtype, lambda rows: pairs[rows].visible(), spans=spans)
        states = pairs.ends + _starts(lengths)[:, None]
        return Reading(_packed(pairs.ids[pairs.mask], pairs.positions[pairs.mask], rows), states)
    hidden = torch.zeros((), dtype=model.dtype, device=pairs.ids.device)
    hidden = hidden.masked_fill(~pairs.visible()[:, None], torch.finfo(model.dtype).min)
    row = torch.arange(len(pairs), device=pairs.ids.device)[:, None]
    inputs = {"input_ids": pairs.ids, "attention_mask": hidden, "position_ids": pairs.positions}
    return Reading(inputs, pairs.ends + row * pairs.ids.shape[1])


def _spans(model: Any, lengths: Tensor, common: Tensor, second: Tensor) -> Tensor | None:
    """Tokens of a row from `second` on do not see those from `common` to there. [B] each -> [B, 4]"""
    if lengths.device.type != "cpu" or not compiling.compiled(model) or not kernels.for_rows(model.dtype):
        return None
    return torch.stack([_starts(lengths), common, second, lengths], dim=1)


def _packed(ids: Tensor, positions: Tensor, rows: Layout) -> dict[str, Any]:
    # With a mask of four dimensions transformers makes none of its own.
    mask = torch.zeros(1, 1, 1, 1, device=ids.device)
    return {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": mask, "layout": rows}


def packs(model: Any) -> bool:
    """Whether a transformers model takes packed rows: `allow` said so, and its attention is still ours."""
    return getattr(model, FLAG, False) and attention.used_by(model)


@torch.no_grad()
def allow(model: PreTrainedModel, whole: bool) -> None:
    """Find out whether `model` takes packed rows. Not if its states depend on more than attention and positions.

    One whose weights are whole is tried: packed rows must be far nearer to padded ones (a hundredth in fp32, half in
    bf16, whose rounding has no bound that holds for every model) than one row made of all of them is.
    """
    setattr(model, FLAG, _suited(model))
    if not whole or not packs(model):
        return
    lengths = torch.tensor([7, 12, 5, 11])
    mask = torch.arange(12) < lengths[:, None]
    known = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]  # an embedding: its weight is a tensor
    ids = torch.randint(known, mask.shape, generator=torch.Generator().manual_seed(0))
    ways = (reading(model, ids, mask).inputs, {"input_ids": ids[mask][None]}, {"input_ids": ids})
    try:
        found, one, padded = (model(**inputs, use_cache=False)[0].float() for inputs in ways)
    except (ValueError, RuntimeError, IndexError, TypeError):
        setattr(model, FLAG, False)
        return
    share = 1e-2 if model.dtype == torch.float32 else 0.5
    setattr(model, FLAG, bool((found[0] - padded[mask]).norm() < share * (one[0] - padded[mask]).norm()))


def _suited(model: PreTrainedModel) -> bool:
    # What attention of ours leaves for a cache would be wrong with latent attention, whose cache is compressed.
    other = getattr(model.config, "alibi", False) or getattr(model.config, "kv_lora_rank", None)
    return takes(model, "position_ids") and keeps_all(model.config) and not other
