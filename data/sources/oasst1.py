"""OpenAssistant conversations (arXiv 2304.07327), trees of messages: OpenAssistant/oasst1 and oasst2.

Each prompter's message is a prompt, with all above it; the assistant's replies to it are ranked by people (rank 0 is
best): the best is the demonstration, every pair of ranks a preference, and a prompt without replies serves ppo alone.
Read are flat messages, put together by parent_id wherever they stand, and exported trees, one to a line with nested
replies. Messages deleted, failed in review, or in another language than `lang` are left out, and so is what
hangs on them. All messages are held in memory (oasst1: 88,838). Splits: train, validation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from data.read.columns import flag, number, one_of, opening, struct, structs, value
from data.read.places import TableConfig, open_place
from data.read.records import Phase, Record, Skipped, text
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

    where: str
    id: str
    parent: str | None
    message: Message
    rank: float | None
    fault: str
    """why it is left out, if it is"""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, partial(parse, lang=config.lang), in_trees)


def parse(record: Record, where: str, lang: str | None) -> list[Node]:
    """The messages of one record. Raises: UserError."""
    if "message_id" in record or "parent_id" in record:
        parent = None if value(record, "parent_id", where) is None else text(record, "parent_id", where)
        return [_node(record, where, parent, lang)]
    nodes: list[Node] = []
    waiting: list[tuple[str, Record, str | None]] = [(f"{where}: prompt", struct(record, "prompt", where), None)]
    while waiting:
        at, said, parent = waiting.pop()
        nodes.append(_node(said, at, parent, lang))
        replies = structs(said, "replies", at) if said.get("replies") is not None else []
        waiting += [(here, reply, nodes[-1].id) for here, reply in reversed(replies)]
    return nodes


def _node(record: Record, where: str, parent: str | None, lang: str | None) -> Node:
    message = Message(ROLES[one_of(record, "role", where, tuple(ROLES))], text(record, "text", where))
    rank = None if record.get("rank") is None else number(record, "rank", where)
    fault = ""
    if flag(record, "deleted", where):
        fault = "deleted message"
    elif flag(record, "review_result", where) is False:
        fault = "message failed review"
    elif lang and text(record, "lang", where) != lang:
        fault = f"message not in language {lang}"
    return Node(where, text(record, "message_id", where), parent, message, rank, fault)


def in_trees(items: Iterator[list[Node] | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """The rows of all trees, prompt by prompt in the order of reading."""
    nodes: dict[str, Node] = {}
    for item in items:
        if isinstance(item, Skipped):
            yield item
            continue
        for node in item:
            if node.fault:
                yield Skipped(node.fault)
            elif node.id in nodes:
                yield Skipped(f"{node.where}: message_id: got {node.id!r} a second time", bad=True)
            else:
                nodes[node.id] = node
    yield from _rows(nodes, phase)


def _rows(nodes: dict[str, Node], phase: Phase) -> Iterator[Row | Skipped]:
    replies: dict[str, list[Node]] = {}
    for node in nodes.values():
        above = nodes.get(node.parent or "")
        if node.message.role == "assistant":
            if above and above.message.role == "user":
                replies.setdefault(above.id, []).append(node)
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
            yield Row(path, group=opening(path), columns={"message_id": node.id})


def _path(node: Node, nodes: dict[str, Node]) -> tuple[Message, ...]:
    """The messages from the root to `node`; none if one is missing or they go in a circle."""
    path = [node]
    while (parent := path[-1].parent) is not None:
        if parent not in nodes or len(path) > len(nodes):
            return ()
        path.append(nodes[parent])
    return tuple(step.message for step in reversed(path))


def _ranked(
    prompt: tuple[Message, ...], replies: list[Node], phase: Phase, columns: dict[str, str]
) -> Iterator[Row | Skipped]:
    """Replies without a rank are left out, unless none has one."""
    ranked = [reply for reply in replies if reply.rank is not None]
    if ranked:
        yield from (Skipped("reply without a rank") for reply in replies if reply.rank is None)
    responses = tuple((reply.message.content, -(reply.rank or 0.0)) for reply in ranked or replies)
    yield from ranked_rows(Ranked(prompt, responses, opening(prompt), columns), phase, columns["message_id"])
