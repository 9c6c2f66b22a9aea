"""Tokenizers and chat templates: the only place where text becomes ids and ids become text.

A prompt and a response are always encoded apart and joined as ids, so one text has one sequence of ids
in fine-tuning, in reward modelling and in a rollout.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config import read_yaml
from rlhf.errors import UserError
from rlhf.hub.offline import require_hub
from rlhf.hub.untrusted import (
    LOAD_ERRORS,
    TOKENIZER_FILES,
    PlainErrors,
    read_mappings,
    refuse_tokenizer,
    tokenizer_reason,
)
from rlhf.text.encoder import Encoder, make_eos, special_tokens
from rlhf.text.rendering import check_template, cut_at, frame, pieces, render, turn_end, turns, written
from rlhf.text.templates import find_template
from rlhf.types import Message

PAD = "<|pad|>"
CHECKPOINT = "; this one is a checkpoint, from which a stage resumes: --export-every N writes models beside them"

NOTHING = (Message("user", ""),)
"""what a prompt without messages stands for"""


def load_tokenizer(place: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, of a hub id, or of a `.yaml` description of a random tiny model.

    Raises: UserError if there is no tokenizer, or it has no EOS token.
    """
    if place.endswith((".yaml", ".yml")):
        return _word_tokenizer(place)
    if not Path(place).is_dir():
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", place):
            raise UserError(f"{place}: no such directory; expected a model directory, a hub id or a .yaml file")
        require_hub(place)
    elif not any((Path(place) / name).is_file() for name in ("config.json", "tokenizer.json", *TOKENIZER_FILES)):
        raise UserError(
            f"{place}: the directory has no config.json and no tokenizer.json; expected a Hugging Face model directory"
            f"{CHECKPOINT if (Path(place) / 'state.json').is_file() else ''}"
        )
    read_mappings(place, Path(place), TOKENIZER_FILES)
    refuse_tokenizer(place)
    try:
        with PlainErrors():
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise UserError(f"{place}: no tokenizer can be loaded from there: {tokenizer_reason(place, error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"{place}: got a {type(tokenizer).__name__}, expected a tokenizer of one language model")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{place}: the tokenizer has no EOS token, and a response must end in one; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def _word_tokenizer(place: str) -> PreTrainedTokenizerBase:
    """A word-level tokenizer: words are parted by whitespace, and decoding puts one space between them."""
    if not Path(place).is_file():
        raise UserError(f"{place}: no such file; expected a YAML description of a model")
    section = read_yaml(place).get("tokenizer")
    words = section.get("words") if isinstance(section, dict) else None
    if not isinstance(words, list) or not words:
        raise UserError(f"{place}: tokenizer.words: got {words!r}, expected a list of words")
    for word in words:
        if not isinstance(word, str) or word.split() != [word] or "<" in word:
            raise UserError(f"{place}: tokenizer.words: got {word!r}, expected a word without '<' (quote yes, no)")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(special + words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # "<" stands alone, so that a text that spells out "</s>" gives unknown words and never the end token.
    split = pre_tokenizers.Split("<", behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` with the template the name stands for, one end token, and a padding token that is not it.

    Where the template closes an assistant's turn with a token of the tokenizer's, that token is its EOS from now on:
    responses end as the assistant's earlier turns do. transformers' sequence classifiers pool the last id that is not
    padding, so with pad = EOS they would look past a response's end. `len(result)` may exceed the model's embedding
    by one, when padding had to be added.

    `chat_template`: 'auto' (the tokenizer's own, else human_assistant), a name in BUILT_IN, or a Jinja file.
    Raises: UserError for an unknown name or a template that does not render.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = find_template(chat_template, tokenizer.chat_template)
    try:
        check_template(tokenizer)
    except UserError as error:
        raise UserError(f"--chat-template {chat_template}: {error}") from None
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    make_eos(tokenizer, turn_end(tokenizer) or tokenizer.eos_token)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _choose_pad(tokenizer, ends | {tokenizer.eos_token_id})
    return tokenizer


def _choose_pad(tokenizer: PreTrainedTokenizerBase, ends: set[int | None]) -> str:
    """An unused special token if there is one, which needs no new row in the embedding; none of `ends`."""
    used = written(tokenizer)
    free = [text for text, i in special_tokens(tokenizer).items() if i not in ends and text not in used]
    named_pad = [text for text in free if "pad" in text.lower()]
    unknown = [text for text in free if text == tokenizer.unk_token or "unk" in text.lower()]
    for text in named_pad + unknown + free:
        return text
    tokenizer.add_special_tokens({"pad_token": PAD})
    return PAD


@dataclass(frozen=True)
class Template:
    """How messages and responses become ids, over a tokenizer from `prepare_tokenizer`.

    What is done for many rows gives for each what is done for one, only faster.
    """

    tokenizer: PreTrainedTokenizerBase

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The rendered prompt up to where a response begins. No messages count as one empty user message."""
        return render(self.tokenizer, [messages or NOTHING])[0]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the rendered prompt; BOS only where the template writes it.

        A special token that a message spells out ("</s>") is encoded as ordinary text. Then, and only then, the
        text is encoded in stretches between the template's own special tokens; a tokenizer that marks the start
        of a text with a space marks each stretch, and special tokens do not swallow neighbouring spaces.
        """
        return self.prompt_ids_many([messages])[0]

    def prompt_ids_many(self, dialogues: Sequence[Sequence[Message]]) -> list[list[int]]:
        """`prompt_ids` of each dialogue.

        Raises: UserError at the first that the template does not render, without saying which it is.
        """
        spelled = [self._spells_special(messages) for messages in dialogues]
        harmless = [messages or NOTHING for messages, found in zip(dialogues, spelled, strict=True) if not found]
        encoded = iter(self.encode_many(render(self.tokenizer, harmless), split=False))
        return [
            self._ids_of_stretches(messages) if found else next(encoded) or [self._start]
            for messages, found in zip(dialogues, spelled, strict=True)
        ]

    def prompt_ids_and_turns(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """(`prompt_ids`, True for each token of an assistant's turn in them).

        A turn is what `response_ids` makes of its content: the content, the white space that the template writes
        around it, and the end token where the template writes that. A token that reaches beyond a turn counts too.
        Raises: UserError for a slow tokenizer, or a template that does more to messages than trim them.
        """
        messages = messages or NOTHING
        cut = pieces(self.tokenizer, messages)
        text = "".join(piece.text for piece in cut)
        spoken = bytearray(len(text))  # 1 for each character of an assistant's turn
        for turn in turns(cut, messages, self._around, str(self.tokenizer.eos_token)):
            spoken[turn] = b"\1" * len(spoken[turn])
        ids: list[int] = []
        said: list[bool] = []
        place = 0
        split = self._spells_special(messages)
        for stretch, special in cut_at(self._special_pattern, cut) if split else [(text, False)]:
            tokens, spans = self._encoder.encode_with_spans(stretch, split and not special)
            ids += tokens
            said += [any(spoken[place + start : place + end]) for start, end in spans]
            place += len(stretch)
        return (ids, said) if ids else ([self._start], [False])

    def response_ids(self, text: str) -> list[int]:
        """The ids of a response as the template places it, and one EOS.

        Where the template puts a space before a response, a text that already begins with one gets no second.
        """
        return self.response_ids_many([text])[0]

    def opening_ids(self, text: str) -> list[int]:
        """`response_ids` after an empty prompt: where the template writes nothing, the text starts a sequence.

        The tokenizers that mark the start of a text with a space then do so, as they do in a prompt.
        """
        return self.response_ids_many([text], [True])[0]

    def response_ids_many(self, texts: Sequence[str], opening: Sequence[bool] = ()) -> list[list[int]]:
        """`response_ids` of each text, or `opening_ids` where `opening`, one for each text if given, says so."""
        first = [opens and self._opens_texts for opens in opening or [False] * len(texts)]
        starting = iter(self.encode_many([t for t, opens in zip(texts, first, strict=True) if opens], split=True))
        inside = iter(
            self._encoder.encode_inside([self._placed(t) for t, opens in zip(texts, first, strict=True) if not opens])
        )
        return [[*next(starting if opens else inside), self.tokenizer.eos_token_id] for opens in first]

    def response_text(self, ids: Sequence[int]) -> str:
        """The text of a response without special tokens and without the template's white space around it."""
        before, after = self._around
        return self._encoder.decode_inside(ids).removeprefix(before).removesuffix(after)

    def encode_many(self, texts: Sequence[str], split: bool) -> list[list[int]]:
        """The ids of each text as it stands, no BOS added; with `split`, special tokens in it are ordinary text."""
        return self._encoder.encode_many(texts, split)

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as it stands in the middle of a longer one."""
        return [len(ids) for ids in self._encoder.encode_inside(texts)]

    def _spells_special(self, messages: Sequence[Message]) -> bool:
        said = "".join(message.content for message in messages)  # a template may put nothing between them
        return any(start in said for start in self._special_starts) and any(token in said for token in self._special)

    def _ids_of_stretches(self, messages: Sequence[Message]) -> list[int]:
        stretches = list(cut_at(self._special_pattern, pieces(self.tokenizer, messages)))
        encoded = iter(self.encode_many([text for text, special in stretches if not special], split=True))
        return [i for text, special in stretches for i in ([self._special[text]] if special else next(encoded))]

    def _placed(self, text: str) -> str:
        """A response between the white space that the template writes around an assistant's content."""
        before, after = self._around
        if not text:
            return text
        return text + after if text[0].isspace() else before + text + after

    @property
    def _start(self) -> int:
        """What a sequence starts with when a prompt renders to nothing at all: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer)

    @cached_property
    def _special(self) -> dict[str, int]:
        return special_tokens(self.tokenizer)

    @cached_property
    def _special_starts(self) -> frozenset[str]:
        """The few characters that special tokens begin with: a text without them spells none of hundreds."""
        return frozenset(token[0] for token in self._special)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def _around(self) -> tuple[str, str]:
        """The white space that the template writes before an assistant's content, and between that and EOS."""
        before, after = frame(self.tokenizer)
        space, eos, _ = after.partition(str(self.tokenizer.eos_token))
        return before, space if eos and space.isspace() else ""

    @cached_property
    def _opens_texts(self) -> bool:
        """Whether an empty prompt is special tokens at most, and what follows is encoded as what starts a text."""
        alone = self._encoder.encode("a")
        after = self.encode_many([self.prompt_text(()) + "a"], split=False)[0]
        return not self._encoder.decode(self.prompt_ids(())) and after[-len(alone) :] == alone


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both write every dialogue with the same ids: vocabulary, special tokens and template agree."""
    special = ("bos_token_id", "eos_token_id", "chat_template")
    return one.get_vocab() == other.get_vocab() and all(getattr(one, n) == getattr(other, n) for n in special)


def describe_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a manifest says of a prepared tokenizer: the text of its chat template, and its end token."""
    return {"chat_template": str(tokenizer.chat_template), "eos_token": str(tokenizer.eos_token)}
