"""The page of `rlhf chat --web`, served."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.chain.chat import BY_NAME
from rlhf.chat.run_models import run_models
from rlhf.chat.session import open_session
from tests.support import chat_runs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, list[str]]]:
    """(URL of the page, file of votes, questions whose answers can be voted on)."""
    pytest.importorskip("gradio", reason="Gradio is not installed (extra chat)")
    from rlhf.chat.web import launch

    run = chat_runs.write(tmp_path_factory.mktemp("world") / "run")
    options = chat_runs.options_of(run, compare=("sft", "ppo"), web=True, port=0)
    session = open_session(options, run_models(str(run), BY_NAME))
    blocks, url = launch(session, options)
    try:
        yield url, run / "votes.jsonl", list(chat_runs.PROMPTS)
    finally:
        blocks.close()
