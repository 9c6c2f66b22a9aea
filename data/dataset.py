"""One dataset for three stages: rows are divided by content, become ids, and are cut to length."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import overload

from transformers import PreTrainedTokenizerBase

from data.config import DataOptions
from data.mixture import open_sources
from data.reading import Phase
from rlhf.config import UserError
from rlhf.text import Template
from rlhf.types import Message, Row

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the response to learn from."""

    ids: tuple[int, ...]
    """prompt and response"""
    prompt_length: int
    """tokens of the prompt, at least 1"""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt; both sides begin with the same prompt tokens."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    prompt_length: int
    """tokens of the prompt, at least 1"""
    margin: float | None = None
    """how much better the chosen side is, from the row's column `margin`"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to respond to."""

    ids: tuple[int, ...]
    row: Row


Item = Demonstration | Preference | Prompt


class Unusable(Exception):
    """A row that has nothing to train on; the message is the reason it is counted under."""


@dataclass(frozen=True, slots=True)
class PromptDataset(Sequence[Item]):
    """The items of one split for one phase."""

    phase: Phase
    items: tuple[Item, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """rows left out, counted by reason"""
    shortened: int = 0
    """rows whose prompt or response was cut to length"""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self.items[index]


def open_datasets(
    options: DataOptions, phase: Phase, tokenizer: PreTrainedTokenizerBase, response_length: int = 0
) -> tuple[PromptDataset, PromptDataset]:
    """(training, evaluation) for one phase, with a tokenizer from `prepare_tokenizer`.

    The rows come in an order that depends on their content and `data_seed` alone. `response_length`: tokens that
    PPO will add to a prompt. The evaluation set is empty only where eval_fraction or max_eval_rows is 0.
    Raises: UserError if a place cannot be read, a row is malformed, or no row is left for training or evaluation.
    """
    assert phase in PHASES
    if phase == "ppo" and options.max_prompt_length + response_length > options.max_length:
        raise UserError(
            f"max_prompt_length {options.max_prompt_length} + response length {response_length}: got "
            f"{options.max_prompt_length + response_length} tokens, expected at most max_length {options.max_length}; "
            "lower max_prompt_length or raise max_length"
        )
    shares: dict[str, list[Row]] = {phase: [], "evaluation": []}
    total = 0
    for row in open_sources(options.data_path).rows(phase):
        total += 1
        share = share_of(row, options)
        if share in shares:
            shares[share].append(row)
    encode = partial(_ENCODERS[phase], Template(tokenizer), options)
    train = _make(phase, _ordered(shares[phase], options), encode, options.max_train_rows)
    evaluation = _make(phase, _ordered(shares["evaluation"], options), encode, options.max_eval_rows)
    _refuse_empty(train, "training", len(shares[phase]), total, options)
    if options.eval_fraction and options.max_eval_rows:
        _refuse_empty(evaluation, "evaluation", len(shares["evaluation"]), total, options)
    return train, evaluation


def share_of(row: Row, options: DataOptions) -> str:
    """'evaluation', or the phase the row's group belongs to. Depends on the group's text and `data_seed` alone."""
    digest = _digest(group_of(row), options.data_seed)
    if int.from_bytes(digest[:8]) / 2**64 < options.eval_fraction:
        return "evaluation"
    point = int.from_bytes(digest[8:]) / 2**64 * sum(options.data_split)
    for phase, share in zip(PHASES, options.data_split, strict=True):
        if point < share:
            return phase
        point -= share
    return max(zip(options.data_split, PHASES, strict=True))[1]  # rounding at the upper edge


def group_of(row: Row) -> str:
    """What decides the split: the row's group, else the prompt's text, else the response; spaces and case aside."""
    text = row.group or " ".join(message.content for message in row.prompt)
    return " ".join((text if text.strip() else row.response or "").split()).casefold()


def _digest(text: str, seed: int) -> bytes:
    return blake2b(f"{seed}\0{text}".encode(), digest_size=16).digest()


def _ordered(rows: list[Row], options: DataOptions) -> list[Row]:
    """By hash: one row of every group, then a second one, and so on, whatever the file's order.

    So the first N rows speak of as many prompts as can be, and of the same ones in every phase.
    """
    groups: dict[str, list[tuple[bytes, int]]] = {}
    for i, row in enumerate(rows):
        whole = repr((row.prompt, row.response, row.rejected))
        groups.setdefault(group_of(row), []).append((_digest(whole, options.data_seed), i))
    places = [
        (rank, _digest("order\0" + group, options.data_seed), i)
        for group, members in groups.items()
        for rank, (_, i) in enumerate(sorted(members))
    ]
    return [rows[i] for *_, i in sorted(places)]


def _make(
    phase: Phase, rows: Iterable[Row], encode: Callable[[Row], tuple[Item, bool]], limit: int | None
) -> PromptDataset:
    items: list[Item] = []
    dropped: Counter[str] = Counter()
    shortened = 0
    for row in rows:
        if limit is not None and len(items) >= limit:
            break
        try:
            item, cut = encode(row)
        except Unusable as reason:
            dropped[str(reason)] += 1
        else:
            items.append(item)
            shortened += cut
    return PromptDataset(phase, tuple(items), dict(dropped), shortened)


def _refuse_empty(dataset: PromptDataset, use: str, share: int, total: int, options: DataOptions) -> None:
    if len(dataset):
        return
    where = f"{', '.join(options.data_path)}: 0 usable rows for {use} in {dataset.phase}"
    if not total:
        raise UserError(f"{where}: the data has no rows")
    if not share:
        split = ":".join(f"{part:g}" for part in options.data_split)
        raise UserError(
            f"{where}: of {total} rows none falls into its share (data_split {split}, eval_fraction "
            f"{options.eval_fraction:g}); add rows, or change data_split or eval_fraction"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in dataset.dropped.items())
    raise UserError(f"{where}: of {share} rows in its share, dropped {reasons}")


def _demonstration(template: Template, options: DataOptions, row: Row) -> tuple[Item, bool]:
    if row.response is None:
        raise Unusable("no response")
    if not row.response.strip():
        raise Unusable("empty response")
    response = _response_ids(template, row, row.response)
    prompt, (response,), cut = _fit(template, options, row, response)
    return Demonstration((*prompt, *response), len(prompt)), cut


def _preference(template: Template, options: DataOptions, row: Row) -> tuple[Item, bool]:
    if row.response is None or row.rejected is None:
        raise Unusable("no rejected side")
    sides = [_response_ids(template, row, text) for text in (row.response, row.rejected)]
    if sides[0] == sides[1]:
        raise Unusable("equal sides")
    prompt, (chosen, rejected), cut = _fit(template, options, row, *sides)
    if chosen == rejected:
        raise Unusable("equal sides after truncation")
    margin = row.columns.get("margin")
    margin = float(margin) if isinstance(margin, int | float) else None
    return Preference((*prompt, *chosen), (*prompt, *rejected), len(prompt), margin), cut


def _prompt(template: Template, options: DataOptions, row: Row) -> tuple[Item, bool]:
    if not any(message.content.strip() for message in row.prompt):
        raise Unusable("empty prompt")
    ids, cut = fit_prompt(template, row.prompt, options.max_prompt_length)
    return Prompt(tuple(ids), row), cut


_ENCODERS = {"sft": _demonstration, "reward": _preference, "ppo": _prompt}


def _response_ids(template: Template, row: Row, text: str) -> list[int]:
    empty = not any(message.content for message in row.prompt)
    return template.opening_ids(text) if empty else template.response_ids(text)


def _fit(
    template: Template, options: DataOptions, row: Row, *responses: list[int]
) -> tuple[list[int], list[list[int]], bool]:
    """The prompt and the responses cut to max_length together: (prompt, responses, whether anything was cut).

    The prompt gives way first, to the longest response. A response gives way only where it does not fit beside a
    single prompt token, and then has no EOS, for it does not end there.
    """
    room = options.max_length - max(map(len, responses))
    prompt, cut = fit_prompt(template, row.prompt, max(1, min(room, options.max_prompt_length)))
    kept = [response[: options.max_length - len(prompt)] for response in responses]
    return prompt, kept, cut or kept != list(responses)


def fit_prompt(template: Template, messages: Sequence[Message], limit: int) -> tuple[list[int], bool]:
    """(the ids of a prompt in at most `limit` tokens, whether it was cut).

    Whole oldest turns go first, a leading system message staying; what is left begins with a user's turn. Then
    tokens go from the left, a leading BOS (or the EOS that stands for it) staying.
    """
    ids = template.prompt_ids(messages)
    if len(ids) <= limit:
        return ids, False
    system = [message for message in messages[:1] if message.role == "system"]
    for start, message in enumerate(messages):
        if message.role == "user" and start > len(system) and len(ids) > limit:
            ids = template.prompt_ids([*system, *messages[start:]])
    tokenizer = template.tokenizer
    head = 1 if ids[0] in (tokenizer.bos_token_id, tokenizer.eos_token_id) else 0
    excess = max(0, len(ids) - limit)
    return ids[:head] + ids[head + excess :], True
