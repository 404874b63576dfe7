"""Routes for operators: /health, /ready, /ping, /load, /version, /metrics.

Owns: nothing. Knows: what healthy means. Does not know: the OpenAI routes.

Healthy means progress: with open work, silence of the engine longer than max(20 s, 10 x the step it
announced) is a failure, however alive its process is.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from toque import __version__
from toque.metrics import CONTENT_TYPE
from toque.serve.failures import FailedCall, Failure
from toque.serve.service import Service


def unhealthy(service: Service) -> Failure | None:
    """Why the engine cannot be relied on; None while it loads or makes progress."""
    client = service.client
    if client.failure is not None:
        return Failure(503, str(client.failure), code="engine_gone")
    stuck_s = client.stuck_s()
    if stuck_s is None:
        return None
    message = f"no sign of the engine for {stuck_s:.0f} s with {client.open_requests} open requests"
    return Failure(503, message, code="engine_stuck")


def operator_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health", summary="Is the engine alive and making progress?")
    async def health() -> Response:
        failure = unhealthy(service)
        if failure is not None:
            raise FailedCall(failure)
        return JSONResponse({"status": "ok"})

    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    for method in ("GET", "POST"):
        name = f"ping_{method.lower()}"
        router.add_api_route(
            "/ping", health, methods=[method], operation_id=name, summary="As /health"
        )

    @router.get("/load", summary="What the engine holds now")
    async def load() -> Response:
        load = service.client.load
        fields = {name: getattr(load, name) for name in load.__struct_fields__}
        return JSONResponse({"server_load": service.client.open_requests, **fields})

    @router.get("/ready", summary="Would a request be taken now?")
    async def ready() -> Response:
        failure = service.not_serving() or unhealthy(service)
        if failure is not None:
            raise FailedCall(failure)
        return JSONResponse({"status": "ready"})

    router.add_api_route("/ready", ready, methods=["HEAD"], include_in_schema=False)

    @router.get("/version", summary="Version of the server")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics", summary="Prometheus metrics, text format 0.0.4")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return router
