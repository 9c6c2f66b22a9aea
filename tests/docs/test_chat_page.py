"""docs/chat.md: its commands are accepted, and transformers serves what a stage has saved."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.chat.options import ChatOptions
from rlhf.chat.responses import Generation, Sampling
from rlhf.config import option_names
from rlhf.types import Message
from tests.support import chat_runs

PAGE = (Path(__file__).parents[2] / "docs/chat.md").read_text(encoding="utf-8")


def answer(url: str, model: str, prompt: str, folder: Path) -> str:
    """One greedy answer: by ask.py of the page if the client is installed, else by the same request."""
    if importlib.util.find_spec("openai") is not None:
        code = re.search(r"```python\n(# ask\.py.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]  # there is one
        for printed, here in {
            "http://127.0.0.1:8000": url, "Why is the sky blue?": prompt, "seed=1": "temperature=0",
        }.items():  # fmt: skip
            assert printed in code
            code = code.replace(printed, here)
        (folder / "ask.py").write_text(code)
        return subprocess.check_output([sys.executable, "ask.py"], cwd=folder, text=True).removesuffix("\n")
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@contextlib.contextmanager
def running(command: str, folder: Path) -> Iterator[str]:
    """The server of a command line, offline, on a free port. Yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    words = [program, *shlex.split(command, comments=True)[1:], "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(words, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        for _ in range(1200):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            assert server.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.long
def test_transformers_serves_a_saved_policy(tmp_path: Path) -> None:
    """The greedy answers of the page's command are those of `rlhf chat`, which has a sampler of its own."""
    pytest.importorskip("uvicorn", reason="transformers[serving] is not installed")
    [command] = re.findall(r"^transformers serve .*$", PAGE, re.MULTILINE)
    models = chat_runs.loaded(chat_runs.write(tmp_path / "runs/mine"), "ppo")
    texts = {}
    for prompt in (f"w{first} w{second}" for first in range(4, 40) for second in (7, 9)):
        asked = (Message("user", prompt),)
        response = Generation(models, "ppo", asked, Sampling(0.0, 64, (0,))).finish()
        texts |= {prompt: response.text} if response.ended else {}  # before the context is full
    prompt = max(texts, key=lambda each: len(texts[each]))
    assert len(texts[prompt].split()) > 3
    with running(command, tmp_path) as url:
        assert answer(url, "runs/mine/step3_ppo/actor", prompt, tmp_path) == texts[prompt]


def test_the_page_names_existing_options() -> None:
    known = {*option_names(ChatOptions)}
    foreign = {"model", "data-path", "reward-only-data-path", "output-dir", "prompts"}  # of rlhf reward and rlhf pairs
    served = {"host", "api-key", "share-trunk", "merge"}  # of other programs, of training and of rlhf export
    assert set(re.findall(r"--([a-z][a-z-]*)", PAGE)) <= known | foreign | served
