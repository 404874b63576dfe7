"""The one error shape of every route: `{"error": {"message", "type", "param", "code"}}`.

Owns: nothing. Knows: which exception means which status, type and code.
Does not know: routes. Messages are short and name no internals; causes go to the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Send

from toque.errors import CapacityError, EngineError, RequestError
from toque.types import Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "overloaded",
    431: "request_header_fields_too_large",
    500: "internal_error",
    503: "unavailable",
}
_LONGEST_MESSAGE_CHARS = 600


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told. `retry_after_s` becomes a Retry-After header."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def type(self) -> str:
        if self.status in _TYPES:
            return _TYPES[self.status]
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable" if self.status == 503 else "server_error"

    def body(self) -> bytes:
        error = {
            "message": short(self.message, _LONGEST_MESSAGE_CHARS),
            "type": self.type,
            "param": self.param,
            "code": self.code or _CODES.get(self.status),
        }
        return msgspec.json.encode({"error": error})

    def header_list(self) -> list[tuple[str, str]]:
        """Headers of the answer, content type included; Retry-After in whole seconds."""
        headers = [("content-type", "application/json"), *self.headers]
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
        return headers


_CAUSES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    413: "too_large",
    429: "overload",
    499: "cancelled",
    503: "unavailable",
}


def cause_of(status: int, code: str | None = None) -> str:
    """One of metrics.CAUSES: what a call that failed with this status is counted as."""
    if status in _CAUSES:
        return _CAUSES[status]
    if status < 500:
        return "validation"
    return "engine" if code == "engine_error" else "internal"


class FailedCall(Exception):
    """Ends an HTTP call with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def shutting_down() -> Failure:
    return Failure(503, "the server is shutting down", code="shutting_down", retry_after_s=10)


def describe(error: BaseException) -> Failure:
    """The failure that a client sees for an exception; anything unknown is a plain 500."""
    match error:
        case FailedCall():
            return error.failure
        case RequestError():
            return Failure(error.status, str(error), error.param)
        case CapacityError():
            return Failure(error.status, str(error), retry_after_s=error.retry_after_s)
        case EngineError():
            return Failure(500, str(error), code="engine_error")
        case HTTPException():
            headers = tuple((error.headers or {}).items())
            return Failure(error.status_code, str(error.detail), headers=headers)
        case _:
            return Failure(500, "internal error; the server's log has the cause")


def from_refusal(event: Refused) -> Failure:
    """The engine did not take the request: too much work now, or a request it cannot hold."""
    return Failure(event.status, event.message, retry_after_s=event.retry_after_s)


def short(text: str, limit_chars: int = 64) -> str:
    """A client's own words, cut: an error message never echoes a huge value."""
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"


async def send_failure(send: Send, failure: Failure) -> None:
    """Answer with a failure, for code that stands outside the routes."""
    body = failure.body()
    headers = [*failure.header_list(), ("content-length", str(len(body)))]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": failure.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
