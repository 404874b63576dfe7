"""The OpenAI routes: completions, chat, embeddings, models; and vLLM's tokenize and detokenize.

Owns: nothing. Knows: bodies and jobs. Does not know: how answers are written or sent.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from toque.errors import RequestError
from toque.options import ServeOptions
from toque.serve.classes import slo_of
from toque.serve.conversation import chat_conversation
from toque.serve.embeddings import EmbeddingResponse, embedding_job
from toque.serve.failures import FailedCall, Failure
from toque.serve.frontend import ClientGone
from toque.serve.prepare import chat_job, completion_job
from toque.serve.prompts import chat_tokens
from toque.serve.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    Sampling,
    TokenizeBody,
    check,
    decode_json,
    query_data,
)
from toque.serve.service import Service, TextTokenizer, check_ids
from toque.serve.sse import GenerationResponse
from toque.types import Hello, Slo


async def read_json(request: Request, options: ServeOptions) -> dict[str, Any]:
    """The body as an object, whatever its Content-Type says (`curl -d` sends a form's).

    Raises:
        FailedCall: 413, at the declared length or at the limit. RequestError: not a JSON object.
        ClientGone: the body never came.
    """
    limit_bytes = options.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit_bytes:
        await _let_finish(request)
        raise FailedCall(_too_large(limit_bytes))
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit_bytes:
            body.clear()
            if more:
                await _let_finish(request)
            raise FailedCall(_too_large(limit_bytes))
    return decode_json(bytes(body), options.max_json_depth)


async def _let_finish(request: Request) -> None:
    """Read a refused body to its end and keep nothing: a client that is still writing when the
    connection closes never sees the answer. --read-timeout bounds it; who asks first is not
    asked to send."""
    if "expect" in request.headers:
        return
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if not message.get("more_body", False):
            return


def _too_large(limit_bytes: int) -> Failure:
    message = f"the request body is larger than {limit_bytes} bytes (--max-body-bytes)"
    return Failure(413, message)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that the route reads by itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query_of(model: type[BaseModel]) -> dict[str, Any]:
    fields = model.model_json_schema()["properties"].items()
    required = ("prompt",)
    return {
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "schema": {"type": "string"},
            }
            for name, _ in fields
        ]
    }


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    options = service.options
    lenient = options.allow_unknown_fields

    @router.post("/completions", summary="Continue a prompt", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        arrived_s = time.monotonic()
        body = check(CompletionBody, await _ready_json(request), lenient)
        slo = _slo(request, body)
        return GenerationResponse(service, await completion_job(service, body, arrived_s, slo))

    @router.get(
        "/completions",
        summary="Continue a prompt, from a browser's address bar",
        openapi_extra=query_of(CompletionBody),
    )
    async def completions_get(request: Request) -> Response:
        arrived_s = time.monotonic()
        service.require_ready()
        data = query_data(request.query_params.multi_items())
        body = check(CompletionBody, data, lenient, strict=False)
        slo = _slo(request, body)
        return GenerationResponse(service, await completion_job(service, body, arrived_s, slo))

    @router.post(
        "/chat/completions", summary="Answer a conversation", openapi_extra=body_of(ChatBody)
    )
    async def chat(request: Request) -> Response:
        arrived_s = time.monotonic()
        body = check(ChatBody, await _ready_json(request), lenient)
        slo = _slo(request, body)
        return GenerationResponse(service, await chat_job(service, body, arrived_s, slo))

    @router.post("/embeddings", summary="Texts to vectors", openapi_extra=body_of(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        arrived_s = time.monotonic()
        body = check(EmbeddingBody, await _ready_json(request), lenient)
        return EmbeddingResponse(service, await embedding_job(service, body, arrived_s))

    def _slo(request: Request, body: Sampling) -> Slo | None:
        hello, _ = service.require_ready()
        return slo_of(request, body.slo, hello)

    async def _ready_json(request: Request) -> dict[str, Any]:
        data = await read_json(request, options)
        service.require_ready()
        return data

    return router


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models", summary="The served model")
    async def models() -> Response:
        hello, _ = service.require_ready()
        names = service.model_names(hello)
        cards = [_model_card(name, hello, service.started_unix_s) for name in names]
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/models/{name:path}", summary="One served name of the model")
    async def model(name: str) -> Response:
        if not name:
            raise HTTPException(404, "Not Found")
        hello, _ = service.require_ready()
        served = service.model_name(hello, name)
        return JSONResponse(_model_card(served, hello, service.started_unix_s))

    return router


def _model_card(name: str, hello: Hello, created_unix_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "toque",
        "root": hello.model_name,
        "parent": None,
        "max_model_len": hello.max_model_len,
    }


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])
    options = service.options
    lenient = options.allow_unknown_fields

    @router.post(
        "/tokenize", summary="Text or messages to ids", openapi_extra=body_of(TokenizeBody)
    )
    async def tokenize(request: Request) -> Response:
        data = await read_json(request, options)
        hello, tokenizer = service.require_ready()
        body = check(TokenizeBody, data, lenient)
        service.model_name(hello, body.model)
        ids = await _encode(service, tokenizer, body)
        answer = {
            "count": len(ids),
            "max_model_len": hello.max_model_len,
            "tokens": ids,
            "token_strs": tokenizer.pieces(ids) if body.return_token_strs else None,
        }
        return JSONResponse(answer)

    @router.post("/detokenize", summary="Ids to text", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        data = await read_json(request, options)
        hello, tokenizer = service.require_ready()
        body = check(DetokenizeBody, data, lenient)
        service.model_name(hello, body.model)
        check_ids(body.tokens, hello.vocab_size, "tokens")
        text = await service.text_work(
            len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return JSONResponse({"prompt": text})

    return router


async def _encode(service: Service, tokenizer: TextTokenizer, body: TokenizeBody) -> list[int]:
    prompt, messages = body.prompt, body.messages
    if (prompt is None) == (messages is None):
        raise RequestError("give either 'prompt' or 'messages'", "prompt")
    if prompt is not None:
        _only_with_messages(body)
        special = body.add_special_tokens is not False
        return await service.text_work(
            len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=special)
        )
    if body.add_special_tokens:
        raise RequestError(
            "'add_special_tokens' with 'messages' is not supported: the chat template writes them",
            "add_special_tokens",
        )
    asked = chat_conversation(body, service.options.allow_unknown_fields)
    return await chat_tokens(service, tokenizer, asked)


def _only_with_messages(body: TokenizeBody) -> None:
    template = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    for name in template:
        if getattr(body, name) is not None:
            raise RequestError(f"'{name}' needs 'messages'", name)
