"""The ASGI application: routes, error handlers, the OpenAPI document and its page.

Owns: the assembled layers. Knows: every route module. Does not know: sockets, signals.

    Edge (counts) -> Guard (Host, Origin) -> KeyCheck (API keys) -> FastAPI (routes) -> handlers
"""

from __future__ import annotations

import logging
from importlib import resources

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque import __version__
from toque.errors import CapacityError, EngineError, RequestError
from toque.serve.dashboard import PAGE_PATHS
from toque.serve.dashboard.routes import page_routes
from toque.serve.edge import GENERATION_PATHS, OUTCOME, Edge
from toque.serve.failures import FailedCall, cause_of, describe
from toque.serve.frontend import ClientGone
from toque.serve.guard import Guard
from toque.serve.health import operator_routes
from toque.serve.keys import KeyCheck, keys_of
from toque.serve.openai import model_routes, openai_routes, token_routes
from toque.serve.openapi import document
from toque.serve.responses.routes import response_routes
from toque.serve.service import Service

log = logging.getLogger("toque.serve")

# The page's own script is inline and may fetch from this server only.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


def create_app(service: Service) -> Edge:
    """The whole application; its `in_progress` says how many exchanges are open."""
    app = FastAPI(
        title="toque", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(openai_routes(service))
    app.include_router(response_routes(service))
    app.include_router(model_routes(service))
    app.include_router(token_routes(service))
    app.include_router(operator_routes(service))
    app.include_router(page_routes(service))
    _add_docs(app)
    _add_error_handlers(app, service)
    described = document(app)
    app.openapi = lambda: described  # type: ignore[method-assign]
    options = service.options
    checked = KeyCheck(app, keys_of(options))
    guard = Guard(checked, options.host, options.allowed_hosts, options.allowed_origins)
    paths = frozenset((*described["paths"], "/openapi.json", "/docs", *PAGE_PATHS))
    return Edge(guard, service.metrics, paths)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        failure = describe(error)
        if request.url.path in GENERATION_PATHS:
            service.metrics.refused(failure.status)
            request.scope[OUTCOME]["cause"] = cause_of(failure.status, failure.code)
        return Response(failure.body(), failure.status, headers=dict(failure.header_list()))

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return _NoAnswer()

    expected = (FailedCall, RequestError, CapacityError, EngineError, HTTPException)
    # Exception's handler runs in the outermost layer, which raises again so that it is logged.
    for kind in (*expected, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGone, nobody_listens)


class _NoAnswer(Response):
    """Sends nothing: the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


def _add_docs(app: FastAPI) -> None:
    page = resources.files("toque.serve").joinpath("docs.html").read_bytes()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = {"content-security-policy": _DOCS_POLICY}
        return Response(page, media_type="text/html", headers=headers)
