"""Tokenizers and chat templates: the only place where text becomes ids and ids become text.

A prompt and a response are always encoded apart and joined as ids, so one text has one sequence of ids
in fine-tuning, in reward modelling and in a rollout.
"""

import copy
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config import UserError, read_yaml, suggest
from rlhf.types import Message

HUB_TIMEOUT = 5.0
"""seconds to wait for the hub's first answer"""

MAX_TEMPLATE = 100_000
"""characters; a longer Jinja file is refused"""

PAD = "<|pad|>"

BUILT_IN = {
    # The text as it is. A language model needs one token to start from, hence EOS where there is no BOS.
    "plain": "{{ bos_token if bos_token else eos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    # As Anthropic's HH dialogues are written; a system message stands before the first turn.
    "human_assistant": (
        "{% if bos_token %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ '\n\nAssistant: ' }}"
        "{% elif m['role'] != 'system' %}{{ '\n\nHuman: ' }}{% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
    ),
    # Models made for this format have '<|im_start|>' as their BOS: it is not written twice.
    "chatml": (
        "{% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


def require_hub(what: str) -> None:
    """Refuse at once when `what` is to come from the hub and the hub does not answer.

    Without this the hub's own retries hold a run without network for up to a minute. With HF_HUB_OFFLINE=1
    nothing is asked: the local cache answers.
    Raises: UserError with the cure, after HUB_TIMEOUT seconds at most.
    """
    if constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return  # an answer, if not a friendly one: what follows says more
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            return  # the hub's own client may trust other certificates
        raise UserError(
            f"{what}: no such local path, and the hub at {constants.ENDPOINT} does not answer ({error}); "
            "give a local path, or set HF_HUB_OFFLINE=1 if it is in the local cache"
        ) from None


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
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{place}: no tokenizer can be loaded from there: {reason}") from None
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
    """A copy of `tokenizer` with a padding token that is not EOS, and with the template the name stands for.

    transformers' sequence classifiers pool the last id that is not padding, so with pad = EOS they would look
    past a response's end. `len(result)` may exceed the model's embedding by one, when padding had to be added.

    `chat_template`: 'auto' (the tokenizer's own, else human_assistant), a name in BUILT_IN, or a Jinja file.
    Raises: UserError for an unknown name or a template that does not render.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = _find_template(tokenizer, chat_template)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _choose_pad(tokenizer)
    Template(tokenizer).prompt_text([Message("user", "x")])
    return tokenizer


def _find_template(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if name == "auto":
        return own or BUILT_IN["human_assistant"]
    if name in BUILT_IN:
        return BUILT_IN[name]
    known = ["auto", *BUILT_IN]
    if not Path(name).is_file():
        raise UserError(f"no chat template '{name}'; have {', '.join(known)}, or a Jinja file{suggest(name, known)}")
    text = Path(name).read_text(encoding="utf-8", errors="replace")
    if len(text) > MAX_TEMPLATE:
        raise UserError(f"{name}: got {len(text)} characters, expected a chat template of at most {MAX_TEMPLATE}")
    return text


def _choose_pad(tokenizer: PreTrainedTokenizerBase) -> str:
    """An unused special token if there is one, which needs no new row in the embedding."""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    template = str(tokenizer.chat_template)
    free = [text for text, i in _special_tokens(tokenizer).items() if i not in ends and text not in template]
    named_pad = [text for text in free if "pad" in text.lower()]
    unknown = [text for text in free if text == tokenizer.unk_token or "unk" in text.lower()]
    for text in named_pad + unknown + free:
        return text
    tokenizer.add_special_tokens({"pad_token": PAD})
    return PAD


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {str(token): i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}


@dataclass(frozen=True)
class Template:
    """How messages and responses become ids, over a tokenizer from `prepare_tokenizer`."""

    tokenizer: PreTrainedTokenizerBase

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The rendered prompt up to where a response begins. No messages count as one empty user message."""
        return self._render(messages or [Message("user", "")], add_generation_prompt=True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the rendered prompt; BOS only where the template writes it.

        A special token that a message spells out ("</s>") is encoded as ordinary text. Then, and only then, the
        text is encoded in stretches between the template's own special tokens; a tokenizer that marks the start
        of a text with a space marks each stretch, and special tokens do not swallow neighbouring spaces.
        """
        if not any(token in message.content for message in messages for token in self._special):
            return self._encode(self.prompt_text(messages), split=False) or [self._start]
        ids: list[int] = []
        stretch = ""
        for piece, special in self._pieces(messages):
            if special:
                ids += [*self._encode(stretch, split=True), self._special[piece]]
                stretch = ""
            else:
                stretch += piece
        return ids + self._encode(stretch, split=True)

    def response_ids(self, text: str) -> list[int]:
        """The ids of a response as the template places it, and one EOS.

        Where the template puts a space before a response, a text that already begins with one gets no second.
        """
        prefix = "" if text[:1].isspace() or not text else self._response_prefix
        return [*self._encode_inside(prefix + text), self.tokenizer.eos_token_id]

    def opening_ids(self, text: str) -> list[int]:
        """`response_ids` after an empty prompt: where the template writes nothing, the text starts a sequence.

        The tokenizers that mark the start of a text with a space then do so, as they do in a prompt.
        """
        if self._decode(self.prompt_ids(())):
            return self.response_ids(text)
        return [*self._encode(text, split=True), self.tokenizer.eos_token_id]

    def response_text(self, ids: Sequence[int]) -> str:
        """The text of a response without special tokens and without the template's space before it."""
        before = self._anchor if self._marks_start else []
        text = self._decode([*before, *ids]).removeprefix(self._decode(before))
        return text.removeprefix(self._response_prefix)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        dicts = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                dicts, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise UserError(f"the chat template does not render messages of roles ({roles}): {error}") from None
        return str(text)

    def _pieces(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The rendered prompt cut into (text, is a special token of the template)."""
        marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
        marked = [Message(message.role, mark) for message, mark in zip(messages, marks, strict=True)]
        cuts = sorted([*self._special, *marks], key=len, reverse=True)
        parts = [part for part in re.split(f"({'|'.join(map(re.escape, cuts))})", self.prompt_text(marked)) if part]
        for change in (str, str.strip):  # many templates trim what they are given
            contents = {mark: change(message.content) for mark, message in zip(marks, messages, strict=True)}
            if "".join(contents.get(part, part) for part in parts) == self.prompt_text(messages):
                return [(contents.get(part, part), part in self._special) for part in parts]
        raise UserError(
            "a message spells out a special token, and the chat template rewrites messages, so the two cannot be "
            "told apart; choose another --chat-template or remove the token from the data"
        )

    @property
    def _start(self) -> int:
        """What a sequence starts with when a prompt renders to nothing at all: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    @cached_property
    def _special(self) -> dict[str, int]:
        return _special_tokens(self.tokenizer)

    @cached_property
    def _response_prefix(self) -> str:
        """The white space the template writes between the prompt and an assistant's message."""
        mark = "\ue000"
        user = Message("user", "x")
        whole = self._render([user, Message("assistant", mark)], add_generation_prompt=False)
        prefix = whole.partition(mark)[0].removeprefix(self.prompt_text([user]))
        return prefix if prefix.isspace() else ""

    @cached_property
    def _anchor(self) -> list[int]:
        return self._encode("\n", split=True)

    @cached_property
    def _marks_start(self) -> bool:
        """Whether the tokenizer opens every text with a space mark, as those of the Llama 2 family do."""
        size = len(self._anchor)
        inside = self._encode("\na", split=True)
        return inside[:size] == self._anchor and inside[size:] != self._encode("a", split=True)

    def _encode_inside(self, text: str) -> list[int]:
        """The ids of `text` as they are in the middle of a longer text."""
        if not self._marks_start:
            return self._encode(text, split=True)
        ids = self._encode("\n" + text, split=True)
        size = len(self._anchor)
        return ids[size:] if ids[:size] == self._anchor else self._encode(text, split=True)

    def _encode(self, text: str, *, split: bool) -> list[int]:
        options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": split, "verbose": False}
        return list(self.tokenizer.encode(text, **options)) if text else []

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both write every dialogue with the same ids: vocabulary, special tokens and template agree."""
    special = ("bos_token_id", "eos_token_id", "chat_template")
    return one.get_vocab() == other.get_vocab() and all(getattr(one, n) == getattr(other, n) for n in special)
