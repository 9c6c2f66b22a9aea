"""`rlhf serve`: an HTTP server with OpenAI's /v1/chat/completions and /v1/models, on Python's own http.server.

It is for one person or a few: one response is sampled at a time, others wait. Without a key only this machine reaches
it, and a page of a foreign site in a browser of this machine does not: neither by a name that leads to 127.0.0.1 (DNS
rebinding; the Host header is checked) nor by a request across sites (Origin is checked, and a body must be JSON).
"""

import hmac
import ipaddress
import json
import random
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from rlhf import console
from rlhf.chat import api
from rlhf.chat.api import ApiError, ChatRequest
from rlhf.chat.options import ServeOptions, is_loopback
from rlhf.chat.responses import Generation, Models, Sampling, TooLong
from rlhf.config.options import MAX_SEED
from rlhf.engine.nonfinite import NonFiniteError
from rlhf.errors import UserError

MAX_BODY = 1 << 20
"""bytes of a request"""
MAX_WAITING = 16
"""requests that may wait for a response, besides the one that is sampled"""
SOCKET_SECONDS = 60.0
"""after which a client that neither sends nor reads is disconnected"""
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


class Server(ThreadingHTTPServer):
    """The loaded models behind an address."""

    daemon_threads = True

    def __init__(self, models: Models, options: ServeOptions, key: str | None) -> None:
        """key: what every request must have; None: none. Raises: UserError if the address cannot be used."""
        self.models, self.options, self.key = models, options, key
        self.waiting = threading.BoundedSemaphore(MAX_WAITING + 1)
        self.seeds = random.Random(options.seed)
        try:
            ip = ipaddress.ip_address(options.host)
            self.address_family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        except ValueError:
            pass  # a name
        try:
            super().__init__((options.host, options.port), Handler)
        except OSError as error:
            raise UserError(
                f"--host {options.host} --port {options.port}: cannot listen there ({error.strerror}); "
                "choose another --port"
            ) from None

    @property
    def url(self) -> str:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "rlhf"
    sys_version = ""
    timeout = SOCKET_SECONDS

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, such as another method, is JSON too."""
        self.close_connection = True
        self._send(code, ApiError(code, f"HTTP: {ascii(message or 'bad request')[1:-1]}").body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request is no event that an operator must see, and its path may have control characters."""

    def _answer(self, work: Any) -> None:
        """Do the work; every error becomes a JSON body."""
        self.close_connection = True  # a body that was not read is not the next request
        self._started = False
        try:
            self._refuse_strangers()
            work()
        except ApiError as error:
            self._fail(error)
        except TooLong as error:
            self._fail(ApiError(400, str(error), "context_length_exceeded", "messages"))
        except UserError as error:
            self._fail(ApiError(400, str(error)))
        except NonFiniteError as error:
            self._fail(ApiError(500, str(error)))
        except (ConnectionError, TimeoutError):
            return  # the client has left

    def _fail(self, error: ApiError) -> None:
        if self._started:
            self._event(error.body)
        else:
            self._send(error.status, error.body)

    def _refuse_strangers(self) -> None:
        """Raises: ApiError for a wrong key, or without a key for a name that is not this machine's."""
        if self.server.key is not None:
            scheme, _, key = (self.headers.get("Authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self.server.key.encode()):
                raise ApiError(
                    401, "Authorization: expected 'Bearer KEY' with the key of rlhf serve", "invalid_api_key"
                )
            return
        for header in ("Host", "Origin"):
            value = self.headers.get(header)
            if (value is None and header == "Host") or (value is not None and not is_loopback(value)):
                raise ApiError(403, f"{header}: got '{ascii(value)[1:-1]}', expected this machine (localhost)")

    def _get(self) -> None:
        path, names = unquote(urlsplit(self.path).path), [*self.server.models.policies]
        if path == MODELS:
            self._send(200, api.model_list(names))
        elif path.startswith(f"{MODELS}/"):
            name = path.removeprefix(f"{MODELS}/")
            self._require_model(name)
            self._send(200, api.model_entry(name))
        elif path == CHAT:
            raise ApiError(405, f"{path}: got GET, expected POST")
        else:
            raise self._unknown_path(path)

    def _post(self) -> None:
        path = urlsplit(self.path).path
        if path != CHAT:
            raise self._unknown_path(path)
        request = api.parse_request(self._json())
        self._require_model(request.model)
        if not self.server.waiting.acquire(blocking=False):
            raise ApiError(429, f"{MAX_WAITING} requests are waiting already; try again later", "rate_limit_exceeded")
        try:
            self._respond(request)
        finally:
            self.server.waiting.release()

    def _unknown_path(self, path: str) -> ApiError:
        return ApiError(404, f"{ascii(path)[1:-1]}: no such path, expected {CHAT} or {MODELS}")

    def _require_model(self, name: str) -> None:
        if name not in self.server.models.policies:
            expected = ", ".join(self.server.models.policies)
            raise ApiError(404, f"model: got {name!a}, expected one of {expected}", "model_not_found", "model")

    def _json(self) -> Any:
        """The body. Raises: ApiError for one that is too large, or no JSON."""
        if self.headers.get_content_type() != "application/json":
            raise ApiError(415, f"Content-Type: got {self.headers.get_content_type()!a}, expected application/json")
        length = self.headers.get("Content-Length")
        if length is None or not length.isascii() or not length.isdigit():
            raise ApiError(411, "Content-Length: got no length of the body, expected one")
        if int(length) > MAX_BODY:
            raise ApiError(413, f"body: got {length[:20]} bytes, expected at most {MAX_BODY}")
        body = self.rfile.read(int(length))
        try:
            return json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"body: not JSON ({' '.join(str(error).split())[:100]})") from None

    def _respond(self, request: ChatRequest) -> None:
        o, replies = self.server.options, api.Replies.to(request)
        seed = self.server.seeds.randrange(MAX_SEED) if request.seed is None else request.seed % (MAX_SEED + 1)
        temperature = o.temperature if request.temperature is None else request.temperature
        sampling = Sampling(temperature, request.max_tokens or o.response_length, (seed,))
        generation = Generation(self.server.models, request.model, request.messages, sampling, request.stops)
        if not request.stream:
            self._send(200, replies.whole(generation.finish()))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self._started = True
        self._event(replies.first())
        pieces = iter(generation)
        try:
            for piece in pieces:
                self._event(replies.piece(piece))
        finally:
            pieces.close()  # a client that has left stops the sampling
        response = generation.finish()
        self._event(replies.last(response))
        if request.with_usage:
            self._event(replies.usage(response))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: Mapping[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)


def serve(models: Models, options: ServeOptions, key: str | None) -> None:
    """Serve until Ctrl-C. Raises: UserError if the address cannot be used."""
    with Server(models, options, key) as server:
        access = "" if key is None else ", with the key"
        console.say(f"serving {', '.join(models.policies)} at {server.url}{access}; Ctrl-C ends")
        server.serve_forever()
