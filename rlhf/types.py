"""The frozen records that flow through the pipeline, and the legend of their shapes.

B rows (rollouts), P prompt tokens, T response tokens, S = tokens of a whole sequence, V vocabulary.
A mask is True where a token is real (or counts); it is made where the tokens are made and is never
derived from ids, because OPT and many others use one id for BOS, EOS and padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, before any tokenizer.

    `prompt` is a dialogue that ends before the response. A demonstration has `response`; a preference
    has also `rejected` (`response` is the chosen side); a row for prompts only has neither.
    Rows with one `group` always land in the same split; by default the group is the prompt's text.
    `columns` holds what else the source knows and a reward function may want.
    Preferences with one `ranking`, other than "", are pairs of one ranked list: they weigh as much as one pair.
    """

    prompt: tuple[Message, ...]
    response: str | None = None
    rejected: str | None = None
    group: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    ranking: str = ""


class TensorRecord:
    """Slicing and moving for records whose fields are tensors with the same first dimension B, or tuples of B."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]  # every subclass is a dataclass

    def __getitem__(self, index: Any) -> Self:
        """The rows of `index`: a slice, or a LongTensor [b] of row numbers."""
        return self._map(lambda value: _rows(value, index))

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda value: value.to(device) if isinstance(value, Tensor | TensorRecord) else value)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one part after the other; their tensors are of one width."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}  # type: ignore[arg-type]  # as above
        return cls(**{name: _concatenated(values) for name, values in columns.items()})

    def _map(self, change: Any) -> Self:
        changes = {f.name: change(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]  # as above
        return replace(self, **changes)  # type: ignore[type-var]  # as above


def _rows(value: Any, index: Any) -> Any:
    if value is None or isinstance(value, Tensor | TensorRecord):
        return None if value is None else value[index]
    if isinstance(index, slice):
        return value[index]
    return tuple(value[i] for i in index.tolist())


def _concatenated(values: Sequence[Any]) -> Any:
    if values[0] is None or isinstance(values[0], Tensor):
        return None if values[0] is None else torch.cat(list(values))
    return tuple(item for value in values for item in value)


@dataclass(frozen=True, slots=True)
class Sequences(TensorRecord):
    """Whole token sequences: what a model is scored or trained on."""

    ids: Tensor
    """[B, S] long"""
    mask: Tensor
    """[B, S] bool, True where a token is real"""
    loss_mask: Tensor
    """[B, S] bool, True where a token is predicted and counts (never the first real token of a row)"""

    @property
    def lengths(self) -> Tensor:
        """[B] real tokens."""
        return self.mask.sum(1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.mask, self.loss_mask

    def trimmed(self) -> "Sequences":
        """Without the columns that are padding in every row."""
        used = self.mask.any(0)
        return Sequences(self.ids[:, used], self.mask[:, used], self.loss_mask[:, used])


def _padded(x: Tensor, left: int = 0, right: int = 0) -> Tensor:
    """`x` [B, S] with zeros on one side, up to `left` or `right` columns."""
    return torch.nn.functional.pad(x, (max(0, left - x.shape[1]), max(0, right - x.shape[1])))


def _stack_padded(first: Tensor, second: Tensor) -> Tensor:
    """[B, S1] over [B, S2], padded on the right with 0 to the longer."""
    width = max(first.shape[1], second.shape[1])
    return torch.cat([_padded(x, right=width) for x in (first, second)])


@dataclass(frozen=True, slots=True)
class Pairs(TensorRecord):
    """B preferences; row b of `chosen` is preferred to row b of `rejected`."""

    chosen: Sequences
    rejected: Sequences
    margin: Tensor | None = None
    """[B] float, how much better the chosen side is, if the source says"""
    weight: Tensor | None = None
    """[B] float, 1 over the pairs of the same ranked list; None = 1"""

    @property
    def lengths(self) -> Tensor:
        """[B] real tokens of the longer side."""
        return torch.maximum(self.chosen.lengths, self.rejected.lengths)

    def stacked(self) -> Sequences:
        """Both sides as one batch of 2B rows, the chosen ones first."""
        sides = zip(self.chosen.tensors(), self.rejected.tensors(), strict=True)
        return Sequences(*(_stack_padded(c, r) for c, r in sides))

    def joined(self) -> "JoinedPairs":
        """Every pair as one row, in which what its sides begin with stands once. Both sides are right-padded."""
        (c, c_mask), (r, r_mask) = (self.chosen.tensors()[:2], self.rejected.tensors()[:2])
        lengths, width = (self.chosen.lengths, self.rejected.lengths), min(c.shape[1], r.shape[1])
        same = (c[:, :width] == r[:, :width]) & c_mask[:, :width] & r_mask[:, :width]
        # Each side keeps a token of its own, at which its score is read.
        common = torch.minimum(same.long().cumprod(1).sum(1), torch.minimum(*lengths) - 1)
        first, common = lengths[0][:, None], common[:, None]
        ends = torch.stack([lengths[0] - 1, sum(lengths) - common.squeeze(1) - 1], dim=1)
        column = torch.arange(int(ends.max()) + 1, device=c.device).expand(len(c), -1)
        positions = torch.where(column < first, column, column - first + common)
        positions = positions.clamp(max=max(c.shape[1], r.shape[1]) - 1)  # of padding
        ids = _stack_padded(c, r)
        chosen, rejected = (side.gather(1, positions) for side in ids.chunk(2))
        branch = (column >= common).long() + (column >= first)
        return JoinedPairs(torch.where(column < first, chosen, rejected), positions, branch, ends)


@dataclass(frozen=True, slots=True)
class JoinedPairs(TensorRecord):
    """B preferences, each in one row: what both sides begin with, the rest of the chosen side, that of the rejected."""

    ids: Tensor
    """[B, S] long"""
    positions: Tensor
    """[B, S] long, of each token in its own side"""
    branch: Tensor
    """[B, S] long: 0 common, 1 the chosen side alone, 2 the rejected side alone, padding included"""
    ends: Tensor
    """[B, 2] long, where the chosen and the rejected side end"""

    @property
    def mask(self) -> Tensor:
        """[B, S] bool, True where a token is real"""
        return torch.arange(self.ids.shape[1], device=self.ids.device) <= self.ends[:, 1:]

    def visible(self) -> Tensor:
        """Whether the token at the row's place sees the one at the column's: bool [B, S, S]."""
        size = self.ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.ids.device).tril()
        return causal & ~((self.branch == 2)[:, :, None] & (self.branch == 1)[:, None, :])


@dataclass(frozen=True, slots=True)
class Prompts(TensorRecord):
    """Left-padded prompts for generation."""

    ids: Tensor
    """[B, P] long"""
    mask: Tensor
    """[B, P] bool"""
    rows: tuple[Row, ...]
    """the B source rows, for reward functions and sample tables"""


@dataclass(frozen=True, slots=True)
class Rollout(TensorRecord):
    """Responses sampled from the policy, y ~ pi_old(. | x); scoring fills the fields that start as None."""

    prompt_ids: Tensor
    """[B, P] long, left-padded"""
    prompt_mask: Tensor
    """[B, P] bool"""
    response_ids: Tensor
    """[B, T] long, right-padded"""
    mask: Tensor
    """[B, T] bool, True on the tokens the policy chose, the EOS included, nothing after it"""
    sampled_logprobs: Tensor
    """[B, T] log-probs at the moment of sampling, at the sampling temperature, 0 off the mask"""
    ended: Tensor
    """[B] bool, True where the response closed with EOS, False where it was cut at T"""
    rows: tuple[Row, ...]
    logprobs: Tensor | None = None
    """[B, T] log-probs of the training forward under the sampling policy: the old log-probs of PPO"""
    ref_logprobs: Tensor | None = None
    """[B, T]"""
    values: Tensor | None = None
    """[B, T] critic's value of the state in which token t was chosen"""
    scores: Tensor | None = None
    """[B] what the reward sources say of the whole response, together"""
    source_scores: Tensor | None = None
    """[B, N] what each of the N reward sources says, before its weight"""

    @property
    def sequences(self) -> Sequences:
        """Prompt and response joined, [B, P + T], with the response as loss mask."""
        return Sequences(
            ids=torch.cat([self.prompt_ids, self.response_ids], dim=1),
            mask=torch.cat([self.prompt_mask, self.mask], dim=1),
            loss_mask=torch.cat([torch.zeros_like(self.prompt_mask), self.mask], dim=1),
        )

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens, EOS included."""
        return self.mask.sum(1)

    def response_tokens(self) -> list[list[int]]:
        """The ids of each response, EOS included, without padding."""
        return [ids[kept].tolist() for ids, kept in zip(self.response_ids, self.mask, strict=True)]

    def trimmed(self) -> "Rollout":
        """Without the columns that are padding in every row: P and T of these rows."""
        width = int(self.lengths.max())
        prompt = self.prompt_mask.any(0)
        narrow = {name: value[:, :width] for name, value in self._by_token().items()}
        narrow |= {"prompt_ids": self.prompt_ids[:, prompt], "prompt_mask": self.prompt_mask[:, prompt]}
        return replace(self, **narrow)

    def widened(self, prompt: int, response: int) -> "Rollout":
        """With padding up to P = `prompt` on the left and T = `response` on the right: zeros under masks of False."""
        wide: dict[str, Any] = {name: _padded(value, right=response) for name, value in self._by_token().items()}
        wide |= {name: _padded(getattr(self, name), left=prompt) for name in ("prompt_ids", "prompt_mask")}
        return replace(self, **wide)

    def _by_token(self) -> dict[str, Any]:
        """The fields [B, T] that are known."""
        names = ("response_ids", "mask", "sampled_logprobs", "logprobs", "ref_logprobs", "values")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Credit(TensorRecord):
    """What an algorithm makes of a scored rollout."""

    advantages: Tensor
    """[B, T], 0 off the mask"""
    returns: Tensor
    """[B, T] targets of the critic, 0 off the mask"""

    def widened(self, response: int) -> "Credit":
        """With zeros on the right up to T = `response`."""
        return Credit(_padded(self.advantages, right=response), _padded(self.returns, right=response))


@dataclass(frozen=True, slots=True)
class Samples:
    """Text of B prompts and responses, for reward sources."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    rollout: Rollout


Metrics = dict[str, float]


def length_groups(lengths: Tensor, size: int) -> list[Tensor]:
    """Row numbers in groups of at most `size` with similar lengths together, so that little is padding. lengths [B]."""
    return list(lengths.argsort(descending=True, stable=True).split(size))


def token_groups(lengths: Tensor, tokens: int) -> list[Tensor]:
    """The same, in groups that are at most `tokens` with their padding, or a single row. lengths [B]."""
    order = lengths.argsort(descending=True, stable=True)
    longest, groups, start = lengths[order].tolist(), [], 0
    while start < len(order):
        end = start + max(1, tokens // longest[start])
        groups.append(order[start:end])
        start = end
    return groups
