"""Routes of the page: its files, its stream of numbers, one request's timeline.

Owns: nothing. Knows: ASGI, the feed. Does not know: what the documents say.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from toque.serve.dashboard import EVENTS_PATH, PAGE_FILES
from toque.serve.dashboard.feed import Feed
from toque.serve.failures import FailedCall, Failure, short
from toque.serve.keys import key_of
from toque.serve.service import Service

EXPLAIN_PATIENCE_S = 1.0  # how long a long step may delay the engine's half of a timeline
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def page_routes(service: Service) -> APIRouter:
    router = APIRouter()
    feed = Feed(service)

    async def file(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2] or "index.html"
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(PAGE_FILES[name], media_type=kind, headers=_PAGE_HEADERS)

    for path in ("/", *(f"/dashboard/{name}" for name in PAGE_FILES)):
        router.add_api_route(path, file, methods=["GET", "HEAD"], include_in_schema=False)

    @router.get(
        EVENTS_PATH, tags=["operations"], summary="What the page draws, a few times a second"
    )
    async def events() -> Response:
        if feed.full:
            message = "too many pages are open on this server"
            raise FailedCall(Failure(429, message, retry_after_s=10))
        return _Events(feed)

    @router.get(
        "/v1/requests/{name}/timeline",
        tags=["operations"],
        summary="What happened to a request, and why it waited",
    )
    async def timeline(name: str, request: Request) -> Response:
        client, key = service.client, key_of(request.scope)
        call = client.timelines.find(name, key)
        if call is None:
            message = f"no recent request is named '{short(name)}'"
            raise FailedCall(Failure(404, message, "id", "request_not_found"))
        if client.failure is None:
            await client.explain(call.open_ids(), EXPLAIN_PATIENCE_S)
        return JSONResponse(call.told())

    return router


class _Events(Response):
    """Server-sent events until the client leaves or the server drains."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        events = self._feed.events()
        try:
            async for document in events:
                body = b"data: " + document + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
