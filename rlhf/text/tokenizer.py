"""Tokenizers: loaded, and prepared with a chat template, one end token and a padding token."""

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
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
    tokenizer_reason,
    with_file,
)
from rlhf.storage import manifests
from rlhf.text.encoder import make_eos, special_tokens
from rlhf.text.rendering import check_template, template_output
from rlhf.text.templates import find_template, with_defaults
from rlhf.text.turns import turn_end

PAD = "<|pad|>"
IS_CHECKPOINT = "; this directory is a checkpoint, from which a stage resumes; --export-every N writes models too"
PROBES = (
    "Hello, it's the 1st of 12345678 'EXAMPLES', isn't it?\n\n  Two  spaces,\ta tab\r\n and an end. \n",
    " def f(x_1):\n    return {'a': [x_1 + 0.25, \"b\"]}  # https://example.org/?q=1&r=%20\n",
    "naïve café \u2013 日本語のテキスト, 한국어, Привет, العربية, 🙂👍🏽 ﬁ Å\n",
)
"""texts on which two splits, or two normalisations, differ"""


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
    try:
        with PlainErrors():
            tokenizer = auto_tokenizer(path)
    except LOAD_ERRORS as error:
        raise UserError(f"{path}: no tokenizer can be loaded from it: {tokenizer_reason(path, error)}") from None
    if tokenizer.vocab_size == 0:  # it would leave out all text without a word
        raise UserError(f"{path}: the vocabulary of its tokenizer is empty; expected the tokenizer of a language model")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{path}: the tokenizer has no EOS token, and a response must end in one; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def auto_tokenizer(path: str, **options: str) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers loads; where its ids differ from those of tokenizer.json, that file as it is.

    transformers 5 builds a tokenizer anew by the class that tokenizer_config.json names, and takes from tokenizer.json
    little more than the vocabulary: a split of another family, as in DeepSeek's models of Llama's class, is dropped.
    """
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    local = Path(path) / "tokenizer.json"
    file = local if local.parent.is_dir() else Path(str(try_to_load_from_cache(path, "tokenizer.json")))
    if (
        not loaded.is_fast
        or not file.is_file()
        or _ids(Tokenizer.from_file(str(file))) == _ids(loaded.backend_tokenizer)
    ):
        return loaded
    settings: Any = {**loaded.special_tokens_map, **options}
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, **settings)
    return loaded if _ids(plain.backend_tokenizer) == _ids(loaded.backend_tokenizer) else plain


def _ids(backend: Tokenizer) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch(list(PROBES), add_special_tokens=False)]


def _word_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A word-level tokenizer: words are separated by white space, and decoding joins them with one space."""
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


def prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, variables: str | None = None
) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` with the named template, one end token, and a padding token that is not the end token.

    If the template ends an assistant turn with a token of the tokenizer, that token becomes EOS, so that responses end
    like the assistant's earlier turns. Padding differs from EOS because transformers' sequence classifiers read the
    last id that is not padding: with pad = EOS they would miss the end of a response. `len(result)` may exceed the
    model's embedding by one, when a padding token had to be added.

    chat_template: 'auto' (the tokenizer's own, else human_assistant), a name in BUILT_IN, or a Jinja file. variables:
    what the template gets unless a row says otherwise, as JSON; the template then says so itself, and the saved model
    has it.
    Raises: UserError for an unknown name or a template that does not render.
    """
    tokenizer = copy.deepcopy(tokenizer)
    template = find_template(chat_template, tokenizer.chat_template)
    tokenizer.chat_template = with_defaults(template, json.loads(variables or "{}"))
    try:
        check_template(tokenizer)
    except UserError as error:
        raise UserError(f"--chat-template {chat_template}: {error}") from None
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    end = turn_end(tokenizer) or str(tokenizer.eos_token)
    if end != tokenizer.eos_token and re.search(r"\beos_token\b", tokenizer.chat_template):  # it means the former one
        tokenizer.chat_template = (
            f"{{% set eos_token = {tokenizer.eos_token!r} %}}{{{{ '' }}}}{tokenizer.chat_template}"
        )
    make_eos(tokenizer, end)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _choose_pad(tokenizer, ends | {tokenizer.eos_token_id})
    return tokenizer


def _choose_pad(tokenizer: PreTrainedTokenizerBase, ends: set[int | None]) -> str:
    """The padding token: an unused special token for padding, unknown words or later use, which needs no new embedding
    row; else PAD. Other special tokens have a meaning, such as `<|observation|>` of GLM-4, which ends a response."""
    used = template_output(tokenizer)
    unused = [text for text, i in special_tokens(tokenizer).items() if i not in ends and text not in used]
    named_pad = [text for text in unused if "pad" in text.lower()]
    unknown = [text for text in unused if text == tokenizer.unk_token or "unk" in text.lower()]
    reserved = [text for text in unused if any(word in text.lower() for word in ("reserved", "unused"))]
    for text in named_pad + unknown + reserved:
        return text
    tokenizer.add_special_tokens({"pad_token": PAD})
    return PAD


def same_ids(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether both give the same ids for every dialogue: vocabulary, special tokens and template are equal."""
    special = ("bos_token_id", "eos_token_id", "chat_template")
    return first.get_vocab() == second.get_vocab() and all(getattr(first, n) == getattr(second, n) for n in special)


def describe_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A manifest's entries for a prepared tokenizer: the text of its chat template, and its end token."""
    return {"chat_template": str(tokenizer.chat_template), "eos_token": str(tokenizer.eos_token)}


def digest_without_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what makes ids of a text: vocabulary, splits, normalisation, added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
