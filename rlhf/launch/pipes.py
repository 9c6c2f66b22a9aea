"""JSON objects, one a line, over pipes that must never make us wait. Torch-free."""

import collections
import json
import os
import threading
from typing import Any

MOST_LINES = 2000
"""lines that wait to be written; more text than that is left out, events are not"""


class Reader:
    """The lines of a pipe as far as they have come."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def lines(self) -> list[str]:
        """Whole lines since the last call; at the end of the pipe, what is left. Waits for nothing."""
        while not self.ended:
            try:
                got = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            self.ended = not got
            self._rest += got
        *whole, self._rest = self._rest.split(b"\n")
        if self.ended and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode("utf-8", "replace") for line in whole]


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """The JSON objects among the lines; what else a shell has said is left out."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


class Writer:
    """Writes objects from a thread of its own, so that a reader who stands still holds up nobody else."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: collections.deque[bytes] = collections.deque()
        self._news = threading.Condition()
        self._busy = False
        threading.Thread(target=self._work, daemon=True).start()

    def write(self, value: dict[str, Any], text: bool = False) -> None:
        """`text` may be left out when too much waits."""
        with self._news:
            if not (text and len(self._waiting) > MOST_LINES):
                self._waiting.append(json.dumps(value).encode() + b"\n")
                self._news.notify_all()

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, at most so long."""
        with self._news:
            self._news.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                self._news.wait_for(lambda: bool(self._waiting))
                line, self._busy = self._waiting.popleft(), True
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # the other side is gone; what follows is for nobody
                return
