"""What is sampled, and the keys and values behind it, in memory that a recorded step can read and write again.

On a GPU it stays between rollouts, while there is room for it: a graph is recorded for the memory that it had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.generation import _graphs
from rlhf.generation._cache import Block, move_to_front
from rlhf.generation._graphs import Graphs, signature
from rlhf.models.packing import States

ROUNDED = 128
"""tokens: on a GPU the cache has a multiple of it, and a step reads the first multiple that holds all tokens so far"""
USED = 0.9
"""share of a device's memory up to which the block stays in it while models train; what they need varies with the
lengths of the rows"""


@dataclass(frozen=True, slots=True)
class Table:
    """R of the B rows of a rollout, those that are sampled further; a column for each of the C tokens of the cache."""

    column: Tensor
    """[1] long, of the newest tokens"""
    rows: Tensor
    """[R] long, their numbers among B"""
    newest: Tensor
    """[R] long, the newest token of each"""
    positions: Tensor
    """[R] long, its position"""
    active: Tensor
    """[R] bool, False if the response has ended"""
    visible: Tensor
    """[R, C] bool, tokens that later ones see"""
    uniforms: Tensor
    """[B, C] double, random numbers"""
    tokens: Tensor
    """[B, C] long, those that were sampled"""
    logprobs: Tensor
    """[B, C] fp32"""
    sampled: Tensor
    """[B, C] bool, True for each token of a response"""

    @classmethod
    def empty(cls, rows: int, capacity: int, device: torch.device) -> "Table":
        by_row = [torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.long,) * 3 + (torch.bool,)]
        kinds = (torch.bool, torch.double, torch.long, torch.float, torch.bool)
        by_column = [torch.zeros(rows, capacity, dtype=dtype, device=device) for dtype in kinds]
        return cls(torch.zeros(1, dtype=torch.long, device=device), *by_row, *by_column)

    def part(self, rows: int, capacity: int) -> "Table":
        """The first rows and columns, in the same memory."""
        whole: dict[str, Tensor] = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: x[:rows] if x.dim() == 1 else x[:rows, :capacity] for name, x in whole.items()}
        return replace(self, **(parts | {"column": self.column}))

    def begin(self, mask: Tensor, positions: Tensor, uniforms: Tensor | None, pad_token_id: int) -> None:
        """Start a rollout of all rows. mask: of prompt tokens, [B, P] bool; positions: of each first token, [B];
        uniforms [B, T]. All are on the device."""
        start = mask.shape[1]
        self.column.fill_(start - 1)
        self.rows.copy_(torch.arange(len(self.rows), device=self.rows.device))
        self.positions.copy_(positions)
        self.active.fill_(True)
        self.visible.zero_()[:, :start] = mask
        if uniforms is not None:
            self.uniforms[:, start : start + uniforms.shape[1]] = uniforms
        self.tokens.fill_(pad_token_id)
        self.logprobs.zero_()
        self.sampled.zero_()

    def next_uniforms(self) -> Tensor:
        """[R], of the next column"""
        return self.uniforms.index_select(1, self.column + 1).squeeze(1)[self.rows]

    def append(self, token: Tensor, logprob: Tensor, ends: Sequence[int], pad_token_id: int) -> None:
        """Write a token of each row, [R], and its log-prob into the next column; after an end, padding and 0."""
        self.column.add_(1)
        cells, ended = (self.rows, self.column), ~self.active
        self.newest.copy_(token)
        self.tokens.index_put_(cells, token.masked_fill(ended, pad_token_id))
        self.logprobs.index_put_(cells, logprob.masked_fill(ended, 0.0).to(self.logprobs.dtype))
        self.sampled.index_put_(cells, self.active)
        for end in ends:
            self.active.logical_and_(token != end)

    def moved_to_front(self, remaining: Tensor) -> "Table":
        """Only the remaining of the R rows, [fewer] long, moved to the front of the same memory."""
        by_row = ("rows", "newest", "positions", "active", "visible")
        moved: dict[str, Tensor] = {name: move_to_front(getattr(self, name), remaining) for name in by_row}
        return replace(self, **moved)


class Memory:
    """The memory of a sampler. On a device whose steps are not recorded it is new for each rollout."""

    def __init__(self) -> None:
        self.graphs: Graphs | None = None
        """of the model of this rollout; None: its steps are not recorded"""
        self._device = torch.device("cpu")
        self._signature: object = None
        self._block: Block | None = None
        self._table: Table | None = None
        self._bytes_in_training: int | None = None  # of the block; None: no rollout has ended yet

    def begin(self, lm: PreTrainedModel, fixed: bool) -> None:
        """Start a rollout of a model. fixed: the shapes of its steps do not depend on the tokens so far"""
        self._device = lm.device
        if not fixed or _graphs.recorder(lm.device) is None:
            self._free()
        elif self._signature != (now := signature(lm)):
            self._renew_graphs()
            self._signature = now

    def capacity(self, tokens: int) -> int:
        """Tokens of a cache that has space for `tokens`, or of the part of it that a step reads."""
        return tokens if self.graphs is None else -(-tokens // ROUNDED) * ROUNDED

    def row_count(self, unfinished: int, rows: int) -> int:
        """How many of the rows stay when some have ended: where steps are recorded, a power of 2."""
        return unfinished if self.graphs is None else min(rows, 1 << (unfinished - 1).bit_length())

    def table(self, rows: int, capacity: int) -> Table:
        """A table of this many rows and columns."""
        if self.graphs is None:
            return Table.empty(rows, capacity, self._device)
        table = self._table
        if table is None or rows > table.visible.shape[0] or capacity > table.visible.shape[1]:
            self._renew_graphs()
            table = self._table = Table.empty(rows, capacity, self._device)
        return table.part(rows, capacity)

    def states(self, states: Sequence[States], rows: int, capacity: int) -> list[Tensor]:
        """Zeroed memory for keys and values, as of `Block.part`."""
        if self.graphs is None:
            return Block(states, rows, capacity).part(rows, capacity)
        if self._block is not None and self._block.fits(states, rows, capacity):
            self._block.zero()
        else:
            self._renew_graphs()
            self._block = None  # frees it first
            self._block = Block(states, rows, capacity)
        return self._block.part(rows, capacity)

    def release(self) -> None:
        """End a rollout: models train next, and need the memory, unless all fits beside the block as far as is known.

        What they need is known from the second rollout on.
        """
        if self._block is None:
            return
        known, before = self._bytes_in_training is not None, self._bytes_in_training or 0
        if known and stays_beside(self._block.bytes - before, *device_memory()):
            self._bytes_in_training = self._block.bytes
        else:
            self._bytes_in_training = 0
            self._free()

    def _renew_graphs(self) -> None:
        """Forget all graphs. Those to come have other memory for what lives within a step."""
        record = _graphs.recorder(self._device)
        self.graphs = None if record is None else Graphs(record)

    def _free(self) -> None:
        self.graphs = self._block = self._table = self._signature = None


def device_memory() -> tuple[float, float]:
    """Bytes of the GPU: the most that was allocated until now, and what this process can have."""
    free, _ = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), free + torch.cuda.memory_reserved()


def stays_beside(more: float, most: float, available: float) -> bool:
    """Whether `more` bytes beside the most that was allocated leave a part of the memory free."""
    return most + more <= USED * available
