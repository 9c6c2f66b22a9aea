"""Messages and responses to ids and back, as the chat template writes them: the only module that does so.

A prompt and a response are always encoded separately and joined as ids, so that a text has the same ids
in fine-tuning, in reward modelling and in a rollout.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.text.encoder import Encoder, special_tokens
from rlhf.text.rendering import Unrenderable, render
from rlhf.text.special import SpecialTokens
from rlhf.text.templates import THOUGHT_END, words_of
from rlhf.text.turns import GENERATION, Altered, context_of, render_turns, thought_frame, turn_frame, until_end
from rlhf.types import Message, Row

EMPTY_PROMPT = (Message("user", ""),)
"""what a prompt without messages is replaced by"""
ANY_PROMPT = Row((Message("user", "x"),))
NO_VARIABLES: Mapping[str, object] = MappingProxyType({})
REWRITES = "writes an earlier turn otherwise than the model generates it"


@dataclass(frozen=True)
class Template:
    """Messages and responses to ids, with a tokenizer from `prepare_tokenizer`.

    The methods for many rows give the same results as those for one row, but faster.
    """

    tokenizer: PreTrainedTokenizerBase

    def prompt_text(self, messages: Sequence[Message], variables: Mapping[str, object] = NO_VARIABLES) -> str:
        """The rendered prompt, with the prefix of a response. No messages count as one empty user message."""
        return render(self.tokenizer, [messages or EMPTY_PROMPT], variables=[variables])[0]

    def prompt_ids(self, messages: Sequence[Message], variables: Mapping[str, object] = NO_VARIABLES) -> list[int]:
        """The ids of the rendered prompt; BOS only if the template writes it. variables: see `Row`.

        If a message contains the text of a special token ("</s>"), it is encoded as ordinary text. Only then is the
        prompt encoded in parts, between the template's own special tokens. A tokenizer that puts a space before a text
        then does so for each part, and special tokens do not remove spaces beside them.
        """
        return self.prompt_ids_many([Row(tuple(messages), variables=dict(variables))])[0]

    def prompt_texts(self, rows: Sequence[Row]) -> list[str]:
        """The rendered prompt of each row, with the special tokens that its messages spell in disguise.

        Raises: UserError if the template cannot render a dialogue; the error does not name the dialogue.
        """
        hidden = [self._disguised(row) for row in rows]
        prompts = [row.prompt or EMPTY_PROMPT for row in hidden]
        return render(self.tokenizer, prompts, variables=[row.variables for row in hidden])

    def prompt_ids_many(self, rows: Sequence[Row], texts: Sequence[str] = ()) -> list[list[int]]:
        """`prompt_ids` of the prompt of each row. texts: their `prompt_texts`, if known. Raises: UserError"""
        texts = texts or self.prompt_texts(rows)
        spelled = [self._disguised(row) is not row for row in rows]
        ordinary = iter(self.encode_many([t for t, own in zip(texts, spelled, strict=True) if not own], split=False))
        by_part = iter(self._ids_by_part([t for t, own in zip(texts, spelled, strict=True) if own]))
        return [next(by_part if own else ordinary) or [self._first_id] for own in spelled]

    def prompt_ids_and_turns(self, row: Row) -> tuple[list[int], list[bool]]:
        """(`prompt_ids`, True for each token of an assistant turn in them that is learned).

        A turn has the tokens that the model would have generated, and the end token if the template writes one. A
        token that is partly inside a turn counts too.
        Raises: UserError for a slow tokenizer; Altered if the template writes an earlier turn otherwise than a last one
        """
        hidden = self._disguised(row)
        text = render(self.tokenizer, [hidden.prompt or EMPTY_PROMPT], variables=[hidden.variables])[0]
        in_turn = bytearray(len(self._special.show(text)))  # 1 for each character of an assistant turn
        for turn in self._turn_slices(hidden, text):
            in_turn[turn] = b"\1" * len(in_turn[turn])
        ids: list[int] = []
        turn_mask: list[bool] = []
        offset = 0
        split = hidden is not row
        for part, special in self._special.parts(text) if split else [(text, False)]:
            tokens, spans = self._encoder.encode_with_spans(part, split and not special)
            ids += tokens
            turn_mask += [any(in_turn[offset + start : offset + end]) for start, end in spans]
            offset += len(part)
        return (ids, turn_mask) if ids else ([self._first_id], [False])

    def _turn_slices(self, row: Row, text: str) -> list[slice]:
        """The characters of each learned turn in the rendered prompt `text` of a disguised row."""
        slices = []
        for i, message in enumerate(row.prompt):
            if message.role != "assistant" or not message.learned:
                continue
            try:
                [(prompt, turn)] = render_turns(self.tokenizer, [row.prompt[: i + 1]], [row.variables])
            except Altered:
                raise
            except Unrenderable:
                if i == 0:  # a greeting before the user's first turn, which few templates can ask for
                    continue
                raise
            body, end = until_end(turn, self._ends, self.frame[1])
            spoken = body + end if text.startswith(body + end, len(prompt)) else body
            if not text.startswith(prompt + spoken):
                if i == 0:
                    continue
                raise Altered(REWRITES)
            empty = not message.content and not body.strip()  # an empty turn is EOS alone
            context = body if empty else context_of(self.tokenizer, row.prompt[: i + 1], row.variables, turn)
            start, end_of_context = (len(self._special.show(text)) for text in (prompt, prompt + context))
            slices.append(slice(end_of_context, start + len(self._special.show(spoken))))
        return slices

    def rewrites_turns(self, row: Row) -> bool:
        """Whether the template writes an earlier assistant turn of such a row otherwise than the model generates it, as
        those do that drop old thoughts. Each turn is then learned in a sequence of its own."""
        if not any(message.role == "assistant" and message.learned for message in row.prompt):
            return False
        if row.variables or any(message.keys or THOUGHT_END in message.content for message in row.prompt):
            return self._rewrites(row)  # only this row shows what becomes of its thoughts, calls and tools
        system = any(message.role == "system" for message in row.prompt)
        if system not in self._rewrites_plain:
            before, user = (Message("system", "s"),) if system else (), Message("user", "x")
            self._rewrites_plain[system] = self._rewrites(Row((*before, user, Message("assistant", "y"), user)))
        return self._rewrites_plain[system]

    def _rewrites(self, row: Row) -> bool:
        hidden = self._disguised(row)
        try:
            self._turn_slices(hidden, render(self.tokenizer, [hidden.prompt], variables=[hidden.variables])[0])
        except Altered as error:
            return error.reason == REWRITES
        except UserError:  # a template for single prompts
            return False
        return False

    @cached_property
    def _rewrites_plain(self) -> dict[bool, bool]:
        return {}

    def turn_ids_many(
        self, rows: Sequence[Row], answers: Sequence[Message], texts: Sequence[str] = ()
    ) -> list[list[int]]:
        """The ids of an answer to the prompt of each row: what the template writes after the generation prompt, to the
        end of the turn, and one end token.

        If an answer begins with white space, the template's white space is not added.
        texts: the `prompt_texts` of the rows, if known
        Raises: Unrenderable, Altered
        """
        whole = [replace(row, prompt=(*(row.prompt or EMPTY_PROMPT), a)) for row, a in zip(rows, answers, strict=True)]
        hidden = [self._disguised(row) for row in whole]
        if not all(map(operator.is_, hidden, whole)):
            texts = ()  # a disguise also changes the messages beside the one that needs it
        turns = render_turns(self.tokenizer, [row.prompt for row in hidden], [row.variables for row in hidden], texts)
        bodies = [self._body(turn, row.prompt[-1]) for (_, turn), row in zip(turns, hidden, strict=True)]
        first = [self._prompt_starts_text and not any(m.content for m in row.prompt[:-1]) for row in whole]
        opening = iter(self._ids_by_part([body for start, (body, _) in zip(first, bodies, strict=True) if start]))
        texts = [body for start, (body, _) in zip(first, bodies, strict=True) if not start]
        inside = iter(self._ids_by_part(texts, inside=True))
        eos = self.tokenizer.eos_token_id
        return [
            [*next(opening if start else inside), self._special.ids.get(end, eos)]
            for start, (_, end) in zip(first, bodies, strict=True)
        ]

    def turn_ids(self, row: Row, answer: Message) -> list[int]:
        """`turn_ids_many` of one row."""
        return self.turn_ids_many([row], [answer])[0]

    def context_size(self, row: Row, answer: Message) -> int:
        """How many of the first `turn_ids` are context by the template's `{% generation %}` block."""
        hidden = self._disguised(replace(row, prompt=(*(row.prompt or EMPTY_PROMPT), answer)))
        [(_, turn)] = render_turns(self.tokenizer, [hidden.prompt], [hidden.variables])
        context = context_of(self.tokenizer, hidden.prompt, hidden.variables, turn)
        return len(self._ids_by_part([context], inside=True)[0])

    def scored_ids(self, row: Row, answer: Message) -> list[int]:
        """`turn_ids` for a reward model: without the thought if the template writes none."""
        reads = words_of(str(self.tokenizer.chat_template)).keys
        keys = {key: value for key, value in answer.keys.items() if key in reads}
        return self.turn_ids(row, replace(answer, keys=keys))

    def response_ids(self, text: str) -> list[int]:
        """The ids of a response to any prompt, with what the template writes around it, and one EOS."""
        return self.turn_ids(ANY_PROMPT, Message("assistant", text))

    def _body(self, turn: str, answer: Message) -> tuple[str, str]:
        """(a turn before its end token, the end token or an empty text)."""
        before, after = self.frame
        body, end = until_end(turn, self._ends, after)
        last = self._special.pattern.split(turn.rstrip())[-2:]
        if not end and len(last) == 2 and not last[1]:  # such as <|call|> of gpt-oss, with which it calls a tool
            body, end = turn.rstrip().removesuffix(last[0]), last[0]
        if not answer.content and not answer.keys and not body.strip():
            return "", end  # an empty response is EOS alone
        if before.isspace() and answer.content[:1].isspace():
            body = body.removeprefix(before)
        return body, end

    def response_text(self, ids: Sequence[int]) -> str:
        """The text of a response, with its thought, without special tokens and what the template writes around it."""
        return self._without_spaces(self._decode(ids))

    def _without_spaces(self, text: str) -> str:
        """A decoded response without what the template writes around it."""
        before, after = self._spaces
        return text.removeprefix(before).removesuffix(after)

    def answer(self, ids: Sequence[int], prompt: str) -> Message:
        """A response as a message of a dialogue, its thought apart; after a thought without an end it is empty.

        prompt: the `prompt_text`, which may begin or end a thought
        """
        before, _ = self.frame
        whole = self._decode(ids)
        text = self._without_spaces(whole)
        if before.strip() and whole.startswith(before):
            return Message("assistant", text)
        opening, end = (part.strip() for part in self._thought)
        thought, separator, answer = whole.rpartition(end)
        prompt = prompt.rstrip()
        if self._opens_thought:
            opened = not prompt.endswith(end)
        else:
            opened = bool(opening) and (whole.lstrip().startswith(opening) or prompt.endswith(opening))
        if not separator and not opened:
            return Message("assistant", text)
        thought = (thought if separator else whole).strip().removeprefix(opening).strip()
        answer = answer.partition(opening or "<think>")[0]  # a second thought may have no end
        answer = self._without_spaces(answer.lstrip()) if separator else ""
        return Message("assistant", answer, {"reasoning_content": thought} if thought else {})

    def _decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are in it only if the template writes some inside a turn."""
        if not self._special.pattern.search(self.frame[0]):
            return self._encoder.decode_inside(ids)
        t = self.tokenizer
        ends = {t.eos_token_id, t.pad_token_id, t.bos_token_id}
        written = [i for i in ids if i not in ends]
        return str(t.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def settled_text(self, ids: Sequence[int]) -> str:
        """The start of `response_text` that no further id can change: for a response that is still being written.

        The bytes of an unfinished character are left out, and white space that may prove to be the template's.
        """
        before, after = self._spaces
        if self._encoder.ends_in_a_byte(ids):  # the next byte decides how all bytes before it are read
            return ""
        text = self._decode(ids).rstrip("\ufffd")
        if before.startswith(text):
            return ""
        text = text.removeprefix(before)
        overlap = max((size for size in range(len(after) + 1) if text.endswith(after[:size])), default=0)
        return text[: len(text) - overlap]

    def encode_many(self, texts: Sequence[str], split: bool) -> list[list[int]]:
        """The ids of each text, without BOS; with `split`, the text of a special token is ordinary text."""
        return self._encoder.encode_many(texts, split)

    def token_counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text in the middle of a longer text."""
        return [len(ids) for ids in self._encoder.encode_inside(texts)]

    def _disguised(self, row: Row) -> Row:
        """The row with a private character for each special token that it spells, so that in a rendered text special
        tokens are the template's own. A row that spells none is returned as it is."""
        special = self._special
        keyed = bool(row.variables) or any(message.keys for message in row.prompt)
        if not keyed and not special.spelled_in("".join(message.content for message in row.prompt)):
            return row
        prompt = tuple(
            replace(message, content=special.hide_ends(special.hide(message.content)), keys=special.hide(message.keys))
            for message in row.prompt
        )
        variables = special.hide(row.variables)
        changed = prompt != tuple(row.prompt) or variables != row.variables
        return replace(row, prompt=prompt, variables=variables) if changed else row

    def _ids_by_part(self, texts: Sequence[str], inside: bool = False) -> list[list[int]]:
        """The ids of each rendered text in which special tokens are the template's own."""
        parts = [list(self._special.parts(text)) for text in texts]
        ordinary = [part for each in parts for part, special in each if not special]
        encoded = iter(self._encoder.encode_inside(ordinary) if inside else self.encode_many(ordinary, split=True))
        return [
            [i for part, special in each for i in ([self._special.ids[part]] if special else next(encoded))]
            for each in parts
        ]

    @property
    def _first_id(self) -> int:
        """The only id of a prompt that renders to an empty text: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer)

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(special_tokens(self.tokenizer))

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says what of a turn is learned."""
        return GENERATION.search(str(self.tokenizer.chat_template)) is not None

    @property
    def _ends(self) -> tuple[str, ...]:
        """The tokens that end a turn."""
        return (str(self.tokenizer.eos_token),)

    @cached_property
    def ending(self) -> tuple[int, ...]:
        """The ids after a response's content in a whole dialogue: EOS, and what the template writes after it; without
        padding at the end, which a sequence classifier does not read."""
        ids = self.written_ending(self.tokenizer.pad_token_id)
        eos = int(self.tokenizer.eos_token_id)
        return ids if ids[:1] == (eos,) else (eos,)

    def written_ending(self, pad_token_id: int | None) -> tuple[int, ...]:
        """The same as the template writes it: without EOS if it writes none. pad_token_id: of the model that reads"""
        try:
            _, after = turn_frame(self.tokenizer)
        except UserError:  # a template for single prompts
            return (int(self.tokenizer.eos_token_id),)
        before, eos, rest = after.partition(str(self.tokenizer.eos_token))
        ids = self.encode_many([after if before.strip() else eos + rest or after], split=False)[0]
        while ids and ids[-1] == pad_token_id:
            ids.pop()
        return tuple(ids)

    @cached_property
    def frame(self) -> tuple[str, str]:
        """What the template writes between the prompt and an assistant's content, and after that content to the end."""
        before, after = turn_frame(self.tokenizer)
        body, end = until_end(after, self._ends, "")
        return before, body + end

    @cached_property
    def _spaces(self) -> tuple[str, str]:
        """What surrounds a response: all before the content, and the white space between the content and EOS."""
        before, after = self.frame
        space, eos, _ = after.partition(str(self.tokenizer.eos_token))
        return before, space if eos and space.isspace() else ""

    @cached_property
    def _thought(self) -> tuple[str, str]:
        return thought_frame(self.tokenizer)

    @cached_property
    def _opens_thought(self) -> bool:
        """Whether a generation prompt without variables begins a thought, which the response ends."""
        return not self._thought[0].strip() and bool(self.frame[0].strip())

    @cached_property
    def _prompt_starts_text(self) -> bool:
        """Whether an empty prompt has special tokens only, and a text after it is encoded like the start of a text."""
        alone = self._encoder.encode("a")
        after = self.encode_many([self.prompt_text(()) + "a"], split=False)[0]
        return not self._encoder.decode(self.prompt_ids(())) and after[-len(alone) :] == alone
