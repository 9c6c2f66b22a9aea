"""Requests to an OpenAI-compatible address, several at once, and their answers on the disk.

A request is asked once: its answer is a line of a file of this rank, and at the start all ranks read the files of all.
A file has digests of requests, and neither a header nor a key.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx2

from rlhf.config import Tree
from rlhf.config.secrets import MASK
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.rewards import CACHED, REQUESTS, TOKENS, answer_rows

WAIT_S = 1.0
"""seconds before the second try; each later wait is twice as long, up to 64 s, unless the server names another"""
LONGEST_S = 600.0
"""a server that asks for a longer wait than this has no more answers today"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, None if it was cut; and the tokens of request and answer as the server counts them."""

    text: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and how patiently."""

    base_url: str
    key: str | None = field(repr=False)
    concurrency: int
    retries: int
    timeout: float

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def plain(self, text: object) -> str:
        """The start of a text of the server in one line, without the key."""
        line = " ".join(str(text).split())
        return (line.replace(self.key, MASK) if self.key else line)[:200]


class Answers:
    """The answers of a server. counts: REQUESTS, TOKENS and CACHED grow; folder: of the files; None: only memory"""

    def __init__(self, server: Server, counts: Counter[str], folder: Path | None = None) -> None:
        self._server, self._counts, self._folder = server, counts, folder
        self._file = None if folder is None else _File(folder)
        rows = () if folder is None else answer_rows(folder)
        self._texts: dict[str, str | None] = {row["request"]: row["text"] for row in rows}

    def ask(self, bodies: Sequence[Tree]) -> list[str | None]:
        """The text of the answer to each request, None if it was cut. Raises: UserError if the server has none; the
        answers until then stay."""
        digests = [_digest(self._server.url, body) for body in bodies]
        new = {digest: body for digest, body in zip(digests, bodies, strict=True) if digest not in self._texts}
        self._counts[CACHED] += len(bodies) - len(new)
        if new:
            asyncio.run(self._ask_all(new))
        return [self._texts[digest] for digest in digests]

    async def _ask_all(self, bodies: Mapping[str, Tree]) -> None:
        server = self._server
        turns = asyncio.Semaphore(server.concurrency)

        async def ask(digest: str, body: Tree) -> None:
            async with turns:
                answer = await _answer(client, server, body)
            self._texts[digest] = answer.text
            self._counts.update({REQUESTS: 1, TOKENS: answer.tokens})
            if self._file is not None:
                self._file.append({"request": digest, "model": body["model"], **asdict(answer)})

        try:
            async with _client(server) as client, asyncio.TaskGroup() as group:
                for digest, body in bodies.items():
                    group.create_task(ask(digest, body))
        except* UserError as failures:
            cure = "" if self._folder is None else f"; the same command goes on with the answers in {self._folder}"
            raise UserError(f"{failures.exceptions[0]}{cure}") from None


def _client(server: Server) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {server.key}"} if server.key else {},
        timeout=server.timeout,
        verify=server.base_url.startswith("https:"),  # reading the certificates takes a third of a second
        limits=httpx2.Limits(max_connections=None),
    )


async def _answer(client: httpx2.AsyncClient, server: Server, body: Tree) -> Answer:
    """Raises: UserError for a request that the server refuses, or after the last retry."""
    wait, attempt, cause = WAIT_S, 0, ""
    for attempt in range(1, server.retries + 2):
        pause = wait
        try:
            response = await client.post(server.url, json=body)
            if response.is_success:
                return _read(response.json())
            cause, status = f"got HTTP {response.status_code} ({server.plain(response.text)})", response.status_code
            seconds = str(response.headers.get("retry-after"))
            pause = float(seconds) if seconds.isdecimal() else wait
        except httpx2.RequestError as error:
            cause, status = f"{type(error).__name__} {server.plain(error)}".strip(), 0
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            cause, status = f"got something else than an answer of this API ({server.plain(repr(error))})", 0
        if 0 < status < 500 and status not in (408, 429):
            raise UserError(f"{server.base_url}: {cause}, expected an answer; {_cure(status, body)}")
        if attempt > server.retries or pause > LONGEST_S:
            break
        await asyncio.sleep(pause)
        wait = min(2 * wait, 64 * WAIT_S)
    raise UserError(
        f"{server.base_url}: {cause}, expected an answer ({attempt} tries of {server.timeout:g} s); see whether the "
        "server runs there, lower concurrency, or raise timeout or retries"
    )


def _cure(status: int, body: Tree) -> str:
    key = "set the environment variable that key_env names, OPENAI_API_KEY by default, to a valid key"
    path = f"see that base_url ends as the server's does, mostly in /v1, and that it has a model '{body['model']}'"
    other = "see that the model and the options suit the server; temperature=null and max_tokens=null leave these out"
    return {401: key, 403: key, 404: path}.get(status, other)


def _read(reply: Tree) -> Answer:
    [choice, *_], usage = reply["choices"], reply.get("usage") or {}
    text = choice["message"].get("content") or ""
    tokens = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
    return Answer(None if choice.get("finish_reason") == "length" else str(text), int(tokens))


def _digest(url: str, body: Tree) -> str:
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


class _File:
    """The answers that this rank has got, a line each."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{collectives.rank()}.jsonl"
        if self._path.is_file():  # a kill may have cut its last line
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)

    def append(self, row: Tree) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror}); free space there, and the same command goes on"
            ) from None
