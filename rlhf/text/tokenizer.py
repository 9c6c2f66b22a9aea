"""Tokenizers and chat templates: the only module that turns text into ids and ids into text.

A prompt and a response are always encoded separately and joined as ids, so that a text has the same ids
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
    with_file,
)
from rlhf.storage import manifests
from rlhf.text.encoder import Encoder, make_eos, special_tokens
from rlhf.text.rendering import (
    assistant_turns,
    check_template,
    frame,
    render,
    split_prompt,
    split_special_tokens,
    template_output,
    turn_end,
)
from rlhf.text.templates import find_template
from rlhf.types import Message

PAD = "<|pad|>"
IS_CHECKPOINT = "; this directory is a checkpoint, from which a stage resumes; --export-every N writes models too"

EMPTY_PROMPT = (Message("user", ""),)
"""what a prompt without messages is replaced by"""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, of a hub id, or of a `.yaml` description of a random tiny model.

    Raises: UserError if there is no tokenizer, or it has no EOS token.
    """
    path = with_file(path, *TOKENIZER_FILES[1:], "tokenizer.json")
    if path.endswith((".yaml", ".yml")):
        return _word_tokenizer(path)
    if not Path(path).is_dir():
        if Path(path).is_file():
            raise UserError(f"{path}: got a file, expected a model directory, a hub id or a .yaml file")
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
            raise UserError(f"{path}: no such directory; expected a model directory, a hub id or a .yaml file")
        require_hub(path)
    elif not any((Path(path) / name).is_file() for name in ("config.json", "tokenizer.json", *TOKENIZER_FILES)):
        have = manifests.models_beneath(Path(path))  # before the next: a stage's directory has a state.json, too
        hint = have or (IS_CHECKPOINT if (Path(path) / "state.json").is_file() else "")
        raise UserError(
            f"{path}: the directory has no config.json and no tokenizer.json; expected a Hugging Face model directory"
            f"{hint}"
        )
    read_mappings(path, Path(path), TOKENIZER_FILES)
    refuse_tokenizer(path)
    try:
        with PlainErrors():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise UserError(f"{path}: no tokenizer can be loaded from it: {tokenizer_reason(path, error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"{path}: got a {type(tokenizer).__name__}, expected a tokenizer of one language model")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{path}: the tokenizer has no EOS token, and a response must end in one; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def _word_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A word-level tokenizer: words are separated by white space, and decoding joins them with one space."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; expected a YAML description of a model")
    section = read_yaml(path).get("tokenizer")
    words = section.get("words") if isinstance(section, dict) else None
    if not isinstance(words, list) or not words:
        raise UserError(f"{path}: tokenizer.words: got {words!r}, expected a list of words")
    for word in words:
        if not isinstance(word, str) or word.split() != [word] or "<" in word:
            raise UserError(f"{path}: tokenizer.words: got {word!r}, expected a word without '<' (quote yes, no)")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(special + words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # "<" is a token of its own, so that the text "</s>" becomes unknown words and never the end token.
    split = pre_tokenizers.Split("<", behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` with the named template, one end token, and a padding token that is not the end token.

    If the template ends an assistant turn with a token of the tokenizer, that token becomes EOS, so that responses end
    like the assistant's earlier turns. Padding differs from EOS because transformers' sequence classifiers read the
    last id that is not padding: with pad = EOS they would miss the end of a response. `len(result)` may exceed the
    model's embedding by one, when a padding token had to be added.

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
    """The padding token: an unused special token that is not in `ends`, which needs no new embedding row; else PAD."""
    used = template_output(tokenizer)
    unused = [text for text, i in special_tokens(tokenizer).items() if i not in ends and text not in used]
    named_pad = [text for text in unused if "pad" in text.lower()]
    unknown = [text for text in unused if text == tokenizer.unk_token or "unk" in text.lower()]
    for text in named_pad + unknown + unused:
        return text
    tokenizer.add_special_tokens({"pad_token": PAD})
    return PAD


@dataclass(frozen=True)
class Template:
    """Messages and responses to ids, with a tokenizer from `prepare_tokenizer`.

    The methods for many rows give the same results as those for one row, but faster.
    """

    tokenizer: PreTrainedTokenizerBase

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The rendered prompt, with the prefix of a response. No messages count as one empty user message."""
        return render(self.tokenizer, [messages or EMPTY_PROMPT])[0]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the rendered prompt; BOS only if the template writes it.

        If a message contains the text of a special token ("</s>"), it is encoded as ordinary text. Only then is the
        prompt encoded in parts, between the template's own special tokens. A tokenizer that puts a space before a text
        then does so for each part, and special tokens do not remove spaces beside them.
        """
        return self.prompt_ids_many([messages])[0]

    def prompt_ids_many(self, dialogues: Sequence[Sequence[Message]]) -> list[list[int]]:
        """`prompt_ids` of each dialogue.

        Raises: UserError if the template cannot render a dialogue; the error does not name the dialogue.
        """
        spells_special = [self._spells_special(messages) for messages in dialogues]
        ordinary = [
            messages or EMPTY_PROMPT for messages, spells in zip(dialogues, spells_special, strict=True) if not spells
        ]
        encoded = iter(self.encode_many(render(self.tokenizer, ordinary), split=False))
        return [
            self._ids_by_part(messages) if spells else next(encoded) or [self._first_id]
            for messages, spells in zip(dialogues, spells_special, strict=True)
        ]

    def prompt_ids_and_turns(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """(`prompt_ids`, True for each token of an assistant turn in them).

        A turn has the tokens of `response_ids`: the content, the white space that the template writes before and after
        it, and the end token if the template writes one. A token that is partly inside a turn counts too.
        Raises: UserError for a slow tokenizer, or a template that changes contents in another way than trimming them.
        """
        messages = messages or EMPTY_PROMPT
        segments = split_prompt(self.tokenizer, messages)
        text = "".join(segment.text for segment in segments)
        in_turn = bytearray(len(text))  # 1 for each character of an assistant turn
        for turn in assistant_turns(segments, messages, self._white_space, str(self.tokenizer.eos_token)):
            in_turn[turn] = b"\1" * len(in_turn[turn])
        ids: list[int] = []
        turn_mask: list[bool] = []
        offset = 0
        split = self._spells_special(messages)
        for part, special in split_special_tokens(self._special_pattern, segments) if split else [(text, False)]:
            tokens, spans = self._encoder.encode_with_spans(part, split and not special)
            ids += tokens
            turn_mask += [any(in_turn[offset + start : offset + end]) for start, end in spans]
            offset += len(part)
        return (ids, turn_mask) if ids else ([self._first_id], [False])

    def response_ids(self, text: str) -> list[int]:
        """The ids of a response with the template's white space, and one EOS.

        If the text already begins with white space, the template's white space is not added.
        """
        return self.response_ids_many([text])[0]

    def opening_ids(self, text: str) -> list[int]:
        """`response_ids` after an empty prompt: if the template writes nothing there, the response starts the text.

        A tokenizer that puts a space before a text then does so.
        """
        return self.response_ids_many([text], [True])[0]

    def response_ids_many(self, texts: Sequence[str], opening: Sequence[bool] = ()) -> list[list[int]]:
        """`response_ids` of each text; `opening_ids` where `opening`, empty or one bool for each text, is True."""
        starts = [after_nothing and self._prompt_starts_text for after_nothing in opening or [False] * len(texts)]
        first = [text for text, start in zip(texts, starts, strict=True) if start]
        later = [self._with_white_space(text) for text, start in zip(texts, starts, strict=True) if not start]
        first_ids, later_ids = iter(self.encode_many(first, split=True)), iter(self._encoder.encode_inside(later))
        return [[*next(first_ids if start else later_ids), self.tokenizer.eos_token_id] for start in starts]

    def response_text(self, ids: Sequence[int]) -> str:
        """The text of a response without special tokens and without the template's white space."""
        before, after = self._white_space
        return self._encoder.decode_inside(ids).removeprefix(before).removesuffix(after)

    def settled_text(self, ids: Sequence[int]) -> str:
        """The start of `response_text` that no further id can change: for a response that is still being written.

        The bytes of an unfinished character are left out, and white space that may prove to be the template's.
        """
        before, after = self._white_space
        if self._encoder.ends_in_a_byte(ids):  # the next byte decides how all bytes before it are read
            return ""
        text = self._encoder.decode_inside(ids).rstrip("\ufffd")
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

    def _spells_special(self, messages: Sequence[Message]) -> bool:
        text = "".join(message.content for message in messages)  # a template may put nothing between two contents
        return any(start in text for start in self._special_starts) and any(token in text for token in self._special)

    def _ids_by_part(self, messages: Sequence[Message]) -> list[int]:
        parts = list(split_special_tokens(self._special_pattern, split_prompt(self.tokenizer, messages)))
        encoded = iter(self.encode_many([text for text, special in parts if not special], split=True))
        return [i for text, special in parts for i in ([self._special[text]] if special else next(encoded))]

    def _with_white_space(self, text: str) -> str:
        """A response with the white space that the template writes before and after an assistant's content."""
        before, after = self._white_space
        if not text:
            return text
        return text + after if text[0].isspace() else before + text + after

    @property
    def _first_id(self) -> int:
        """The only id of a prompt that renders to an empty text: BOS, else EOS."""
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
        """The first characters of special tokens: a text without them contains no special token (a quick test)."""
        return frozenset(token[0] for token in self._special)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def _white_space(self) -> tuple[str, str]:
        """The white space that the template writes before an assistant's content, and between that and EOS."""
        before, after = frame(self.tokenizer)
        space, eos, _ = after.partition(str(self.tokenizer.eos_token))
        return before, space if eos and space.isspace() else ""

    @cached_property
    def _prompt_starts_text(self) -> bool:
        """Whether an empty prompt has special tokens only, and a text after it is encoded like the start of a text."""
        alone = self._encoder.encode("a")
        after = self.encode_many([self.prompt_text(()) + "a"], split=False)[0]
        return not self._encoder.decode(self.prompt_ids(())) and after[-len(alone) :] == alone


def same_ids(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether both give the same ids for every dialogue: vocabulary, special tokens and template are equal."""
    special = ("bos_token_id", "eos_token_id", "chat_template")
    return first.get_vocab() == second.get_vocab() and all(getattr(first, n) == getattr(second, n) for n in special)


def describe_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A manifest's entries for a prepared tokenizer: the text of its chat template, and its end token."""
    return {"chat_template": str(tokenizer.chat_template), "eos_token": str(tokenizer.eos_token)}
