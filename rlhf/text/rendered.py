"""Dialogues that someone has rendered already, back to messages.

Many notebooks store a dialogue as one text with the markers of the model's template. The template is asked what it
writes between two turns, and the text is divided there. The result counts only if the template renders it to the same
text.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.text.encoder import special_tokens
from rlhf.text.rendering import MARK, render
from rlhf.text.special import SpecialTokens
from rlhf.text.templates import THOUGHT_TAG
from rlhf.types import Message, Row


@dataclass(frozen=True, slots=True)
class Markers:
    """What a template writes around the turns of a dialogue."""

    tokenizer: PreTrainedTokenizerBase
    special: SpecialTokens
    heads: tuple[tuple[str, str], ...]
    """what begins a dialogue, and what follows its system message; ("", "") for one without"""
    answer: str
    """between a user's turn and the assistant's"""
    question: str
    """between an assistant's turn and the user's"""
    end: str
    """after an assistant's last turn"""
    prompt: str
    """after the user's turn that asks for a response"""

    @property
    def opening(self) -> str:
        """What begins every answer, without the space around it."""
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.answer, self.prompt, strict=False))
        return "".join(first for first, _ in pairs).strip()

    def inside(self, text: str) -> bool:
        """Whether a text may be a rendered dialogue: a quick test."""
        return self.opening in text

    def begins(self, text: str) -> bool:
        """Whether a text begins with a special token with which the template begins a dialogue."""
        token = self.special.pattern.match(self._bare(text))
        return token is not None and any(head.startswith(token[0]) for head, _ in self.heads)

    def dialogue(self, text: str) -> tuple[Message, ...]:
        """The messages of a rendered text; none if it is no rendered dialogue of system, user and assistant."""
        bare = self._bare(text)
        for head, after_system in self.heads:
            turns = self._divided(bare, head, after_system)
            spelled = any(self.special.spelled_in(turn.content) for turn in turns)
            if turns and not spelled and bare in map(self._bare, self._rendered(turns)):
                return turns
        return ()

    def _divided(self, text: str, head: str, after_system: str) -> tuple[Message, ...]:
        if not text.startswith(head):
            return ()
        system, divider, rest = (
            text[len(head) :].partition(after_system) if after_system else ("", "", text[len(head) :])
        )
        prompt = self._bare_end(self.prompt)
        asks = bool(prompt) and rest.endswith(prompt)
        rest = rest.removesuffix(prompt if asks else self._bare_end(self.end))
        parts = re.split(f"({re.escape(self.answer)}|{re.escape(self.question)})", rest)
        contents, separators = parts[::2], parts[1::2]
        alternate = [(self.answer, self.question)[i % 2] for i in range(len(separators))]
        if separators != alternate or (after_system and not divider):
            return ()
        if len(contents) % 2 == 0 and not contents[-1]:
            contents.pop()  # the answer that a prompt asks for
        turns = [Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]
        return (*([Message("system", system)] if after_system else []), *turns)

    def _rendered(self, turns: tuple[Message, ...]) -> list[str]:
        asks = (False,) if turns[-1].role == "assistant" else (True, False)
        try:
            return [render(self.tokenizer, [turns], add_generation_prompt=ask)[0] for ask in asks]
        except UserError:
            return []

    def _bare(self, text: str) -> str:
        """A text without BOS, and without space and special tokens at its end: those depend on who rendered it."""
        return _bare_start(self._bare_end(text), self.tokenizer)

    def _bare_end(self, text: str) -> str:
        before = None
        while before != text:
            before, text = text, text.rstrip()
            for token in self.special.ids:
                text = text.removesuffix(token)
        return text


def prompt_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> Row:
    """The row of a prompt; of one that someone has rendered with the tokenizer's template, its messages.

    Raises: UserError for a text with the template's markers that is no dialogue which ends with a user's turn.
    """
    markers = markers_of(tokenizer)
    if markers is None or len(row.prompt) != 1 or row.variables or not markers.inside(row.prompt[0].content):
        return row
    text = row.prompt[0].content
    turns = markers.dialogue(text)
    if turns and turns[-1].role == "user":
        return replace(row, prompt=turns)
    if markers.begins(text):
        raise UserError(
            "got a prompt with the chat template's markers that is no dialogue up to a user's turn as the template "
            "renders it, and the markers would be read as ordinary text; give its turns as a list of messages"
        )
    return row


def _bare_start(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    bos = tokenizer.bos_token or ""
    text = text.lstrip()
    while bos and text.startswith(bos):
        text = text.removeprefix(bos).lstrip()
    return text


@lru_cache(maxsize=64)
def markers_of(tokenizer: PreTrainedTokenizerBase) -> Markers | None:
    """The markers of a prepared tokenizer's template; None if it does not write any between turns."""
    turns = _written(tokenizer, "user", "assistant", "user", "assistant")
    prompt = _written(tokenizer, "user", ask=True)
    if not turns or not prompt or not turns[2].strip():
        return None
    special = SpecialTokens({text: i for text, i in special_tokens(tokenizer).items() if THOUGHT_TAG not in text})
    system = _written(tokenizer, "system", "user", "assistant")
    heads = [(_bare_start(turns[0], tokenizer), "")]
    if system and system[1] and (_bare_start(system[0], tokenizer) or special.pattern.search(system[1])):
        heads.append((_bare_start(system[0], tokenizer), system[1]))
    heads.sort(key=lambda each: len(each[0]), reverse=True)  # "[INST] <<SYS>>" before "[INST]"
    markers = Markers(tokenizer, special, tuple(heads), turns[1], turns[2], turns[4], prompt[1])
    return markers if markers.opening else None


def _written(tokenizer: PreTrainedTokenizerBase, *roles: str, ask: bool = False) -> list[str]:
    """What the template writes before, between and after messages of these roles; nothing if it refuses them."""
    try:
        [text] = render(tokenizer, [[Message(role, MARK) for role in roles]], add_generation_prompt=ask)
    except UserError:
        return []
    parts = text.split(MARK)
    return parts if len(parts) == len(roles) + 1 else []
