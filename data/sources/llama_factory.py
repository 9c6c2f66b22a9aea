"""An entry of LLaMA-Factory's dataset_info.json: `dataset_info.json:NAME`.

The entry says where the rows are, in which format, and what their columns and roles are called. Keys that it leaves out
have LLaMA-Factory's defaults. A relative `file_name` is beside the dataset_info.json.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Literal

from data.read.columns import first_user_text, read_flag, read_list, read_struct, read_value
from data.read.dialogues import read_prompt
from data.read.paths import DataFiles, RecordReader, TableConfig, data_files, is_hub_id, open_path
from data.read.records import Record
from data.read.table import Parsed, Table
from data.sources.files import parse
from rlhf.config import Config as Options
from rlhf.config import suggest, validate
from rlhf.errors import UserError
from rlhf.text.messages import read_json, short_json
from rlhf.types import Row

HUB_IDS = ()
OTHER_HUBS = ("ms_hub_url", "om_hub_url")
"""used by LLaMA-Factory only where they are asked for, if there is an hf_hub_url beside them"""
STANDARD = frozenset(
    {"instruction", "input", "context", "output", "history", "system", "conversations", "chosen", "rejected", "label"}
)
"""columns of the shapes of `files` that rows are brought into"""


class Config(Options):
    """No options: the entry has them."""


class Columns(Options):
    """The name of each column. A key that is left out means that the rows have no such column."""

    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None


class Tags(Options):
    """The keys of a message, and the names of the roles."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str | None = "observation"
    function_tag: str | None = "function_call"
    system_tag: str | None = "system"


class Entry(Options):
    """One dataset of a dataset_info.json."""

    hf_hub_url: str | None = None
    file_name: str | None = None
    revision: str | None = None
    """of hf_hub_url"""
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    ranking: bool = False
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    columns: Columns = Columns(prompt="instruction", query="input", response="output", messages="conversations")
    tags: Tags = Tags()


class EntryConfig(TableConfig):
    """Which part of the dataset, and how it is read: the rows change with the entry."""

    entry: Entry


def build(config: Config, path: str) -> Table:
    entry, file = read_entry(path)
    reader, split = _open(entry, path, file)
    part = EntryConfig(split=split, subset=entry.subset, data_dir=entry.folder, entry=entry)
    return Table(reader, part, partial(_read_alpaca if entry.formatting == "alpaca" else _read_dialogue, entry))


def read_entry(path: str) -> tuple[Entry, Path]:
    """The entry that `FILE:NAME` names, and the file. Raises: UserError for a mistake in either, with the key."""
    before, _, name = path.rpartition(":")
    named = before.endswith(".json")
    file = Path(before if named else path).expanduser()
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); expected a dataset_info.json of LLaMA-Factory"
        ) from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(value, dict) for value in entries.values()):
        raise UserError(f"{file}: expected an object with one object for each dataset, as LLaMA-Factory writes it")
    if not named or name not in entries:
        got = f"no dataset '{name}'{suggest(name, [*entries])}" if named else "got no name of a dataset"
        raise UserError(f"{file}: {got}; have {', '.join(entries) or 'none'}; write {file}:NAME")
    return _check(entries[name], f"{file}: {name}"), file


def _check(values: Record, location: str) -> Entry:
    """The entry. Raises: UserError for a mistake, with the key."""
    if "hf_hub_url" in values:
        values = {key: value for key, value in values.items() if key not in OTHER_HUBS}
    if values.get("formatting") == "openai" and "tags" not in values:
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        values["tags"] = tags | {"observation_tag": "tool"}
    entry = validate(Entry, values, location)
    if not (entry.hf_hub_url or entry.file_name):
        raise UserError(f"{location}: names no data; expected file_name or hf_hub_url")
    alpaca = entry.formatting == "alpaca"
    needed = ["prompt"] if alpaca else ["messages"]
    if entry.ranking and not (alpaca and entry.columns.response):
        needed += ["chosen", "rejected"]
    for name in needed:
        if getattr(entry.columns, name) is None:
            raise UserError(f"{location}: columns has no '{name}', which rows in the format {entry.formatting} need")
    return entry


def _open(entry: Entry, path: str, file: Path) -> tuple[RecordReader, str | None]:
    """The reader of the entry's records, and the split to read."""
    if entry.hf_hub_url:
        if not is_hub_id(entry.hf_hub_url):
            raise UserError(f"{path}: hf_hub_url '{entry.hf_hub_url}': expected OWNER/NAME on the hub")
        return open_path(f"{entry.hf_hub_url}@{entry.revision}" if entry.revision else entry.hf_hub_url), entry.split
    split = None if entry.split == "train" else entry.split  # files are the split train
    name = os.path.normpath(entry.file_name or "")
    if os.path.isabs(name) or name.split(os.sep)[0] == "..":  # a stranger's entry must not lead to a private file
        raise UserError(f"{path}: file_name '{entry.file_name}': expected a file beside dataset_info.json or below")
    files = data_files(str(file.parent / name))
    inside = (
        file.parent.resolve(),
        file.resolve().parent,
    )  # the second: in the hub's cache, each file is a link to a blob
    for each in files:
        if not any(each.resolve().is_relative_to(folder) for folder in inside):
            raise UserError(
                f"{path}: file_name '{entry.file_name}': {each} leads out of the folder; copy the file there"
            )
    return DataFiles(path, tuple(files)), split


def _read_alpaca(entry: Entry, record: Record, location: str) -> Parsed:
    columns = entry.columns
    standard = _standard(
        entry, record, location, instruction="prompt", input="query", history="history", system="system"
    )
    if entry.ranking and columns.chosen:
        standard |= _standard(entry, record, location, chosen="chosen", rejected="rejected")
        return parse(standard, location, "instruction-chosen-rejected")
    if columns.response is None:
        prompt = read_prompt(standard, "instruction", location)
        extra = {name: value for name, value in standard.items() if name not in STANDARD}
        return Row(prompt, None, None, first_user_text(prompt), extra)
    standard |= _standard(entry, record, location, output="response")
    if entry.ranking and not isinstance(standard["output"], list):
        expected = "expected a list of responses, the best first: the entry has ranking and no column 'chosen'"
        raise UserError(f"{location}: {columns.response}: got {short_json(standard['output'])}, {expected}")
    return _labelled(entry, "instruction-output", standard, record, location)


def _read_dialogue(entry: Entry, record: Record, location: str) -> Parsed:
    columns = entry.columns
    standard = _standard(entry, record, location, system="system")
    column = str(columns.messages)
    messages = read_list(record, column, location)
    standard["conversations"] = [
        _message(entry.tags, message, f"{location}: {column}[{i}]") for i, message in enumerate(messages)
    ]
    if not entry.ranking:
        return _labelled(entry, "conversations", standard, record, location)
    for side in ("chosen", "rejected"):
        name = str(getattr(columns, side))
        response = read_struct(record, name, location)
        standard[side] = _message(entry.tags, response, f"{location}: {name}")
    return parse(standard, location, "conversations-chosen-rejected")


def _labelled(entry: Entry, shape: str, standard: Record, record: Record, location: str) -> Parsed:
    """The row, with the label of `kto_tag` if the record has one that is not null."""
    if entry.columns.kto_tag is None:
        return parse(standard, location, shape)
    read_value(record, entry.columns.kto_tag, location)
    label = read_flag(record, entry.columns.kto_tag, location)
    if label is None:
        return parse(standard, location, shape)
    return parse(standard | {"label": label}, location, f"{shape}-label")


def _standard(entry: Entry, record: Record, location: str, **names: str) -> Record:
    """The columns of a record under the names of `files`, and those without a meaning in the entry."""
    columns = {key: column for key, column in entry.columns if column is not None}
    is_default = "columns" not in entry.model_fields_set
    if is_default and "input" not in record:
        columns.pop("query", None)
    extra = {name: value for name, value in record.items() if name not in STANDARD and name not in columns.values()}
    standard = {name: read_value(record, columns[key], location) for name, key in names.items() if key in columns}
    if "tools" in columns:
        tools = read_json(read_value(record, columns["tools"], location) or [], f"{location}: {columns['tools']}")
        standard["tools"] = [*map(_tool, tools)] if isinstance(tools, list) else tools
    return extra | standard


def _tool(tool: object) -> object:
    """A description {name, description, parameters} as templates read it."""
    return {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool


def _message(tags: Tags, message: object, location: str) -> Record:
    """A message in the format that the tags describe, as {role, content} with its other keys."""
    if not isinstance(message, dict) or tags.role_tag not in message or tags.content_tag not in message:
        expected = f"a message {{{tags.role_tag}, {tags.content_tag}}}"
        raise UserError(f"{location}: got {short_json(message)}, expected {expected}")
    roles = {
        tags.system_tag: "system",
        tags.user_tag: "user",
        tags.assistant_tag: "assistant",
        tags.observation_tag: "tool",
        tags.function_tag: "function_call",
    }
    role = message[tags.role_tag]
    if not isinstance(role, str) or role not in roles:
        expected = " or ".join(repr(name) for name in roles if name)
        raise UserError(f"{location}: got the role {short_json(role)}, expected {expected}")
    other_keys = {key: value for key, value in message.items() if key not in (tags.role_tag, tags.content_tag)}
    return other_keys | {"role": roles[role], "content": message[tags.content_tag]}
