"""Any local file or hub dataset whose columns have one of the usual shapes.

`place` is a .json, .jsonl, .csv or .parquet file (.gz too), a directory of them, or a hub id. Text is a string, or a
list of messages {role, content}; columns beyond the shape go with the row, for reward functions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.reading import Phase, Record, checked, data_files, hub_records, is_hub_id, records, text
from rlhf.config import Config as BaseConfig
from rlhf.config import UserError
from rlhf.types import Message, Row

ROLES = ("system", "user", "assistant")


class Config(BaseConfig):
    """Only a hub dataset has splits and subsets; of local files all rows are taken."""

    split: str = "train"
    """split of the hub dataset"""
    subset: str | None = None
    """configuration of the hub dataset"""


@dataclass(frozen=True, slots=True)
class Files:
    config: Config
    hub_id: str
    files: tuple[Path, ...]

    def rows(self, phase: Phase) -> Iterator[Row]:
        """Every row, whatever the phase."""
        if self.hub_id:
            for where, record in hub_records(self.hub_id, self.config.split, name=self.config.subset):
                yield parse(record, where)
        for file in self.files:
            for where, record in records(file):
                yield parse(record, where)


def build(config: Config, place: str) -> Files:
    if is_hub_id(place):
        return Files(config, place, ())
    return Files(config, "", tuple(data_files(place)))


def parse(record: Record, where: str) -> Row:
    """The row of a record, by the first of SHAPES whose columns it has.

    Raises: UserError naming the columns found and the shapes known.
    """
    for columns, read in SHAPES:
        if all(column in record for column in columns):
            row = read(record, where)
            rest = {key: value for key, value in record.items() if key not in columns}
            return Row(row.prompt, row.response, row.rejected, row.group, rest)
    shapes = "; ".join(", ".join(columns) for columns, _ in SHAPES)
    raise UserError(f"{where}: got the columns {', '.join(record) or 'none'}; expected one of: {shapes}")


def _preference(record: Record, where: str) -> Row:
    before, response = _side(record, "chosen", where)
    other, rejected = _side(record, "rejected", where)
    if before != other:
        raise UserError(f"{where}: chosen and rejected differ before their last message; expected one prompt")
    prompt = before or _prompt(record, where)
    return Row(prompt, response, rejected, _group(prompt))


def _implicit_preference(record: Record, where: str) -> Row:
    if isinstance(record["chosen"], str):
        cure = "for dialogues written '\\n\\nHuman: ...' write hh_rlhf:PLACE"
        raise UserError(f"{where}: chosen and rejected are strings and there is no column 'prompt'; {cure}")
    if isinstance(record["chosen"], list) and len(record["chosen"]) < 2:
        raise UserError(f"{where}: chosen: got no prompt before the response, and there is no column 'prompt'")
    return _preference(record, where)


def _demonstration(column: str, record: Record, where: str) -> Row:
    _, response = _side(record, column, where)
    prompt = _prompt(record, where)
    return Row(prompt, response, group=_group(prompt))


def _conversation(record: Record, where: str) -> Row:
    messages = _messages(record["messages"], f"{where}: messages")
    if messages[-1].role != "assistant":
        return Row(messages, group=_group(messages))
    return Row(messages[:-1], messages[-1].content, group=_group(messages))


def _prompt_only(record: Record, where: str) -> Row:
    prompt = _prompt(record, where)
    return Row(prompt, group=_group(prompt))


SHAPES: tuple[tuple[tuple[str, ...], Callable[[Record, str], Row]], ...] = (
    (("prompt", "chosen", "rejected"), _preference),
    (("chosen", "rejected"), _implicit_preference),
    (("prompt", "completion"), partial(_demonstration, "completion")),
    (("prompt", "response"), partial(_demonstration, "response")),
    (("messages",), _conversation),
    (("prompt",), _prompt_only),
)


def _prompt(record: Record, where: str) -> tuple[Message, ...]:
    if isinstance(record["prompt"], list):
        return _messages(record["prompt"], f"{where}: prompt")
    return (Message("user", text(record, "prompt", where)),)


def _side(record: Record, column: str, where: str) -> tuple[tuple[Message, ...], str]:
    """(messages before the response, which many datasets repeat here; the response)."""
    if not isinstance(record[column], list):
        return (), text(record, column, where)
    *before, last = _messages(record[column], f"{where}: {column}")
    if last.role != "assistant":
        raise UserError(f"{where}: {column}: got a last message of role '{last.role}', expected 'assistant'")
    return tuple(before), last.content


def _messages(values: object, where: str) -> tuple[Message, ...]:
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: got {str(values)[:60]}, expected a list of messages {{role, content}}")
    return tuple(_message(value, f"{where}[{i}]") for i, value in enumerate(values))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise UserError(f"{where}: got {str(value)[:60]}, expected a message with a role ({', '.join(ROLES)})")
    return Message(value["role"], checked(value.get("content"), f"{where}.content"))


def _group(messages: Sequence[Message]) -> str:
    """A conversation and its continuations stay together: the first user's message decides."""
    return next((message.content for message in messages if message.role == "user"), "")
