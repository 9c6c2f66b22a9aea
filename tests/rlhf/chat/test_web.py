"""Who may use the page of `rlhf chat --web`."""

import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest


def test_a_foreign_host_is_refused(served: Any) -> None:
    connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400


@pytest.mark.parametrize(("origin", "status"), [("http://evil.example", 403), ("null", 403), (None, 200)])
def test_a_foreign_page_cannot_upload(served: Any, origin: str | None, status: int) -> None:
    """Such a request needs no permission of the server before it is sent; the page's own has an Origin, too."""
    origin = origin or served[0].rstrip("/")
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\na\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Origin": origin}
    connection = http.client.HTTPConnection(urlsplit(served[0]).netloc, timeout=20)
    connection.request("POST", "/gradio_api/upload", body, headers)
    assert connection.getresponse().status == status
