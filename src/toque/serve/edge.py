"""The outermost layer: every HTTP exchange is counted, and how many are in progress is known.

Owns: the number of exchanges in progress. Knows: the metrics. Does not know: what routes do.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toque.metrics import Metrics

MODEL_ROUTE = "/v1/models/{name}"
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})
OUTCOME = "toque.outcome"  # key of the scope: a dict in which a route may set "outcome"
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
        status = NO_ANSWER

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        told: dict[str, str] = {}  # what the route knows and the status line cannot say any more
        scope[OUTCOME] = told
        generates = scope["path"] in GENERATION_PATHS
        if generates:
            self._metrics.call_received()
        self.in_progress += 1
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self.in_progress -= 1
            self._count(scope, status)
            if generates:
                self._metrics.call_finished(told.get("outcome") or _outcome(status))

    def _count(self, scope: Scope, status: int) -> None:
        route = self._route(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http(route, method, status)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return MODEL_ROUTE if path.startswith("/v1/models/") else "other"


def _outcome(status: int) -> str:
    if status == NO_ANSWER:
        return "cancelled"
    if status < 400:
        return "success"
    return "failed" if status >= 500 and status != 503 else "refused"
