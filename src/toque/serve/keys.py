"""API keys: who may call what. Deny by default: open are /health, /ready and the page's files.

Owns: the keys' digests. Knows: which scope a path needs. Does not know: what routes do.

A key is written `KEY` (everything) or `KEY:scope,scope`; `slo=NAME` among the scopes is the
class of service of requests that name none. The key that was used stays in the ASGI scope.

Paths are compared as the router compares them, decoded and exact, so whatever spelling reaches a
route has passed the check of that route; a path that nobody serves needs a key too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from toque.errors import ConfigError
from toque.options import ServeOptions
from toque.serve.dashboard import EVENTS_PATH, PAGE_PATHS
from toque.serve.failures import Failure, send_failure

INFERENCE, METRICS, ADMIN = "inference", "metrics", "admin"
SCOPES = frozenset({INFERENCE, METRICS, ADMIN})
OPEN_PATHS = frozenset({"/health", "/ready", *PAGE_PATHS})
# Any key will do: they tell nothing that one who may call the server does not know.
_ANY_KEY_PATHS = frozenset({"/version", "/ping", "/docs", "/openapi.json"})
_METRICS_PATHS = frozenset({"/metrics", "/load", EVENTS_PATH})
_SHORTEST_KEY_CHARS = 8
_KEY = "toque.key"  # in the ASGI scope


@dataclass(frozen=True, slots=True)
class Key:
    digest: bytes  # SHA-256: all of one length, so that comparing takes one time
    scopes: frozenset[str]
    slo: str | None = None  # class of its requests that name none

    @property
    def label(self) -> str:
        """A name for logs and metrics that does not give the key away."""
        return self.digest.hex()[:8]


def key_of(scope: Scope) -> Key | None:
    """The key that an exchange was let in with; None where the server has no keys."""
    found: Key | None = scope.get(_KEY)
    return found


def keys_of(options: ServeOptions) -> tuple[Key, ...]:
    """The keys of flags, environment and file. Raises ConfigError."""
    listed = [*options.api_key, *os.environ.get("TOQUE_API_KEY", "").split()]
    if options.api_key_file is not None:
        listed += keys_in_file(options.api_key_file)
    return parse_keys(listed)


def parse_keys(texts: Iterable[str]) -> tuple[Key, ...]:
    """Raises ConfigError for a key that is too short, or a scope that does not exist."""
    return tuple(_parse_key(text.strip()) for text in texts if text.strip())


def keys_in_file(path: str) -> list[str]:
    """One key a line; empty lines and those that begin with # do not count. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise ConfigError(f"--api-key-file {path} holds no key: nobody could call the server")
    return found


def _parse_key(text: str) -> Key:
    secret, colon, listed = text.rpartition(":")
    slo = None
    if not colon:
        secret, scopes = text, SCOPES
    else:
        words = [word.strip() for word in listed.split(",")]
        classes = [word.removeprefix("slo=") for word in words if word.startswith("slo=")]
        slo = classes[-1] if classes else None
        # A key that names a class only may do everything.
        scopes = frozenset(word for word in words if not word.startswith("slo=")) or (
            SCOPES if classes else frozenset()
        )
        if not scopes <= SCOPES or not scopes:
            wrong = ", ".join(sorted(scopes - SCOPES)) or "nothing"
            raise ConfigError(
                f"an API key has the scope {wrong!r} after its colon; scopes are "
                f"{', '.join(sorted(SCOPES))}, slo=NAME (a key with a colon in it must name its "
                "scopes)"
            )
    if len(secret) < _SHORTEST_KEY_CHARS:
        raise ConfigError(f"an API key must have at least {_SHORTEST_KEY_CHARS} characters")
    return Key(_digest(secret.encode()), scopes, slo)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


class KeyCheck:
    """Pure ASGI: 401 without a key that is known, 403 with one that may not do this."""

    def __init__(self, app: ASGIApp, keys: tuple[Key, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        failure = self._failure(scope)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await send_failure(send, failure)

    def _failure(self, scope: Scope) -> Failure | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = self._find(given[0]) if len(given) == 1 else None
        if key is None:
            message = "this server needs an API key: Authorization: Bearer KEY"
            headers = (("www-authenticate", "Bearer"),)
            return Failure(401, message, code="invalid_api_key", headers=headers)
        scope[_KEY] = key
        needed = needed_scope(scope["path"])
        if needed is None or needed in key.scopes:
            return None
        return Failure(403, f"this key has not the scope '{needed}'", code="insufficient_scope")

    def _find(self, header: bytes) -> Key | None:
        """Looks at every key, whichever matches: the time tells nothing."""
        scheme, _, secret = header.partition(b" ")
        digest, found = _digest(secret.strip()), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == b"bearer" else None


def needed_scope(path: str) -> str | None:
    """None: any key. What is not listed is inference. A timeline is shown to the key that its
    request came with and to those with `metrics`: the route looks itself."""
    if path in _ANY_KEY_PATHS or path.startswith("/v1/requests/"):
        return None
    return METRICS if path in _METRICS_PATHS else INFERENCE
