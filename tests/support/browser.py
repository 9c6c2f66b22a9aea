"""A headless Chromium, driven over its DevTools protocol through a pipe: JSON messages that end with a zero byte.

The pipe needs neither a driver program nor a library: descriptor 3 of the browser reads commands, 4 writes answers.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
WITH_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""a program that starts another one with two of its descriptors as numbers 3 and 4"""


class Page:
    """One tab. `events` are the messages that the browser has sent on its own."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._buffer = commands, answers, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            assert chunk, "the browser has ended, or does not answer"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        """Load a page, and wait for the end of its loading."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, kind: str = "", **features: str) -> None:
        """Emulate a medium (`print`) and features such as prefers_color_scheme="dark"."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=named)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """Errors of the console, uncaught exceptions, and violations of the page's policy."""
        texts = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                texts.append(str(params["exceptionDetails"].get("text")))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                texts.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                texts.append(str(params["args"]))
        return texts

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        asked_for = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked_for]


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A page of a fresh browser, which ends with the block. profile: an empty directory"""
    assert CHROMIUM is not None
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # as root Chromium refuses its sandbox; the pages are the test's own
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    browser = [CHROMIUM, *FLAGS, *sandbox, f"--user-data-dir={profile}"]
    command = [sys.executable, "-c", WITH_PIPES, str(read_commands), str(write_answers), *browser]
    process = subprocess.Popen(
        command, pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
