"""A server with the API of OpenAI, whose model is a function, and which fails when a test wants it to."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], str]
"""status, headers and body"""


@dataclass
class Judge:
    """A model, and the bodies and keys of the requests to it. `faults`: replies before those of the model."""

    model: Callable[[str], str]
    faults: list[Callable[[], Reply]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    @property
    def questions(self) -> list[str]:
        """Those of the run, not that of the check before it."""
        texts = [body["messages"][0]["content"] for body in self.bodies]
        return [text for text in texts if "one word: ready" not in text]

    def reply(self, body: dict[str, Any], key: str | None) -> Reply:
        self.bodies.append(body)
        self.keys.append(key)
        with contextlib.suppress(IndexError):
            return self.faults.pop(0)()
        question = body["messages"][0]["content"]
        return 200, {}, json.dumps(content(self.model(question), len(question.split())))


def content(text: str | None, tokens: int = 3, finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    return {"choices": [choice], "usage": {"prompt_tokens": tokens, "completion_tokens": 2, "total_tokens": tokens + 2}}


@contextlib.contextmanager
def serving(model: Callable[[str], str], *faults: Callable[[], Reply]) -> Iterator[Judge]:
    judge = Judge(model, list(faults))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.close_connection = True
            with contextlib.suppress(ConnectionError):  # of the model, or of a client that has not waited
                status, headers, text = judge.reply(body, self.headers.get("Authorization"))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()


def words(question: str) -> str:
    """A model that counts the letters of the question."""
    return f"Reasons.\nScore: {1 + len(question) % 91 / 10:.1f}"


@cache
def always() -> str:
    """The address of a server that runs until the process ends."""
    context = serving(words)
    _OPEN.append(context)
    return context.__enter__().url


_OPEN: list[Any] = []
"""contexts that are never left"""
