"""Untrusted model directories: what is refused before it is loaded, and which file causes a loading error."""

import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from rlhf.config import Tree
from rlhf.errors import UserError

LOAD_ERRORS = (
    OSError, ValueError, LookupError, ArithmeticError, ImportError, RuntimeError, AttributeError, TypeError, EOFError,
    AssertionError, SafetensorError, StrictDataclassError, pickle.UnpicklingError,
)  # fmt: skip
"""The exceptions of the libraries for files that are damaged, of a wrong kind, or malicious."""

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it with its base model first (peft: merge_and_unload, then save_pretrained)"

REPORT_NOTE = " For details look at the `CONVERSION` entries of the above report!"
"""The end of a message of transformers; the report that it mentions is not printed here."""

FLOATING = ("F", "BF", "float", "bfloat")
"""Prefixes of the names of floating-point types, in safetensors and in torch."""

CUSTOM_CODE = "it needs custom code of its own, which is never run here; expected a model of transformers itself"


def refuse_model(path: str) -> None:
    """Refuse whole weights beside an adapter, and an index that names files elsewhere. Hub ids are not checked.

    transformers would silently apply the adapter to the model, and follow an index out of the directory.
    Raises: UserError naming the file.
    """
    folder = Path(path)
    if (folder / ADAPTER).is_file() and not is_adapter(folder):
        raise UserError(f"model '{path}': got an adapter ({ADAPTER}), expected whole weights; {MERGE}")
    read_mappings(f"model '{path}'", folder, MODEL_FILES)
    for index in sorted(folder.glob("*.index.json")):
        shards = read_mappings(f"model '{path}'", folder, [index.name])[index.name].get("weight_map")
        for name in shards.values() if isinstance(shards, dict) else [shards]:
            if not isinstance(name, str) or Path(name).name != name or name == "..":
                raise UserError(f"model '{path}': {index.name} names {name!r}, expected a file in the same directory")


def is_adapter(folder: Path) -> bool:
    """Whether a local directory is an adapter of peft without other weights.

    This project saves the config and the tokenizer of the whole model beside it; peft alone does not (`with_file`).
    """
    names = {file.name for file in folder.glob("*.*")}
    weights = {name for name in names if name.endswith((".safetensors", ".bin"))}
    return ADAPTER in names and weights == {ADAPTER_WEIGHTS}


def with_file(path: str, *names: str) -> str:
    """`path`; of an adapter with none of the files `names`, the base model that its adapter_config.json names."""
    folder = Path(path)
    if not is_adapter(folder) or any((folder / name).is_file() for name in names):
        return path
    base = read_mappings(f"model '{path}'", folder, [ADAPTER])[ADAPTER].get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"model '{path}': {ADAPTER} names no base_model_name_or_path; expected the base model")
    return base


def refuse_adapter(path: str, model: PreTrainedModel) -> None:
    """Raises: UserError if transformers has loaded an adapter from `path`, for example from the hub."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model '{path}': got an adapter over its weights, expected whole weights; {MERGE}")


def refuse_whole_numbers(path: str, model: PreTrainedModel) -> None:
    """Refuse weights of a boolean or integer type, which transformers would convert to floating point.

    Raises: UserError naming the first such weight of `model`.
    """
    is_local = Path(path).is_dir()
    patterns = ("*.safetensors", "*.bin")
    folder = Path(path if is_local else snapshot_download(path, allow_patterns=list(patterns), local_files_only=True))
    weights = {name for name, _ in model.named_parameters()}
    for name, dtype, file in _stored_weights(folder):
        names = {name, name.partition(".")[2], f"{model.base_model_prefix}.{name}"}
        if not dtype.startswith(FLOATING) and (name.endswith(".weight") or weights & names):
            raise UserError(
                f"model '{path}': {file}: weight {name} holds numbers of type {dtype}, expected floating point; "
                "quantised weights cannot be trained: name the model that they were made from"
            )


def _stored_weights(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(name, type, file) of each weight in `folder`, of the files that transformers would load."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                yield name, tensors.get_slice(name).get_dtype(), file.name
    for file in [] if files else sorted(folder.glob("*.bin")):
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            yield name, str(tensor.dtype).removeprefix("torch."), file.name


def read_mappings(what: str, folder: Path, names: Sequence[str]) -> dict[str, Tree]:
    """The content of the JSON files `names` that exist in `folder`, by name.

    Raises: UserError naming the first file that is not a mapping.
    """
    mappings = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            mappings[name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(f"{what}: cannot be loaded: {name} is not a valid JSON file ({reason})") from None
        if not isinstance(mappings[name], dict):
            raise UserError(
                f"{what}: cannot be loaded: {name} holds a {type(mappings[name]).__name__}, expected a mapping"
            )
    return mappings


def reason(path: str, error: BaseException) -> str:
    """Why a model cannot be loaded, in one line; it names the faulty file if `path` is a directory."""
    if "trust_remote_code" in str(error):
        return _custom_code(path)
    if isinstance(error, pickle.UnpicklingError):
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        problem = f"asks for code ({code[1]})" if code else "does not hold plain tensors"
        return (
            f"{_first_unreadable(Path(path)) or 'a weight file'}: this pickle {problem}, and nothing of it was run; "
            "expected tensors alone, best in *.safetensors"
        )
    message = " ".join(str(error).split()).replace(REPORT_NOTE, "")[:200] or type(error).__name__
    config = isinstance(error, StrictDataclassError | AssertionError)  # torch asserts the sizes and ids of the config
    file = "config.json" if config else _first_unreadable(Path(path))
    if isinstance(error, KeyError) and not file:  # an activation, a kind of positions
        return f"config.json: transformers has no {message}"
    return f"{file}: {message}" if file and file not in message else message


def _custom_code(path: str) -> str:
    """Why a model with custom code is refused. Of ChatGLM, transformers has a later model."""
    config = read_mappings(path, Path(path), ["config.json"]).get("config.json", {})
    is_glm = config.get("model_type") == "chatglm" or "glm" in path.lower()
    return CUSTOM_CODE + (", such as glm-4-9b-chat-hf or glm-4-9b-0414 of the same family" if is_glm else "")


def tokenizer_reason(path: str, error: BaseException) -> str:
    """Why a tokenizer cannot be loaded, in one line."""
    if "trust_remote_code" in str(error):
        return _custom_code(path)
    return " ".join(str(error).split())[:300] or type(error).__name__


def _first_unreadable(folder: Path) -> str:
    """The name of the first weight file in `folder` that cannot be opened, or an empty string. Runs no code of it."""
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


class PlainErrors:
    """A context in which errors of the tokenizers library, plain Exceptions and Rust panics, become ValueErrors."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise ValueError(str(error)) from None
