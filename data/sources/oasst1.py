"""OpenAssistant conversations (arXiv 2304.07327), trees of messages: OpenAssistant/oasst1 and oasst2.

Each message of a prompter is a prompt, with all messages above it. People ranked the assistant's replies to it (rank 0
is best). The best is the demonstration, each pair of different rank a preference; a prompt without replies serves only
ppo. Two formats are read: flat messages, joined by parent_id, and exported trees with nested replies, one tree per
line. Messages that are deleted, failed in review, or in another language than `lang` are left out, with all replies
below them. All messages are in memory (oasst1: 88,838). Splits: train, validation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from data.read.columns import (
    first_user_text,
    read_choice,
    read_flag,
    read_number,
    read_struct,
    read_structs,
    read_value,
)
from data.read.paths import TableConfig, open_path
from data.read.records import Phase, Record, Skipped, read_text
from data.read.table import Ranked, Table, ranked_rows
from rlhf.types import Message, Row

HUB_IDS = ("OpenAssistant/oasst1", "OpenAssistant/oasst2")
ROLES = {"prompter": "user", "assistant": "assistant"}


class Config(TableConfig):
    """Which messages are taken."""

    lang: str | None = None
    """only messages of one language, such as en"""


@dataclass(frozen=True, slots=True)
class Node:
    """A message of a tree. `parent` is None at the root."""

    location: str
    id: str
    parent: str | None
    message: Message
    rank: float | None
    exclusion: str
    """why the message is left out; empty if it is used"""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, partial(parse, lang=config.lang), tree_rows)


def parse(record: Record, location: str, lang: str | None) -> list[Node]:
    """The messages of one record. Raises: UserError."""
    if "message_id" in record or "parent_id" in record:
        parent = None if read_value(record, "parent_id", location) is None else read_text(record, "parent_id", location)
        return [_node(record, location, parent, lang)]
    nodes: list[Node] = []
    waiting: list[tuple[str, Record, str | None]] = [
        (f"{location}: prompt", read_struct(record, "prompt", location), None)
    ]
    while waiting:
        item_location, message, parent = waiting.pop()
        nodes.append(_node(message, item_location, parent, lang))
        replies = read_structs(message, "replies", item_location) if message.get("replies") is not None else []
        waiting += [(reply_location, reply, nodes[-1].id) for reply_location, reply in reversed(replies)]
    return nodes


def _node(record: Record, location: str, parent: str | None, lang: str | None) -> Node:
    message = Message(ROLES[read_choice(record, "role", location, tuple(ROLES))], read_text(record, "text", location))
    rank = None if record.get("rank") is None else read_number(record, "rank", location)
    exclusion = ""
    if read_flag(record, "deleted", location):
        exclusion = "deleted message"
    elif read_flag(record, "review_result", location) is False:
        exclusion = "message failed review"
    elif lang and read_text(record, "lang", location) != lang:
        exclusion = f"message not in language {lang}"
    return Node(location, read_text(record, "message_id", location), parent, message, rank, exclusion)


def tree_rows(items: Iterator[list[Node] | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """The rows of all trees, prompt by prompt in the order of reading."""
    nodes: dict[str, Node] = {}
    for item in items:
        if isinstance(item, Skipped):
            yield item
            continue
        for node in item:
            if node.exclusion:
                yield Skipped(node.exclusion)
            elif node.id in nodes:
                yield Skipped(f"{node.location}: message_id: got {node.id!r} again, expected each id once", bad=True)
            else:
                nodes[node.id] = node
    yield from _rows(nodes, phase)


def _rows(nodes: dict[str, Node], phase: Phase) -> Iterator[Row | Skipped]:
    replies: dict[str, list[Node]] = {}
    for node in nodes.values():
        parent = nodes.get(node.parent or "")
        if node.message.role == "assistant":
            if parent and parent.message.role == "user":
                replies.setdefault(parent.id, []).append(node)
            else:
                yield Skipped("reply to no prompt")
    for node in nodes.values():
        if node.message.role != "user":
            continue
        path = _path(node, nodes)
        if not path:
            yield Skipped("no first message above it")
        elif node.id in replies:
            yield from _ranked(path, replies[node.id], phase, {"message_id": node.id})
        else:
            yield Row(path, group=first_user_text(path), columns={"message_id": node.id})


def _path(node: Node, nodes: dict[str, Node]) -> tuple[Message, ...]:
    """The messages from the root to `node`; none if one is missing or they form a cycle."""
    path = [node]
    while (parent := path[-1].parent) is not None:
        if parent not in nodes or len(path) > len(nodes):
            return ()
        path.append(nodes[parent])
    return tuple(ancestor.message for ancestor in reversed(path))


def _ranked(
    prompt: tuple[Message, ...], replies: list[Node], phase: Phase, columns: dict[str, str]
) -> Iterator[Row | Skipped]:
    """The rows of one prompt. Replies without a rank are left out, unless no reply has a rank."""
    ranked = [reply for reply in replies if reply.rank is not None]
    if ranked:
        yield from (Skipped("reply without a rank") for reply in replies if reply.rank is None)
    responses = tuple((reply.message.content, -(reply.rank or 0.0)) for reply in ranked or replies)
    yield from ranked_rows(Ranked(prompt, responses, first_user_text(prompt), columns), phase, columns["message_id"])
