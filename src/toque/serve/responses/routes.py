"""The routes of the Responses API, and how a body becomes a job.

Owns: nothing. Knows: bodies, the store, jobs. Does not know: how answers are written or sent.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from toque.errors import RequestError
from toque.serve.classes import slo_of
from toque.serve.constraints import constraint
from toque.serve.conversation import Conversation, template_variables
from toque.serve.failures import FailedCall, Failure, short
from toque.serve.held import held_to
from toque.serve.keys import key_of
from toque.serve.offer import offer
from toque.serve.openai import body_of, read_json
from toque.serve.prepare import Arrival, Asked, Job, Show, make_job
from toque.serve.prompts import chat_prompt
from toque.serve.responses.body import check_labels, effort_of, format_of
from toque.serve.responses.items import as_items, messages_of
from toque.serve.responses.output import Json
from toque.serve.responses.store import ResponseStore, Stored, conversation_items
from toque.serve.responses.writer import ResponseWriter
from toque.serve.schema import Drawing, ResponsesBody, Sampling, StreamOptions, check
from toque.serve.service import Service
from toque.serve.sse import GenerationResponse
from toque.serve.thinking import thinking_budget


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])
    store = service.responses

    @router.post(
        "", summary="Answer a conversation, in items", openapi_extra=body_of(ResponsesBody)
    )
    async def create(request: Request) -> Response:
        arrived_s = time.monotonic()
        data = await read_json(request, service.options)
        hello, _ = service.require_ready()
        body = check(ResponsesBody, data, service.options.allow_unknown_fields)
        arrival = Arrival(arrived_s, slo_of(request, body.slo, hello))
        return await _create(service, body, arrival, owner_of(request))

    @router.get("/{response_id}", summary="A stored response")
    async def get(response_id: str, request: Request) -> Response:
        found = _stored(store, owner_of(request), response_id)
        if request.query_params.get("stream") not in (None, "false"):
            raise RequestError("'stream' of a stored response is not supported", "stream")
        return Response(found.response, media_type="application/json")

    @router.get("/{response_id}/input_items", summary="What a stored response was asked")
    async def input_items(response_id: str, request: Request) -> Response:
        items = msgspec.json.decode(_stored(store, owner_of(request), response_id).given)
        return JSONResponse({"object": "list", "data": items, "has_more": False})

    @router.delete("/{response_id}", summary="Forget a stored response")
    async def delete(response_id: str, request: Request) -> Response:
        _stored(store, owner_of(request), response_id)
        store.delete(owner_of(request), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/{response_id}/cancel", summary="Refused: only background responses can be")
    async def cancel(response_id: str, request: Request) -> Response:
        _stored(store, owner_of(request), response_id)
        raise RequestError(
            "only background responses can be cancelled, and there are none here: a response that "
            "is being made ends when its connection closes",
            "response_id",
        )

    return router


def owner_of(request: Request) -> bytes:
    key = key_of(request.scope)
    return b"" if key is None else key.digest


def _stored(store: ResponseStore, owner: bytes, response_id: str) -> Stored:
    found = store.get(owner, response_id)
    if found is None:
        message = f"there is no stored response '{short(response_id)}'"
        raise FailedCall(Failure(404, message, "response_id"))
    return found


async def _create(
    service: Service, body: ResponsesBody, arrival: Arrival, owner: bytes
) -> Response:
    lenient, given = service.options.allow_unknown_fields, as_items(body.input)
    check_labels(body, lenient)
    before = _before(service.responses, owner, body.previous_response_id)
    items = [*before, *given]
    job, conversation = await _job(service, body, items, len(before), arrival)

    def keep(response: Json, output: list[Json]) -> None:
        if body.store is not False:
            encode = msgspec.json.encode
            kept = Stored(encode(response), encode(given), encode([*items, *output]))
            service.responses.put(owner, job.id, kept)

    writer = ResponseWriter(job, _echoed(body, conversation), keep)
    return GenerationResponse(service, job, writer)


def _before(store: ResponseStore, owner: bytes, response_id: str | None) -> list[Any]:
    """The conversation that a stored response belongs to. Raises FailedCall."""
    if response_id is None:
        return []
    found = store.get(owner, response_id)
    if found is None:
        message = f"there is no stored response '{short(response_id)}' to go on from"
        path = "previous_response_id"
        raise FailedCall(Failure(400, message, path, "previous_response_not_found"))
    return conversation_items(found)


async def _job(
    service: Service, body: ResponsesBody, items: list[Any], first_new: int, arrival: Arrival
) -> tuple[Job, Conversation]:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    lenient = service.options.allow_unknown_fields
    hello, tokenizer = service.require_ready()
    service.model_name(hello, body.model)
    conversation = _conversation(body, items, first_new, lenient)
    sampling = _sampling(body)
    prompt = await chat_prompt(service, hello, tokenizer, sampling, conversation)
    wanted = format_of(body, lenient)
    other = constraint(sampling)
    if wanted is not None and other is not None:
        raise RequestError(f"'text.format' and '{other[1]}' exclude each other", other[1])
    held = await held_to(service, sampling, conversation.offer, prompt, wanted or other)
    asked = Asked(
        kind="resp",
        prompts=[held.prompt],
        max_tokens=body.max_output_tokens,
        logprobs=None,
        show=Show(
            skip_special_tokens=body.skip_special_tokens is not False,
            return_token_ids=False,
            include_stop=bool(body.include_stop_str_in_output),
            tokens_as_ids=False,
        ),
        offer=conversation.offer,
        grammar=held.grammar,
        calls=held.calls,
        thinking=await thinking_budget(service, body.thinking_token_budget, held.prompt),
    )
    return make_job(service, sampling, asked, arrival), conversation


def _conversation(
    body: ResponsesBody, items: list[Any], first_new: int, lenient: bool
) -> Conversation:
    messages = messages_of(items, first_new, lenient)
    if body.instructions:
        if messages and messages[0]["role"] == "system":
            text = f"{body.instructions}\n\n{messages[0]['content']}"
            messages[0] = {**messages[0], "content": text}
        else:
            messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise RequestError("'input' has no items", "input")
    return Conversation(
        messages=messages,
        offer=offer(body.tools, body.tool_choice, body.parallel_tool_calls, lenient, flat=True),
        variables=template_variables(body.chat_template_kwargs),
        effort=effort_of(body, lenient),
        param="input",
        effort_param="reasoning.effort",
    )


def _sampling(body: ResponsesBody) -> Sampling:
    """The same numbers, as the other routes bring them; usage is in a stream's last event."""
    shared = {name: getattr(body, name) for name in Drawing.model_fields}
    options = StreamOptions(include_usage=True) if body.stream else None
    return Sampling.model_construct(**shared, stream=body.stream, stream_options=options)


def _echoed(body: ResponsesBody, conversation: Conversation) -> Json:
    """What a response repeats of its request, with the defaults filled in."""
    mode, name = conversation.offer.mode, conversation.offer.name
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": conversation.offer.parallel,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": conversation.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": choice if mode != "named" else {"type": "function", "name": name},
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": None,
    }
