"""Who may use the page of `rlhf chat --web`, what it shows of a text, and how it starts."""

import http.client
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlhf.chat.options import ChatOptions
from rlhf.chat.session import Session
from rlhf.types import Message

TEXTS = (
    "<img src=http://127.0.0.1:1/x> a<br>b <script>alert(1)</script>",
    "def f(x):\n    if x < 1 & 2:\n        return '$$x$$'\n\n  <b>",
    "  indented &lt; **bold** [a](http://b) <!-- c",
)


class Seen(HTMLParser):
    """The text that a browser shows of HTML, and the tags in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.feed(text)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\xa0", " ")

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.tags.add(tag)
        self.text += "\n" if tag == "br" else ""

    def handle_comment(self, data: str) -> None:
        self.tags.add("a comment")


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_text(text: str) -> None:
    """Gradio puts a message into the page as HTML."""
    gradio = pytest.importorskip("gradio", reason="Gradio is not installed (extra chat)")
    from rlhf.chat.web import shown

    messages = gradio.Chatbot(render_markdown=False).postprocess(shown((Message("user", text),), text)).root
    for message in messages:
        seen = Seen(message.content[0].text)
        assert seen.text == text and seen.tags <= {"br"}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Of two policies, without models: nobody asks."""
    models: Any = None
    options = ChatOptions(run=str(tmp_path), web=True, port=0, votes=str(tmp_path / "votes.jsonl"))
    return Session(models, ("sft", "ppo"), options)


def test_a_proxy_of_the_environment_is_not_asked_for_the_own_page(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="Gradio is not installed (extra chat)")
    from rlhf.chat.web import launch

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing is there
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("NO_PROXY", "")
    options = ChatOptions(run="x", web=True, port=0)
    blocks, url = launch(session, options)
    try:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
    finally:
        blocks.close()


def test_a_foreign_host_is_refused(served: Any) -> None:
    connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_a_foreign_page_is_refused(served: Any, origin: str) -> None:
    """By Gradio: a browser gives no answer to the page, and sends JSON only where it is allowed before."""
    for method, content_type, status in (("GET", "", 200), ("OPTIONS", "", 200), ("POST", "text/plain", 422)):
        connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
        headers = {"Origin": origin, "Content-Type": content_type, "Access-Control-Request-Method": "POST"}
        path = "/" if method == "GET" else "/gradio_api/queue/join"
        connection.request(method, path, b'{"data": [], "fn_index": 0, "session_hash": "a"}', headers)
        response = connection.getresponse()
        assert response.status == status, (method, response.status)
        assert response.getheader("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("origin", ["http://evil.example", None])
def test_nobody_can_upload(served: Any, origin: str | None) -> None:
    """A foreign page's request needs no permission of the server before it is sent. The page itself has no files."""
    origin = origin or served[0].rstrip("/")
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\na\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Origin": origin}
    connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
    connection.request("POST", "/gradio_api/upload", body, headers)
    assert connection.getresponse().status == 403


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Content-Length", str(20 * 2**20), 413),
        ("Content-Length", str(2**20 + 1), 413),
        ("Transfer-Encoding", "chunked", 413),
        ("Content-Length", "2", 422),  # is read, and has not what Gradio expects
    ],
)
def test_a_long_request_is_refused_before_it_is_read(served: Any, header: str, value: str, status: int) -> None:
    connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
    connection.putrequest("POST", "/gradio_api/queue/join")
    connection.putheader("Content-Type", "application/json")
    connection.putheader(header, value)
    connection.endheaders(b"{}" if value == "2" else None)
    assert connection.getresponse().status == status
