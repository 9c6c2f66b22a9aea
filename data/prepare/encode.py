"""Encoding of rows: each becomes token ids of bounded length, or a reason why it was dropped. No tensors yet."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from data.config import DataOptions
from data.prepare.mixture import Origin
from data.read.columns import first_user_text, subset_of
from data.read.records import Phase, Skipped, Unusable
from rlhf.text.dialogues import Template
from rlhf.text.messages import unread
from rlhf.text.rendered import markers_of
from rlhf.text.rendering import Unrenderable
from rlhf.text.truncate import FittedPrompt, Ids, fit_prompt, min_prompt_length
from rlhf.text.turns import Altered
from rlhf.types import Message, Row

LossOn = Literal["last", "every", "all"]
Spans = tuple[tuple[int, int], ...]
LONG_PROMPT, LONG_RESPONSE, EQUAL_WHEN_CUT = "prompt too long", "response too long", "equal sides after truncation"
TOO_LONG = frozenset({LONG_PROMPT, LONG_RESPONSE, EQUAL_WHEN_CUT})
"""reasons that a larger limit on tokens takes away"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of one phase become items."""

    phase: Phase
    loss_on: LossOn = "last"
    objective: Literal["response", "text"] = "response"
    """text: texts of any length are learned in full, without a template (continued pretraining)"""
    own_data_only: bool = False
    """use only the phase's own data paths, without prompts of other phases and without held-out prompts"""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which parts of a row were truncated."""

    prompt: bool = False
    response: bool = False
    """a response lost its end and EOS; of a pair, one side or both"""
    prompt_digest: int = field(default=0, compare=False)
    """a 64-bit digest of the prompt's ids after truncation; 0 without a prompt"""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and its response, for fine-tuning."""

    ids: tuple[int, ...]
    """prompt and response"""
    spans: Spans
    """ranges [start, end) of the ids that count in the loss, in order; none begins at 0"""
    weight: float = 1.0
    """of its tokens in the loss: `Row.weight`"""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt; both sides begin with the same prompt tokens."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    prompt_length: int
    """tokens of the prompt, at least 1"""
    margin: float | None = None
    """how much better the chosen side is: the row's column `margin`"""
    subset: str = ""
    """the group of pairs that it is evaluated with (`--group-column`)"""
    weight: float = 1.0
    """of the pair in the loss: `Row.weight`"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to respond to."""

    ids: tuple[int, ...]
    row: Row
    """the source row, with its prompt truncated as in `ids`"""
    subset: str = ""
    """the group of prompts that it is evaluated with (`--group-column`)"""


Item = Demonstration | Preference | Prompt
Encoded = tuple[Item, Truncation] | str
"""an item and what was truncated, or the reason why the row was dropped"""


RENDERED = (
    "got a text with the chat template's markers that is no dialogue of system, user and assistant as the template "
    "renders it, and the markers would be learned as ordinary text; give the turns in a column messages"
)


def read_rows(origin: Origin, phase: Phase, recipe: Recipe, template: Template) -> Iterator[Row | Skipped]:
    """The rows of an origin, with messages in place of texts that are rendered already."""
    return (unrendered(template, recipe, row) if isinstance(row, Row) else row for row in origin.rows(phase))


def unrendered(template: Template, recipe: Recipe, row: Row) -> Row | Skipped:
    """The row; of a row whose text, or prompt and responses, someone has rendered with the template: its messages."""
    markers = markers_of(template.tokenizer)
    if markers is None or len(row.prompt) > 1 or row.variables or row.response_keys or row.rejected_keys:
        return row
    before = row.prompt[0].content if row.prompt else ""
    texts = [before + side for side in (row.response, row.rejected) if side is not None] or [before]
    if not markers.inside(texts[0]):
        return row
    dialogues = [markers.dialogue(text) for text in texts]
    answers = [dialogue[-1] for dialogue in dialogues if dialogue and dialogue[-1].role == "assistant"]
    prompts = {dialogue[:-1] if answers else dialogue for dialogue in dialogues}
    if len(prompts) > 1 or not all(dialogues) or len(answers) not in (0, len(texts)):
        refused = markers.begins(texts[0]) and recipe.objective != "text"
        return Skipped(f"{row.location}: {RENDERED}" if row.location else RENDERED, bad=True) if refused else row
    [prompt], sides = prompts, [answer.content for answer in answers]
    response, rejected = (*sides, None, None)[:2]
    group = first_user_text(prompt) if row.group in ("", before) else row.group
    return replace(row, prompt=prompt, response=response, rejected=rejected, group=group)


def divided(template: Template, recipe: Recipe, row: Row) -> Iterator[Row | Skipped]:
    """The row; one row for each assistant turn, if all turns are learned and the template writes earlier ones otherwise
    than the model generates them; or why the template would leave a part of it out."""
    if recipe.objective == "text":
        yield row
        return
    refusal = unread(row, template.tokenizer)
    if refusal:
        yield Skipped(f"{row.location}: {refusal}" if row.location else refusal, bad=True)
    elif recipe.loss_on == "every" and row.response is not None and template.rewrites_turns(row):
        context = tuple(replace(message, learned=False) for message in row.prompt)
        for i, message in enumerate(row.prompt):
            if message.role == "assistant" and message.learned and i > 0:
                turn = replace(row, response=message.content, response_keys=message.keys)
                yield replace(turn, prompt=context[:i])
        yield replace(row, prompt=context)
    else:
        yield row


@dataclass(frozen=True)
class RowEncoder:
    """Turns rows into items, in batches: tokenizers are twice as fast on batches."""

    recipe: Recipe
    template: Template
    options: DataOptions

    def __call__(self, rows: Sequence[Row]) -> list[Encoded]:
        """One result per row, in order. A row that the chat template refuses is dropped, too."""
        encode = {"sft": self._demonstrations, "reward": self._preferences, "ppo": self._prompts}[self.recipe.phase]
        try:
            return list(self._texts(rows) if self.recipe.objective == "text" else encode(rows))
        except Unrenderable as error:
            if len(rows) == 1:
                return [str(error) if isinstance(error, Altered) else f"the chat template refuses it ({error.reason})"]
            return [result for row in rows for result in self([row])]

    def _texts(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        tokenizer = self.template.tokenizer
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        texts = self.template.encode_many([row.response or "" for row in rows], split=True)
        for row, ids in zip(rows, texts, strict=True):
            item_ids = (*start, *ids, tokenizer.eos_token_id)
            yield "not plain text" if row.prompt else (Demonstration(item_ids, ((1, len(item_ids)),)), Truncation())

    def _demonstrations(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        texts = self.template.prompt_texts(rows)
        prompts = self.template.prompt_ids_many(rows, texts)
        return _each(self._demonstration, rows, prompts, self._side(rows, "response", texts))

    def _demonstration(self, row: Row, prompt: Ids, response: Ids) -> Encoded:
        fitted, (answer,), cut = self._truncate(row, prompt, response)
        ids = (*fitted.ids, *answer)
        return Demonstration(ids, self._spans(row, fitted, len(ids)), row.weight), cut

    def _spans(self, row: Row, prompt: FittedPrompt, size: int) -> Spans:
        if self.recipe.loss_on == "all":
            return ((1, size),)
        start = len(prompt.ids)
        if self.template.marks_generation:
            answer = Message("assistant", row.response or "", row.response_keys)
            start += min(self.template.context_size(row, answer), size - start - 1)
        earlier = any(message.role == "assistant" and message.learned for message in prompt.messages)
        if self.recipe.loss_on == "last" or not earlier:
            return ((start, size),)
        _, flags = self.template.prompt_ids_and_turns(replace(row, prompt=tuple(prompt.messages)))
        flags += [False] * (start - len(flags))
        return _find_spans([False, *flags[1:], *[True] * (size - start)])

    def _preferences(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        texts = self.template.prompt_texts(rows)
        prompts = self.template.prompt_ids_many(rows, texts)
        sides = (self._side(rows, side, texts) for side in ("response", "rejected"))
        return _each(self._preference, rows, prompts, *sides)

    def _preference(self, row: Row, prompt: Ids, one: Ids, other: Ids) -> Encoded:
        rest = list(self.template.ending[1:])  # a score is read where the template's text ends
        if one == other:
            raise Unusable("equal sides")
        fitted, (chosen, rejected), cut = self._truncate(row, prompt, one + rest, other + rest)
        if chosen == rejected:
            raise Unusable(EQUAL_WHEN_CUT)
        margin = row.columns.get("margin")
        return Preference(
            (*fitted.ids, *chosen),
            (*fitted.ids, *rejected),
            len(fitted.ids),
            float(margin) if isinstance(margin, int | float) else None,
            subset_of(row.columns, self.options.group_column),
            row.weight,
        ), cut

    def _prompts(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        return _each(self._prompt, rows, self.template.prompt_ids_many(rows))

    def _prompt(self, row: Row, ids: Ids) -> Encoded:
        fitted = self._fit_prompt(row, ids, self.options.max_prompt_length)
        cut = fitted.messages is not row.prompt
        whole = replace(row, prompt=tuple(fitted.messages)) if cut else row
        item = Prompt(tuple(fitted.ids), whole, subset_of(row.columns, self.options.group_column))
        return item, Truncation(prompt=cut, prompt_digest=fitted.digest)

    def _side(self, rows: Sequence[Row], side: str, texts: Sequence[str]) -> list[Ids]:
        """The ids of the turn `response` or `rejected` of each row. texts: of the prompts"""
        answers = [Message("assistant", getattr(row, side) or "", getattr(row, f"{side}_keys")) for row in rows]
        return self.template.turn_ids_many(rows, answers, texts)

    def _truncate(self, row: Row, prompt: Ids, *responses: Ids) -> tuple[FittedPrompt, list[Ids], Truncation]:
        """Truncate the prompt and the responses to max_length together: (prompt, responses, what was truncated).

        The prompt is cut first, to make room for the longest response, but not below its minimal length. With
        `truncate tokens` the responses are cut next; a cut response has no EOS, because it does not end there.
        """
        length = self.options.max_length
        room = length - max(map(len, responses))
        if self.options.truncate == "tokens":
            room = min(max(room, self._min_prompt_length), length - 1)
        elif room < 1:
            raise Unusable(LONG_RESPONSE)
        fitted = self._fit_prompt(row, prompt, min(room, self.options.max_prompt_length))
        truncated = [response[: length - len(fitted.ids)] for response in responses]
        cut = Truncation(fitted.messages is not row.prompt, truncated != list(responses), fitted.digest)
        return fitted, truncated, cut

    @cached_property
    def _min_prompt_length(self) -> int:
        return min_prompt_length(self.template, self.options.max_length)

    def _fit_prompt(self, row: Row, ids: Ids, limit: int) -> FittedPrompt:
        if len(ids) <= limit:
            return FittedPrompt(ids, row.prompt)
        fitted = fit_prompt(self.template, row, limit, by_tokens=self.options.truncate == "tokens")
        if fitted is None:
            raise Unusable(LONG_PROMPT)
        return fitted


def _each(encode: Callable[..., Encoded], *columns: Sequence[Any]) -> Iterator[Encoded]:
    """`encode` of each row, whose values are in `columns`; or the reason why it is unusable."""
    for values in zip(*columns, strict=True):
        try:
            yield encode(*values)
        except Unusable as reason:
            yield str(reason)


def _find_spans(flags: Sequence[bool]) -> Spans:
    """The ranges [start, end) of True."""
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
