"""The frozen records that flow through the pipeline, and the legend of their shapes.

B rows (rollouts), P prompt tokens, T response tokens, S = tokens of a whole sequence, V vocabulary. A mask is True if
a token is real (or counts). It is created with the tokens and never derived from ids: many models use one id for BOS,
EOS and padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlhf.config import Tree

Record = dict[str, Any]
"""column -> value, of one line of a user's file or one row of a table. The file decides what a column holds."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue. `role` is system, user, assistant or tool (what a called tool returned)."""

    role: str
    content: str
    keys: Tree = field(default_factory=dict, hash=False)
    """what else a chat template renders of it: reasoning_content, tool_calls, ..."""
    learned: bool = True  # False: an assistant turn that is context, and no loss counts on it


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data source, before tokenization.

    `prompt` is a dialogue that ends before the response. A demonstration has `response`; a preference
    also has `rejected` (`response` is the chosen side); a row that is only a prompt has neither.
    Rows with the same `group` are in the same split; by default the group is the prompt's text.
    `columns` has other values for reward functions; `response_column` is the name by which they get the response too.
    Preferences with the same `ranking`, other than "", are pairs of one ranked list and together weigh as one pair.
    `variables` is what the chat template gets beside the messages: `tools`, and options such as `enable_thinking`.
    """

    prompt: tuple[Message, ...]
    response: str | None = None
    rejected: str | None = None
    group: str = ""
    columns: Record = field(default_factory=dict)
    ranking: str = ""
    variables: Tree = field(default_factory=dict)
    response_keys: Tree = field(default_factory=dict)
    """`Message.keys` of the response"""
    rejected_keys: Tree = field(default_factory=dict)
    weight: float = 1.0
    """of the row in the loss, at least 0; with 0 it serves as a prompt only"""
    location: str = field(default="", compare=False)
    """file:line, for messages about the row"""
    response_column: str = field(default="", compare=False)


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on the device. From the CPU it goes through pinned memory, so that the host does not wait for the device."""
    if x.device.type == "cpu" and torch.device(device).type != "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class Download:
    """A copy of `x` that is on its way to the CPU while the host goes on."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if x.is_cuda else None
        if self._event is not None:
            self._event.record()

    def result(self) -> Tensor:
        """The copy; the host waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


class TensorRecord:
    """Base of records whose fields are tensors with the same first dimension B, or tuples of length B.

    Records stay on the CPU, where choosing rows and cutting padding cost no wait for a device. A model copies what it
    reads to its device, and a loss what it compares.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]  # every subclass is a dataclass

    def __getitem__(self, index: slice | Tensor) -> Self:
        """The rows of `index`: a slice, or a LongTensor [b] of row numbers."""
        return self._map(lambda value: _rows(value, index))

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda value: _moved(value, device))

    @classmethod
    def concatenated(cls, records: Sequence[Self]) -> Self:
        """The rows of all records, one record after the other; their tensors must have the same width."""
        columns = {f.name: [getattr(record, f.name) for record in records] for f in fields(cls)}  # type: ignore[arg-type]  # as above
        return cls(**{name: _concatenated(values) for name, values in columns.items()})

    def _map(self, change: Callable[[object], object]) -> Self:
        changes = {f.name: change(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]  # as above
        return replace(self, **changes)  # type: ignore[type-var]  # as above


def _moved(value: object, device: torch.device | str) -> Any:
    if isinstance(value, TensorRecord):
        return value.to(device)
    return to_device(value, device) if isinstance(value, Tensor) else value


def _rows(value: Any, index: slice | Tensor) -> Any:
    if value is None or isinstance(value, Tensor | TensorRecord):
        return None if value is None else value[index]
    if isinstance(index, slice):
        return value[index]
    return tuple(value[i] for i in index.tolist())


def _concatenated(values: Sequence[Any]) -> Any:
    if isinstance(values[0], TensorRecord):
        return type(values[0]).concatenated(values)
    if values[0] is None or isinstance(values[0], Tensor):
        return None if values[0] is None else torch.cat(list(values))
    return tuple(item for value in values for item in value)


@dataclass(frozen=True, slots=True)
class Sequences(TensorRecord):
    """Whole token sequences, to train a model on or to score."""

    ids: Tensor
    """[B, S] long"""
    mask: Tensor
    """[B, S] bool, True where a token is real"""
    loss_mask: Tensor
    """[B, S] bool, True where the prediction of the token counts in the loss (never the first real token of a row)"""

    @property
    def lengths(self) -> Tensor:
        """[B] real tokens."""
        return self.mask.sum(1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.mask, self.loss_mask

    def trimmed(self) -> Self:
        """Without the columns that are padding in every row."""
        columns_in_use = self.mask.any(0)
        ids, mask, loss_mask = (x[:, columns_in_use] for x in self.tensors())
        return replace(self, ids=ids, mask=mask, loss_mask=loss_mask)


@dataclass(frozen=True, slots=True)
class WeightedSequences(Sequences):
    """Sequences to learn, of which some weigh more than others."""

    weight: Tensor
    """[B] weight of each token of a row in the loss"""


def _padded(x: Tensor, left: int = 0, right: int = 0) -> Tensor:
    """`x` [B, S] with zeros on one side, up to `left` or `right` columns."""
    return torch.nn.functional.pad(x, (max(0, left - x.shape[1]), max(0, right - x.shape[1])))


def _stack_padded(first: Tensor, second: Tensor) -> Tensor:
    """[B, S1] and [B, S2] concatenated to [2 B, max(S1, S2)], padded on the right with 0."""
    width = max(first.shape[1], second.shape[1])
    return torch.cat([_padded(x, right=width) for x in (first, second)])


@dataclass(frozen=True, slots=True)
class Pairs(TensorRecord):
    """B preferences; row b of `chosen` is preferred to row b of `rejected`."""

    chosen: Sequences
    rejected: Sequences
    margin: Tensor | None = None
    """[B] float, how much better the chosen side is, if the data has it"""
    weight: Tensor | None = None
    """[B] float, weight of the row / number of pairs of the same ranked list; None = 1"""

    @property
    def lengths(self) -> Tensor:
        """[B] real tokens of the longer side."""
        return torch.maximum(self.chosen.lengths, self.rejected.lengths)

    def stacked(self) -> Sequences:
        """Both sides as one batch of 2B rows, the chosen sides first."""
        sides = zip(self.chosen.tensors(), self.rejected.tensors(), strict=True)
        return Sequences(*(_stack_padded(c, r) for c, r in sides))

    def joined(self) -> "JoinedPairs":
        """Every pair as one row, in which the common prefix of both sides appears once. Both sides are right-padded."""
        (c, c_mask), (r, r_mask) = (self.chosen.tensors()[:2], self.rejected.tensors()[:2])
        lengths, width = (self.chosen.lengths, self.rejected.lengths), min(c.shape[1], r.shape[1])
        same = (c[:, :width] == r[:, :width]) & c_mask[:, :width] & r_mask[:, :width]
        # Each side keeps at least one token of its own, at which its score is read.
        common = torch.minimum(same.long().cumprod(1).sum(1), torch.minimum(*lengths) - 1)
        first, common = lengths[0][:, None], common[:, None]
        ends = torch.stack([lengths[0] - 1, sum(lengths) - common.squeeze(1) - 1], dim=1)
        column = torch.arange(int(ends.max()) + 1, device=c.device).expand(len(c), -1)
        positions = torch.where(column < first, column, column - first + common)
        positions = positions.clamp(max=max(c.shape[1], r.shape[1]) - 1)  # positions of padding
        ids = _stack_padded(c, r)
        chosen, rejected = (side.gather(1, positions) for side in ids.chunk(2))
        branch = (column >= common).long() + (column >= first)
        return JoinedPairs(torch.where(column < first, chosen, rejected), positions, branch, ends)


@dataclass(frozen=True, slots=True)
class JoinedPairs(TensorRecord):
    """B preferences, each in one row: common prefix, remainder of the chosen side, remainder of the rejected side."""

    ids: Tensor
    """[B, S] long"""
    positions: Tensor
    """[B, S] long, of each token in its own side"""
    branch: Tensor
    """[B, S] long: 0 common prefix, 1 only the chosen side, 2 only the rejected side, padding included"""
    ends: Tensor
    """[B, 2] long, columns of the last token of the chosen and of the rejected side"""

    @property
    def mask(self) -> Tensor:
        """[B, S] bool, True where a token is real"""
        return torch.arange(self.ids.shape[1], device=self.ids.device) <= self.ends[:, 1:]

    @property
    def lengths(self) -> Tensor:
        """[B] real tokens of the longer side."""
        return torch.where(self.mask, self.positions + 1, 0).amax(1)

    def visible(self) -> Tensor:
        """Attention mask, bool [B, S, S]: whether token i may attend to token j."""
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

    @classmethod
    def left_padded(cls, ids: Sequence[Sequence[int]], rows: tuple[Row, ...], pad_id: int) -> Self:
        """Of encoded prompts: generation then continues all rows at the same column."""
        padding = max(map(len, ids)) - torch.tensor([len(prompt) for prompt in ids])
        padded = torch.tensor([[*[pad_id] * n, *prompt] for n, prompt in zip(padding.tolist(), ids, strict=True)])
        return cls(padded, torch.arange(padded.shape[1]) >= padding[:, None], rows)


@dataclass(frozen=True, slots=True)
class SampledRollout(TensorRecord):
    """Responses sampled from the policy, y ~ pi_old(. | x)."""

    prompt_ids: Tensor
    """[B, P] long, left-padded"""
    prompt_mask: Tensor
    """[B, P] bool"""
    response_ids: Tensor
    """[B, T] long, right-padded"""
    mask: Tensor
    """[B, T] bool, True on the tokens that the policy sampled, EOS included; False after it"""
    sampled_logprobs: Tensor
    """[B, T] log-probs of the sampling pass, at the sampling temperature, 0 off the mask"""
    ended: Tensor
    """[B] bool, True if the response ended with EOS, False if it was cut at T"""
    rows: tuple[Row, ...]
    """the B source rows of the prompts"""

    @property
    def sequences(self) -> Sequences:
        """Prompt and response concatenated, [B, P + T]; the loss mask is True on the response."""
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
        return [ids[mask].tolist() for ids, mask in zip(self.response_ids, self.mask, strict=True)]

    def tokens_before_end(self) -> list[list[int]]:
        """The same without the token in which a response ended; an ordinary one of a list in the model's config would
        be decoded as text."""
        return [ids[:-1] if end else ids for ids, end in zip(self.response_tokens(), self.ended.tolist(), strict=True)]

    def trimmed(self) -> Self:
        """Without the columns that are padding in every row: P and T of these rows."""
        width = int(self.lengths.max())
        prompt = self.prompt_mask.any(0)
        narrow: dict[str, Any] = {name: value[:, :width] for name, value in self._response_tensors().items()}
        narrow |= {"prompt_ids": self.prompt_ids[:, prompt], "prompt_mask": self.prompt_mask[:, prompt]}
        return replace(self, **narrow)

    def widened(self, prompt: int, response: int) -> Self:
        """With padding up to P = `prompt` on the left and T = `response` on the right: zeros under masks of False."""
        wide: dict[str, Any] = {
            name: _padded(value, right=response) for name, value in self._response_tensors().items()
        }
        wide |= {name: _padded(getattr(self, name), left=prompt) for name in ("prompt_ids", "prompt_mask")}
        return replace(self, **wide)

    def _response_tensors(self) -> dict[str, Tensor]:
        """The fields [B, T]."""
        return {"response_ids": self.response_ids, "mask": self.mask, "sampled_logprobs": self.sampled_logprobs}


@dataclass(frozen=True, slots=True)
class ScoredRollout(SampledRollout):
    """A rollout with everything that credit is assigned from."""

    logprobs: Tensor
    """[B, T] log-probs of the training forward under the sampling policy: the old log-probs of PPO; those of sampling
    where no pass computes them"""
    ref_logprobs: Tensor
    """[B, T] log-probs under the reference"""
    scores: Tensor
    """[B] score of the whole response: the reward sources combined"""
    source_scores: Tensor
    """[B, N] score by each of the N reward sources, before its weight"""
    values: Tensor | None = None
    """[B, T] critic's value of the state in which token t was chosen; None if the algorithm has no critic"""

    def _response_tensors(self) -> dict[str, Tensor]:
        tensors = {"logprobs": self.logprobs, "ref_logprobs": self.ref_logprobs}
        tensors |= {} if self.values is None else {"values": self.values}
        return SampledRollout._response_tensors(self) | tensors


@dataclass(frozen=True, slots=True)
class Credit(TensorRecord):
    """Advantages and returns that an algorithm computes from a scored rollout."""

    advantages: Tensor
    """[B, T], 0 off the mask"""
    returns: Tensor
    """[B, T] targets of the critic, 0 off the mask"""

    def cut(self, response: int) -> "Credit":
        """The first T = `response` columns."""
        return Credit(self.advantages[:, :response], self.returns[:, :response])

    def widened(self, response: int) -> "Credit":
        """Padded with zeros on the right to T = `response`."""
        return Credit(_padded(self.advantages, right=response), _padded(self.returns, right=response))


@dataclass(frozen=True, slots=True)
class Samples:
    """Text of B prompts and responses, for reward sources."""

    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    """with the thought before an answer, if the policy writes one"""
    rollout: SampledRollout
    answers: tuple[str, ...]
    """the responses without their thoughts; empty where a thought has no end"""


Metrics = dict[str, float]


def length_groups(lengths: Tensor, size: int) -> list[Tensor]:
    """Row numbers in groups of at most `size` rows of similar length, which need little padding. lengths [B]."""
    return list(lengths.argsort(descending=True, stable=True).split(size))


def token_groups(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Row numbers in groups of rows of similar length, with at most `tokens` tokens, padding included, or one row."""
    order = lengths.argsort(descending=True, stable=True)
    longest, groups, start = lengths[order].tolist(), [], 0
    while start < len(order):
        end = start + max(1, tokens // longest[start])
        groups.append(order[start:end])
        start = end
    return groups
