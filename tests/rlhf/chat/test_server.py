"""`rlhf serve` over HTTP: OpenAI's own client, and requests that are refused."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlhf.chat import server as chat_server
from rlhf.chat.options import ServeOptions, api_key
from rlhf.chat.responses import Generation, Models, Sampling
from rlhf.chat.server import MAX_BODY, Server
from rlhf.errors import UserError
from rlhf.types import Message
from tests.support import chat_runs

openai = pytest.importorskip("openai", reason="the client is not installed (extra dev)")
MESSAGES: Any = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": "w4 w7"}]
DIALOGUE = (Message("system", "w5 w6"), Message("user", "w4 w7"))
KEY = "a key"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return chat_runs.loaded(chat_runs.write(tmp_path_factory.mktemp("world") / "run"), "sft", "ppo")


@contextlib.contextmanager
def serving(models: Models, key: str | None = None, **options: Any) -> Iterator[Server]:
    settings = ServeOptions.model_validate({"run": "r", "port": 0, "response_length": 24, **options})
    with Server(models, settings, key) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    with serving(models) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as connection:
        yield connection


def expected(models: Models, seed: int, temperature: float = 1.0, length: int = 24) -> Any:
    return Generation(models, "ppo", DIALOGUE, Sampling(temperature, length, (seed,))).finish()


# --- the official client


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["sft", "ppo"]
    assert client.models.retrieve("sft").id == "sft"
    with pytest.raises(openai.NotFoundError, match="expected one of sft, ppo"):
        client.models.retrieve("gpt-4o")


@pytest.mark.parametrize(("seed", "temperature", "length"), [(1, 1.0, 24), (2, 0.5, 24), (3, 0.0, 24), (1, 1.0, 2)])
def test_an_answer_whole_and_streamed(client: Any, models: Models, seed: int, temperature: float, length: int) -> None:
    response = expected(models, seed, temperature, length)
    options = {"model": "ppo", "messages": MESSAGES, "seed": seed, "temperature": temperature, "max_tokens": length}
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].message.content == response.text
    reason = "stop" if response.ended else "length"
    assert reply.choices[0].finish_reason == reason
    usage = (response.prompt_tokens, response.tokens, response.prompt_tokens + response.tokens)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == usage
    chunks = [*client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == response.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]][-1] == reason
    assert chunks[-1].usage.total_tokens == usage[2] and chunks[0].choices[0].delta.role == "assistant"


def test_stop_is_not_part_of_the_answer(client: Any, models: Models) -> None:
    seed = next(seed for seed in range(50) if len(expected(models, seed).text.split()) > 3)
    text = expected(models, seed).text
    stop = text.split()[2]
    reply = client.chat.completions.create(model="ppo", messages=MESSAGES, seed=seed, stop=[stop], temperature=1)
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_without_a_seed_two_answers_differ(client: Any) -> None:
    texts = {
        client.chat.completions.create(model="sft", messages=MESSAGES).choices[0].message.content for _ in range(8)
    }
    assert len(texts) > 1


def test_several_clients_at_once_get_their_own_answers(client: Any, models: Models) -> None:
    texts: dict[int, str] = {}

    def ask(seed: int) -> None:
        reply = client.chat.completions.create(model="ppo", messages=MESSAGES, seed=seed, temperature=1)
        texts[seed] = reply.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: expected(models, seed).text for seed in range(6)}


def test_a_client_that_leaves_frees_the_model(server: Server, client: Any, models: Models) -> None:
    stream = client.chat.completions.create(model="ppo", messages=MESSAGES, seed=1, stream=True)
    next(iter(stream))
    stream.close()
    reply = client.chat.completions.create(model="ppo", messages=MESSAGES, seed=1, temperature=1)
    assert reply.choices[0].message.content == expected(models, 1).text and not models.lock.locked()


# --- what is refused


def ask(
    server: Server, body: Any = None, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
) -> Any:
    """(status, the error object or the body) of a request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, {"Content-Type": "application/json", **names})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    assert reply.headers["Content-Type"] == "application/json" or not text
    value = json.loads(text)
    return reply.status, value.get("error", value)


GOOD = {"model": "ppo", "messages": MESSAGES, "max_tokens": 1}
LONG = [{"role": "user", "content": "w5 " * 70}]
REFUSED: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "body: not JSON"),
    "no UTF-8": (b'{"model": "\xff"}', 400, "body: not JSON"),
    "deep": (b"[" * 100_000, 400, "body: not JSON"),
    "a list": ([], 400, "body"),
    "no model": ({"messages": MESSAGES}, 400, "model"),
    "no messages": (GOOD | {"messages": []}, 400, "messages"),
    "a role": (GOOD | {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    "a picture": (GOOD | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0"),
    "half a pair": (b'{"model": "ppo", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "messages.0"),
    "another model": (GOOD | {"model": "gpt-4o"}, 404, "expected one of sft, ppo"),
    "temperature": (GOOD | {"temperature": -1}, 400, "temperature"),
    "NaN": (json.dumps(GOOD | {"temperature": float("nan")}).encode(), 400, "temperature"),
    "max_tokens": (GOOD | {"max_tokens": 0}, 400, "max_tokens"),
    "endless": (GOOD | {"max_completion_tokens": 10**9}, 400, "max_completion_tokens"),
    "top_p": (GOOD | {"top_p": 0.9}, 400, "top_p: not supported, expected 1"),
    "tools": (GOOD | {"tools": [{"type": "function"}]}, 400, "tools: not supported"),
    "n": (GOOD | {"n": 2}, 400, "n: not supported"),
    "stops": (GOOD | {"stop": ["a"] * 5}, 400, "stop"),
    "an empty stop": (GOOD | {"stop": ""}, 400, "stop"),
    "too long": (GOOD | {"messages": LONG}, 400, "start a new dialogue"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_its_reason(name: str, server: Server) -> None:
    body, status, words = REFUSED[name]
    got, error = ask(server, body)
    assert (got, words in error["message"]) == (status, True), (got, error)
    assert {*error} == {"message", "type", "param", "code"}
    assert error["code"] == {"too long": "context_length_exceeded", "another model": "model_not_found"}.get(
        name, error["code"]
    )


def test_neutral_and_unknown_fields_are_no_mistake(server: Server) -> None:
    neutral = {"top_p": 1.0, "n": 1, "presence_penalty": 0, "tools": None, "user": "me", "chat_id": "x"}
    assert ask(server, GOOD | neutral)[0] == 200


def test_http_mistakes(server: Server) -> None:
    assert ask(server, GOOD, Content_Type="text/plain")[0] == 415  # what a foreign page can send without being asked
    assert ask(server, GOOD, path="/v1/embeddings")[0] == 404
    assert ask(server, None, "GET")[0] == 405
    assert ask(server, None, "GET", "/")[0] == 404
    assert ask(server, None, "GET", "/v1/models", Content_Type="text/plain")[0] == 200
    assert ask(server, b"", Content_Length=str(MAX_BODY + 1))[0] == 413
    assert ask(server, b"", Content_Length="-1")[0] == 411
    for method in ("OPTIONS", "DELETE"):  # a foreign page asks with OPTIONS whether it may send JSON
        status, error = ask(server, None, method)
        assert status == 501 and method in error["message"]


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::1", ""])
def test_a_foreign_host_is_refused(server: Server, host: str) -> None:
    """A name of a foreign site that leads to 127.0.0.1 (DNS rebinding), and a foreign page."""
    assert ask(server, GOOD, Host=host)[0] == 403
    assert ask(server, GOOD, Origin=f"http://{host}" if host else "null")[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1", "[::1]:8000"])
def test_this_machine_is_no_foreign_host(server: Server, host: str) -> None:
    assert ask(server, GOOD, Host=host, Origin=f"http://{host}")[0] == 200


def test_a_key_is_required_of_every_request(models: Models) -> None:
    with serving(models, KEY) as locked:
        for header in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer other"}, {"Authorization": KEY}):
            status, error = ask(locked, None, "GET", "/v1/models", **header)
            assert (status, error["code"]) == (401, "invalid_api_key") and KEY not in error["message"]
        right = f"Bearer {KEY}"
        assert ask(locked, None, "GET", "/v1/models", Authorization=right, Host="name.of.this.machine")[0] == 200
        with openai.OpenAI(base_url=locked.url, api_key=KEY, max_retries=0) as client:
            assert client.models.list().data


def test_requests_that_wait_are_bounded(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "MAX_WAITING", 0)
    with serving(models) as small, models.lock:
        statuses: list[int] = []
        first = threading.Thread(target=lambda: statuses.append(ask(small, GOOD)[0]))
        first.start()
        while small.waiting._value:
            pass
        assert ask(small, GOOD)[0] == 429
        models.lock.release()
        first.join()
        models.lock.acquire()
    assert statuses == [200]


def test_an_open_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = ServeOptions(run="r", host="0.0.0.0")
    with pytest.raises(UserError, match=r"other machines reach this address.*--api-key"):
        api_key(everywhere)
    assert api_key(ServeOptions(run="r", host="0.0.0.0", api_key="k")) == "k"
    monkeypatch.setenv("RLHF_API_KEY", "e")
    assert api_key(everywhere) == "e" and "k" not in repr(ServeOptions(api_key="sekrit"))[-20:]
    with pytest.raises(UserError, match="no run is named"):
        api_key(ServeOptions())


def test_a_port_in_use_is_one_line(server: Server, models: Models) -> None:
    with pytest.raises(UserError, match="cannot listen there"):
        Server(models, ServeOptions(run="r", port=int(server.server_address[1])), None)
