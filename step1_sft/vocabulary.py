"""More tokens for a tokenizer: from a list, or those of another tokenizer (Chinese LLaMA, arXiv 2304.08177).

A new token is matched in the text before the tokenizer's own model sees it, the longest one first.
"""

import copy
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AddedToken, PreTrainedTokenizerBase

from rlhf import plugins
from rlhf.adapters import virtual_tokens
from rlhf.errors import UserError
from rlhf.hub.untrusted import LOAD_ERRORS, PlainErrors
from rlhf.roles import tokenizer_of
from rlhf.text.encoder import Encoder, id_count, special_tokens
from rlhf.text.tokenizer import load_tokenizer
from step1_sft.config import SFTConfig

WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""first words of the Unicode names of letters whose scripts put no spaces between words"""
Pieces = dict[int, list[int]]
"""for each new id, the ids that its text had before"""


def extended_tokenizer(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer of the model with the tokens that the options add.

    Raises: UserError if they add none, or with an adapter whose weights are sharded or shared.
    """
    if config.add_tokens is None and config.extend_tokenizer is None:
        return tokenizer
    if config.adapter is not None and config.zero_stage == 3:
        raise UserError(
            "--add-tokens, --extend-tokenizer: got --zero-stage 3 with an adapter, under which PEFT cannot train rows "
            "of a sharded embedding; use --zero-stage 2, or train all weights"
        )
    if config.adapter is not None and (name := plugins.parse_spec(config.adapter)[0]) == "trainable_tokens":
        raise UserError(
            f"--add-tokens, --extend-tokenizer: got --adapter {name}, expected another: the new rows are trained with "
            "every adapter"
        )
    if virtual_tokens(config.adapter):
        raise UserError(
            f"--add-tokens, --extend-tokenizer: got --adapter {config.adapter}, which is saved without rows of the "
            "base model; expected one that is merged, as lora"
        )
    if config.share_trunk:
        raise UserError(
            "--add-tokens, --extend-tokenizer: got --share-trunk, whose base model keeps its rows; first train "
            "the rows in a run of step 1 without it"
        )
    if config.add_tokens is not None:
        tokenizer = with_list(tokenizer, config.add_tokens)
    if config.extend_tokenizer is not None:
        tokenizer = with_tokens_of(tokenizer, config.extend_tokenizer)
    return tokenizer


def added_ids(config: SFTConfig, path: str) -> tuple[int, int] | None:
    """(ids of the tokenizer of the model at `path`, ids with the tokens that the options add); None if they add
    none."""
    if config.add_tokens is None and config.extend_tokenizer is None:
        return None
    before = tokenizer_of(path)  # a plan also tries settings that `extended_tokenizer` refuses
    bare = SFTConfig(model=path, add_tokens=config.add_tokens, extend_tokenizer=config.extend_tokenizer)
    return id_count(before), id_count(extended_tokenizer(bare, before))


def with_list(tokenizer: PreTrainedTokenizerBase, path: str) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` with the tokens of a file, one on a line, that it divides; ids are only added.

    Raises: UserError if the file cannot be read, or nothing is new.
    """
    source = f"--add-tokens {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: cannot be read as UTF-8 text: {error}") from None
    return _extended(tokenizer, lines, source, whole_words=False)


def with_tokens_of(tokenizer: PreTrainedTokenizerBase, path: str) -> PreTrainedTokenizerBase:
    """The same with the tokens of another tokenizer: a directory, a tokenizer.json, or a hub id.

    Special tokens, white space and parts of a character are left out; a word of a script with spaces matches whole
    words only. Raises: UserError as above.
    """
    source, file = f"--extend-tokenizer {path}", Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if file.is_file():
        try:
            with PlainErrors():
                backend = Tokenizer.from_file(str(file))
        except LOAD_ERRORS as error:
            raise UserError(f"{source}: {file} is no tokenizer: {error}") from None
    else:
        backend = load_tokenizer(path).backend_tokenizer
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ids = sorted(i for i in backend.get_vocab().values() if i not in special)
    texts = [text.strip() for text in backend.decode_batch([[i] for i in ids])]
    return _extended(tokenizer, texts, source, whole_words=True)


def _extended(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], source: str, whole_words: bool
) -> PreTrainedTokenizerBase:
    extended = copy.deepcopy(tokenizer)
    special = special_tokens(tokenizer)
    candidates = [t for t in dict.fromkeys(texts) if t.strip() and "\ufffd" not in t and t not in special]
    encoded = Encoder(tokenizer).encode_many(candidates, split=True)
    new = [text for text, ids in zip(candidates, encoded, strict=True) if len(ids) > 1]
    if not new:
        raise UserError(f"{source}: every token is a token of the model already; expected new ones")
    extended.add_tokens(
        [AddedToken(text, normalized=False, single_word=whole_words and not _without_spaces(text)) for text in new]
    )
    return extended


def _without_spaces(text: str) -> bool:
    return any(unicodedata.name(letter, "").startswith(WITHOUT_SPACES) for letter in text)


def pieces(before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase) -> Pieces:
    """The new ids of `after`, an extension of `before`, each with the ids of its text in `before`."""
    old = before.get_vocab()
    new = {i: text for text, i in after.get_vocab().items() if text not in old}
    added = {i: str(token) for i, token in after.added_tokens_decoder.items()}
    texts = {i: added.get(i, text) for i, text in sorted(new.items())}
    encoded = Encoder(before).encode_many(list(texts.values()), split=True)
    return {i: ids for i, ids in zip(texts, encoded, strict=True) if ids}


def tokens_per_character(
    before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[float, float]:
    """Tokens for each character of the texts, with both tokenizers."""
    characters = max(1, sum(map(len, texts)))
    counts = [sum(map(len, Encoder(each).encode_many(texts, split=True))) for each in (before, after)]
    return counts[0] / characters, counts[1] / characters
