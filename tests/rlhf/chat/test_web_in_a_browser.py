"""`rlhf chat --web` in headless Chromium: a person types, reads the stream and votes; the rows are in the file."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.prepare.mixture import open_origin
from rlhf.types import Row
from tests.support.browser import CHROMIUM, Page, open_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)"),
]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def page(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1100)
        browser.open(served[0])
        wait_for(browser, "document.querySelector('#message textarea:enabled') !== null")
        yield browser


def wait_for(page: Page, condition: str) -> None:
    end = time.monotonic() + WAIT_S
    while not page.value(condition):
        assert time.monotonic() < end, (condition, page.value("document.body.innerText"))
        time.sleep(0.05)


def value_of(page: Page, name: str) -> str:
    return str(page.value(f"document.querySelector('#{name} textarea, #{name} input').value"))


def send(page: Page, text: str) -> bool:
    """Type a message as a person does, and wait for both answers. True: they can be voted on."""
    page.value("document.querySelector('#message textarea').focus()")
    page.call("Input.insertText", text=text)
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    status = "document.querySelector('#status textarea, #status input').value"
    wait_for(page, f"{status}.startsWith('which answer') || {status}.startsWith('no vote: ')")
    return value_of(page, "status").startswith("which answer")


def click(page: Page, name: str, status: str) -> str:
    """Click a button, and return the status when it begins with the text."""
    page.value(f"document.querySelector('#{name}').click()")
    quoted = json.dumps(status)
    wait_for(page, f"document.querySelector('#status textarea, #status input').value.startsWith({quoted})")
    return value_of(page, "status")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def votable(page: Page, questions: list[str], vote: str) -> str:
    """Ask until a vote is accepted, and return the status after it."""
    for question in questions * 3:
        if send(page, question):
            assert not {"sft", "ppo"} & {*value_of(page, "status").split()}  # blind
            return click(page, f"vote-{vote}", "vote written")
        click(page, "new", "new dialogue")
    raise AssertionError("no vote was accepted")


def test_a_person_types_reads_votes_and_finds_the_row(page: Page, served: Any) -> None:
    url, file, questions = served
    status = votable(page, questions, "b")
    [row] = rows(file)
    assert row["preference"] == "b"
    for i, response in enumerate((row["response_a"], row["response_b"])):  # each side keeps its own answer
        assert page.value(f"document.querySelector('#chat-{i}').innerText").strip().endswith(response)
    assert {row["policy_a"], row["policy_b"]} == {"sft", "ppo"}
    assert f"left: {row['policy_a']}, score {row['score_a']:.3g}, " in status
    [read] = open_origin(str(file)).rows("reward")
    assert isinstance(read, Row) and (read.response, read.rejected) == (row["response_b"], row["response_a"])
    assert all(address.startswith((url, "data:", "blob:")) for address in page.requests()), page.requests()


def test_on_a_phone_the_message_box_is_on_the_screen_and_votes_come_with_answers(page: Page, served: Any) -> None:
    shown = "document.querySelector('#vote-a')?.checkVisibility() ?? false"
    click(page, "new", "new dialogue")
    page.resize(390, 844)
    assert page.value("document.querySelector('#message').getBoundingClientRect().bottom") <= 844
    assert page.value("document.documentElement.scrollWidth") == 390
    assert page.value("document.querySelector('h1').checkVisibility()") and not page.value(shown)
    for question in served[2] * 3:
        if send(page, question):
            break
        assert not page.value(shown)
        click(page, "new", "new dialogue")
    wait_for(page, shown)
    click(page, "vote-tie", "vote written")
    wait_for(page, f"!({shown})")
