"""Who may talk to this server from a browser: checks of Host, Origin and fetch metadata.

Owns: nothing that changes. Knows: HTTP headers. Does not know: routes beyond their prefix.

A web page must not drive a local server. Its requests carry its Origin, or, where a browser leaves
that out (images, scripts, links), `Sec-Fetch-Site` (https://www.w3.org/TR/fetch-metadata/). A page
that points its own name at this address (DNS rebinding) shows that name in Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toque.serve.failures import Failure, send_failure, short

ANY = "*"
_PREFLIGHT_CACHE_S = 600


class Guard:
    """Pure ASGI: refuses foreign hosts and origins with 403, answers preflights of allowed ones."""

    def __init__(
        self,
        app: ASGIApp,
        bound_host: str,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._hosts = {host_name(h) for h in ("localhost", bound_host, *allowed_hosts)}
        self._any_host = ANY in set(allowed_hosts)
        self._origins = {_plain_origin(o) for o in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _Headers(scope)
        failure = self._host_failure(headers) or self._origin_failure(scope, headers)
        if failure is not None:
            await send_failure(send, failure)
        elif headers.origin is None or headers.same_origin():
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and headers.get(b"access-control-request-method"):
            await _preflight(send, headers)
        else:
            await self._app(scope, receive, _with_cors(send, headers.origin))

    def _host_failure(self, headers: _Headers) -> Failure | None:
        hosts = headers.all(b"host")
        if not hosts or self._any_host:
            return None  # HTTP/1.0 probes have none; every browser sends one
        name = host_name(hosts[0])
        if len(hosts) == 1 and (name in self._hosts or _is_address(name)):
            return None
        shown = short(hosts[0])
        message = f"the host name '{shown}' is not served here; allow it with --allowed-hosts"
        return Failure(403, message, code="host_not_allowed")

    def _origin_failure(self, scope: Scope, headers: _Headers) -> Failure | None:
        origin = headers.origin
        if origin is None:
            return _fetch_failure(scope, headers)
        if headers.same_origin() or ANY in self._origins or _plain_origin(origin) in self._origins:
            return None
        message = f"the web origin '{short(origin)}' may not call this server; "
        message += "allow it with --allowed-origins"
        return Failure(403, message, code="origin_not_allowed")


class _Headers:
    """The few headers that count, decoded once."""

    def __init__(self, scope: Scope) -> None:
        self._raw: list[tuple[bytes, bytes]] = scope["headers"]
        origins = self.all(b"origin")
        self.origin = ", ".join(origins) if origins else None  # two of them equal no allowed one

    def all(self, name: bytes) -> list[str]:
        return [value.decode("latin-1") for key, value in self._raw if key == name]

    def get(self, name: bytes) -> str:
        return next(iter(self.all(name)), "")

    def same_origin(self) -> bool:
        """Equal to Host, whatever the scheme: a proxy in front may have taken TLS off."""
        if self.origin is None:
            return False
        scheme, _, authority = self.origin.lower().partition("://")
        return scheme in ("http", "https") and authority == self.get(b"host").lower()


def _fetch_failure(scope: Scope, headers: _Headers) -> Failure | None:
    """A browser's request without Origin, caused by another site's page."""
    if headers.get(b"sec-fetch-site") not in ("cross-site", "same-site"):
        return None
    if headers.get(b"sec-fetch-mode") == "navigate" and not scope["path"].startswith("/v1"):
        return None  # a link to /docs is fine; one that generates is not
    return Failure(403, "another web site's page may not call this server", code="cross_site")


def host_name(value: str) -> str:
    """The name in a Host header: lower case, no port, no trailing dot, no brackets."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    if value.count(":") == 1:
        value = value.partition(":")[0]
    return value.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _plain_origin(origin: str) -> str:
    return origin.strip().lower().removesuffix("/")


async def _preflight(send: Send, headers: _Headers) -> None:
    answer = {
        "access-control-allow-origin": headers.origin or "",
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": headers.get(b"access-control-request-headers") or ANY,
        "access-control-max-age": str(_PREFLIGHT_CACHE_S),
        "vary": "Origin",
        "content-length": "0",
    }
    if headers.get(b"access-control-request-private-network") == "true":
        answer["access-control-allow-private-network"] = "true"
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in answer.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    await send({"type": "http.response.body", "body": b""})


def _with_cors(send: Send, origin: str) -> Send:
    extra: list[tuple[bytes, bytes]] = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"toque-seed, toque-max-tokens, retry-after"),
        (b"vary", b"Origin"),
    ]

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Any = message.get("headers", ())
            message = {**message, "headers": [*headers, *extra]}
        await send(message)

    return send_with_cors
