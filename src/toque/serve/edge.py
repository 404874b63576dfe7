"""The outermost layer: every HTTP exchange is counted, and how many are in progress is known.

Owns: the number of exchanges in progress. Knows: the metrics. Does not know: what routes do.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toque.metrics import Metrics
from toque.serve.failures import cause_of
from toque.serve.keys import key_of

log = logging.getLogger("toque.serve")

_RESPONSES = "/v1/responses/"
RESPONSE_ROUTE = "/v1/responses/{response_id}"
MODEL_ROUTE = "/v1/models/{name}"
TIMELINE_ROUTE = "/v1/requests/{name}/timeline"
_FAMILIES = (("/v1/models/", MODEL_ROUTE), ("/v1/requests/", TIMELINE_ROUTE))
GENERATION_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"}
)
OUTCOME = "toque.outcome"  # key of the scope: a dict for "outcome" and "cause", set by routes
NO_KEY = "none"  # in place of a key's label
NO_ANSWER = 499  # the client went away first; nginx's number for it
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class Edge:
    """Pure ASGI. Routes and methods that do not exist share one label: cardinality is bounded."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self.in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, sent_bytes, began_s, complete = NO_ANSWER, 0, time.monotonic(), False

        async def send_and_note(message: Message) -> None:
            nonlocal status, sent_bytes, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            await send(message)

        told: dict[str, str] = {}  # what the route knows and the status line cannot say any more
        scope[OUTCOME] = told
        generates = scope["path"] in GENERATION_PATHS
        if generates:
            self._metrics.call_received()
        self.in_progress += 1
        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            # What failed has been answered. Raised further, the server would close the connection,
            # which the client has been told nothing of: its next request would meet a reset.
            if not complete:
                raise
            log.exception("a request failed")
        finally:
            self.in_progress -= 1
            self._count(scope, status, time.monotonic() - began_s, sent_bytes)
            if generates:
                self._finished(scope, status, told)

    def _count(self, scope: Scope, status: int, took_s: float, sent_bytes: int) -> None:
        route = self._route(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http(route, method, status)
        self._metrics.exchange(route, took_s, _declared_bytes(scope), sent_bytes)

    def _finished(self, scope: Scope, status: int, told: dict[str, str]) -> None:
        outcome = told.get("outcome") or _outcome(status)
        cause = None
        if outcome != "success":
            over = NO_ANSWER if outcome == "cancelled" else status
            cause = told.get("cause") or cause_of(over)
        key = key_of(scope)
        self._metrics.call_finished(outcome, cause, NO_KEY if key is None else key.label)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        if path.startswith(_RESPONSES):
            _, slash, rest = path.removeprefix(_RESPONSES).partition("/")
            route = RESPONSE_ROUTE + slash + rest
            return route if route in self._routes else "other"
        return next((route for start, route in _FAMILIES if path.startswith(start)), "other")


def _declared_bytes(scope: Scope) -> int:
    given = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(given) if given.isdigit() and len(given) < 16 else 0


def _outcome(status: int) -> str:
    if status == NO_ANSWER:
        return "cancelled"
    if status < 400:
        return "success"
    return "failed" if status >= 500 and status != 503 else "refused"
