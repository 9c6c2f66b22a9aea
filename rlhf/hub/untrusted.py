"""Model directories that a stranger may have made: what is refused unread, and which file is to blame for the rest."""

import contextlib
import functools
import json
import pickle
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from rlhf.errors import UserError
from rlhf.hub import limits

LOAD_ERRORS = (
    OSError, ValueError, LookupError, ArithmeticError, ImportError, RuntimeError, AttributeError, TypeError, EOFError,
    AssertionError, SafetensorError, StrictDataclassError, pickle.UnpicklingError,
)  # fmt: skip
"""What the libraries raise for files that are damaged, of another kind, or made to do harm."""

TOKENIZER = "tokenizer.json"
TOKENIZER_SECONDS, TOKENIZER_BYTES = 20.0, 4 << 30
"""for reading a tokenizer.json and encoding TRIED: one of 30 MB takes 2 s and 0.5 GB"""
MOST_IDS = 1 << 24
"""the library fills the gaps between ids one by one; the largest vocabularies have 2^18"""
TRIED = " ".join(char * 50 for char in string.printable[:94])
"""a text on which regular expressions and replacements that explode do so"""

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
ADAPTER = "adapter_config.json"
MERGE = "merge it with its base model first (peft: merge_and_unload, then save_pretrained)"

REPORT = " For details look at the `CONVERSION` entries of the above report!"
"""The end of a message of transformers, whose report is not shown."""

FLOATING = ("F", "BF", "float", "bfloat")
"""What names of types begin with, in safetensors and in torch."""

OWN_CODE = "it needs custom code of its own, which is never run here; expected what transformers has itself"


def refuse_model(place: str) -> None:
    """Refuse a model directory that is not whole in itself; other places are let pass.

    transformers would lay an adapter over the model without a word, and follow an index out of the directory.
    Raises: UserError naming the file.
    """
    folder = Path(place)
    if (folder / ADAPTER).is_file():
        raise UserError(f"model '{place}': got an adapter ({ADAPTER}), expected whole weights; {MERGE}")
    read_mappings(f"model '{place}'", folder, MODEL_FILES)
    for index in sorted(folder.glob("*.index.json")):
        shards = read_mappings(f"model '{place}'", folder, [index.name])[index.name].get("weight_map")
        for name in shards.values() if isinstance(shards, dict) else [shards]:
            if not isinstance(name, str) or Path(name).name != name or name == "..":
                raise UserError(f"model '{place}': {index.name} names {name!r}, expected a file beside it")


def refuse_adapter(place: str, model: Any) -> None:
    """Raises: UserError if transformers has found an adapter at `place`, on the hub say, and laid it over the model."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model '{place}': got an adapter over its weights, expected whole weights; {MERGE}")


def refuse_whole_numbers(place: str, model: Any) -> None:
    """transformers reads bool and whole numbers as if they were weights in floating point.

    Raises: UserError naming the first weight of `model` that is stored so.
    """
    there = Path(place).is_dir()
    patterns = ("*.safetensors", "*.bin")
    folder = Path(place if there else snapshot_download(place, allow_patterns=list(patterns), local_files_only=True))
    weights = {name for name, _ in model.named_parameters()}
    for name, dtype, file in _stored(folder):
        within = {name, name.partition(".")[2], f"{model.base_model_prefix}.{name}"}
        if not dtype.startswith(FLOATING) and (name.endswith(".weight") or weights & within):
            raise UserError(
                f"model '{place}': {file}: weight {name} holds numbers of type {dtype}, expected floating point; "
                "quantised weights cannot be trained: name the model that they were made from"
            )


def _stored(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Name, type and file of each weight stored in `folder`, as far as a model is read from there."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                yield name, tensors.get_slice(name).get_dtype(), file.name
    for file in [] if files else sorted(folder.glob("*.bin")):
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            yield name, str(tensor.dtype).removeprefix("torch."), file.name


def read_mappings(what: str, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Those of the JSON files `names` that are in `folder`.

    Raises: UserError naming the first that holds no mapping.
    """
    found = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(f"{what}: cannot be loaded: {name} is not a valid JSON file ({reason})") from None
        if not isinstance(found[name], dict):
            raise UserError(
                f"{what}: cannot be loaded: {name} holds a {type(found[name]).__name__}, expected a mapping"
            )
    return found


def reason(place: str, error: BaseException) -> str:
    """Why a model cannot be loaded, on one line that names the file if it lies in the directory `place`."""
    if "trust_remote_code" in str(error):
        return OWN_CODE
    if isinstance(error, pickle.UnpicklingError):
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        wants = f"asks for code ({code[1]})" if code else "is not a plain one"
        return (
            f"{_first_broken(Path(place)) or 'a weight file'}: this pickle {wants}, and nothing of it was run; "
            "expected tensors alone, best in *.safetensors"
        )
    said = " ".join(str(error).split()).replace(REPORT, "")[:200] or type(error).__name__
    config = isinstance(error, StrictDataclassError | AssertionError)  # torch asserts sizes and ids that it says
    file = "config.json" if config else _first_broken(Path(place))
    return f"{file}: {said}" if file and file not in said else said


def tokenizer_reason(place: str, error: BaseException) -> str:
    """The same of a tokenizer."""
    if "trust_remote_code" in str(error):
        return OWN_CODE
    said = " ".join(str(error).split())[:300] or type(error).__name__
    file = Path(place) / TOKENIZER
    try:
        with PlainErrors():
            if file.is_file():
                Tokenizer.from_file(str(file))
    except LOAD_ERRORS:
        return f"{file.name}: {said}"
    return said


def _first_broken(folder: Path) -> str:
    """The name of the first weight file there that cannot be opened, if any. Runs nothing that a file asks for."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except LOAD_ERRORS:
            return file.name
    for file in sorted(folder.glob("*.bin")):
        try:
            dict(torch.load(file, map_location="meta", weights_only=True))
        except LOAD_ERRORS:
            return file.name
    return ""


def refuse_tokenizer(place: str) -> None:
    """Try a fast tokenizer, of a directory or the hub, in a process with limits.

    Raises: UserError if tokenizer.json takes too much time or memory, has ids too large, or fails on TRIED.
    """
    file = Path(place) / TOKENIZER
    try:
        file = file if Path(place).is_dir() else Path(hf_hub_download(place, TOKENIZER))
        status = file.stat()
    except LOAD_ERRORS:  # there need be none; whether a hub has nothing at all is told when all is loaded
        return
    _refuse_tokenizer_file(file, f"{place}: {TOKENIZER}", status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _refuse_tokenizer_file(file: Path, what: str, size: int, changed: int) -> None:
    """Once a process for each file."""
    limits.run_limited(functools.partial(_try_tokenizer, file, what), what, TOKENIZER_SECONDS, TOKENIZER_BYTES)


def _try_tokenizer(file: Path, what: str) -> None:
    try:
        with PlainErrors():
            tokenizer = Tokenizer.from_file(str(file))
    except ValueError:
        return  # which is told when all is loaded
    text, last = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1], default=("", 0))
    if last >= MOST_IDS:
        raise UserError(f"{what}: got id {last} for {text[:40]!r}, expected ids below {MOST_IDS}")
    with fails_as_user_error(what):
        tokenizer.decode(tokenizer.encode(TRIED).ids)


@contextlib.contextmanager
def fails_as_user_error(what: str) -> Iterator[None]:
    """Raises: UserError naming `what`, a tokenizer, for what its library raises over a text."""
    try:
        with PlainErrors():
            yield
    except UserError:
        raise
    except ValueError as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{what}: fails on a text ({said}); is its pre_tokenizer or normalizer at fault?") from None


class PlainErrors:
    """Inside, what the tokenizers library raises, Exception itself or a panic of Rust, becomes a ValueError."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise ValueError(str(error)) from None
