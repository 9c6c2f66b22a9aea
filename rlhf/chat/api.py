"""Requests and answers of OpenAI's chat API, as far as a policy can serve them; no HTTP here.

What would change the answer but is not supported is refused: top_p, penalties, tools. Other unknown fields are ignored.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf.chat.responses import Response
from rlhf.types import Message

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "audio": (),
    "modalities": (["text"],), "best_of": (1,), "echo": (False,), "suffix": ("",),
}  # fmt: skip
"""fields that a policy does not support, and the values with which they change nothing; null is always one"""
MAX_STOPS = 4
MAX_TOKENS = 1 << 17
"""of a response, also of a model whose context has no limit"""
MAX_STOP_LENGTH = 500


class ApiError(Exception):
    """A refused request: HTTP status, and the error object of its body."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Turn(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    @property
    def message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    model: str
    messages: list[_Turn] = Field(min_length=1, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=100)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_response: int | None = Field(None, ge=1, le=MAX_TOKENS, alias="max_completion_tokens")
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one response. None: the server's default."""

    model: str
    messages: tuple[Message, ...]
    temperature: float | None
    max_tokens: int | None
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool
    """whether a stream ends with the numbers of tokens"""


def parse_request(body: Any) -> ChatRequest:
    """The request in a JSON value. Raises: ApiError that names the field, with status 400."""
    try:
        request = _Body.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"])) or None
        raise ApiError(400, f"{param or 'body'}: {first['msg']}", param=param) from None
    for name, value in (request.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            expected = " or ".join(map(repr, NEUTRAL[name])) or "null"
            raise ApiError(400, f"{name}: not supported, expected {expected}; leave it out", "unsupported_value", name)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        expected = f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
        raise ApiError(400, f"stop: expected {expected}", param="stop")
    for i, turn in enumerate(request.messages):
        try:
            turn.message.content.encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"messages.{i}.content: got half a surrogate pair, expected text") from None
    return ChatRequest(
        request.model,
        tuple(turn.message for turn in request.messages),
        request.temperature,
        request.max_response if request.max_response is not None else request.max_tokens,
        request.seed,
        tuple(stops),
        bool(request.stream),
        request.stream_options is not None and request.stream_options.include_usage,
    )


@dataclass(frozen=True, slots=True)
class Replies:
    """The bodies that answer one request; all have its id and time."""

    model: str
    identifier: str
    created: int

    @classmethod
    def to(cls, request: ChatRequest) -> "Replies":
        return cls(request.model, f"chatcmpl-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, response: Response) -> dict[str, Any]:
        """The answer that is not streamed."""
        message = {"role": "assistant", "content": response.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(response)}
        return self._body("chat.completion", [choice]) | {"usage": usage(response)}

    def first(self) -> dict[str, Any]:
        """The start of a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text})

    def last(self, response: Response) -> dict[str, Any]:
        """The end of a stream."""
        return self._chunk({}, finish_reason(response))

    def usage(self, response: Response) -> dict[str, Any]:
        """What follows the end of a stream, if the client wants it."""
        return self._body("chat.completion.chunk", []) | {"usage": usage(response)}

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._body("chat.completion.chunk", [choice])

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identifier, "object": kind, "created": self.created, "model": self.model, "choices": choices,
        }  # fmt: skip


def finish_reason(response: Response) -> str:
    return "stop" if response.ended or response.stopped else "length"


def usage(response: Response) -> dict[str, int]:
    """Numbers of tokens; EOS counts."""
    prompt, answer = response.prompt_tokens, response.tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """The body of /v1/models."""
    return {"object": "list", "data": [model_entry(name) for name in names]}


def model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}
