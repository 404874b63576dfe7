"""The errors that cross a boundary: each says whose fault it is and what the HTTP edge answers.

Anything else that is raised is a bug of ours: the edge answers 500 and names no internals.
"""

from __future__ import annotations


class ToqueError(Exception):
    """Base of every error that a user is meant to read."""


class ConfigError(ToqueError):
    """A start-up choice that cannot work; the message says what to change. Never raised later."""


class ModelError(ToqueError):
    """A checkpoint that is damaged, incomplete or not supported; the message names file and key."""


class RequestError(ToqueError):
    """The client's request is wrong (4xx). `param` names the field at fault, as OpenAI's does."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class CapacityError(ToqueError):
    """The server cannot take this request now (429 or 503); the same request may work later."""

    def __init__(self, message: str, status: int = 503, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineError(ToqueError):
    """The engine failed while it held the request (5xx)."""


# Why a row of a batch failed, where others need to tell it from other reasons.
NOT_NUMBERS = "the model produced logits that are not numbers"
