"""Embeddings: one vector for each input, the pooled states of its tokens.

Owns: the vectors of one call until it is answered. Knows: OpenAI's shape, the engine's events.
Does not know: how states are pooled, HTTP beyond one whole answer.
"""

from __future__ import annotations

import base64
import struct
import uuid
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque.errors import EngineError
from toque.serve.failures import FailedCall, from_refusal, shutting_down
from toque.serve.frontend import Call
from toque.serve.prepare import check_names
from toque.serve.prompts import (
    PROMPT_COST_CHARS,
    check_fits,
    check_sequences,
    check_total,
    prompt_list,
    truncated,
)
from toque.serve.schema import EmbeddingBody
from toque.serve.service import Service, TextTokenizer, check_ids
from toque.serve.sse import open_call, send_json
from toque.types import (
    Event,
    Finished,
    FinishReason,
    Hello,
    Pooling,
    PromptVector,
    Refused,
    Request,
    SamplingParams,
)

# Nothing is generated: the choice of a token has no part in it.
_READ_ONLY = SamplingParams(max_tokens=0, temperature=0.0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """One HTTP call, ready for the engine: one request for each input, in their order."""

    id: str
    model: str
    requests: tuple[Request, ...]
    as_base64: bool
    client_id: str | None


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(msgspec.Struct):
    index: int
    embedding: tuple[float, ...] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingAnswer(msgspec.Struct):
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


async def embedding_job(service: Service, body: EmbeddingBody, arrived_s: float) -> EmbeddingJob:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    hello, tokenizer = service.require_ready()
    model = service.model_name(hello, body.model)
    check_names(service, body)
    name = uuid.uuid4().hex
    requests = tuple(
        Request(
            id=f"{name}-{number}",
            prompt=tokens,
            sampling=_READ_ONLY,
            arrived_s=arrived_s,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            pooling=Pooling(body.pooling or "last"),
        )
        for number, tokens in enumerate(await _inputs(service, hello, tokenizer, body))
    )
    as_base64 = body.encoding_format == "base64"
    return EmbeddingJob(
        id=f"embd-{body.request_id or uuid.uuid4().hex}",
        model=model,
        requests=requests,
        as_base64=as_base64,
        client_id=body.request_id,
    )


async def _inputs(
    service: Service, hello: Hello, tokenizer: TextTokenizer, body: EmbeddingBody
) -> list[tuple[int, ...]]:
    """The tokens of each input. Raises RequestError, FailedCall."""
    inputs = prompt_list(body.input, "input")
    check_sequences(service, len(inputs), 1, "input")
    special = body.add_special_tokens is not False

    def encode(given: str | list[int]) -> tuple[int, ...]:
        if isinstance(given, str):
            tokens = tuple(tokenizer.encode(given, add_special_tokens=special))
        else:
            check_ids(given, hello.vocab_size, "input")
            tokens = tuple(given)
        return truncated(tokens, hello, body, 1)

    size_chars = sum(len(given) + PROMPT_COST_CHARS for given in inputs)
    encoded = await service.text_work(size_chars, lambda: [encode(given) for given in inputs])
    for tokens in encoded:
        check_fits(tokens, hello, "input")
    check_total([len(tokens) for tokens in encoded], 1, "input")
    return encoded


class EmbeddingResponse(Response):
    """Submits the job when it is sent, and answers when the last vector is here."""

    def __init__(self, service: Service, job: EmbeddingJob) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._vectors: dict[str, bytes] = {}  # by request id
        self._unfinished = {request.id for request in job.requests}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises FailedCall, EngineError: before anything was sent, for the error handlers."""
        job = self._job
        names = (job.id, job.client_id)
        async with open_call(self._service, names, job.requests, scope, receive) as call:
            await self._collect(call)
            numbers = sum(len(vector) for vector in self._vectors.values()) // 4
            await send_json(send, await self._service.text_work(numbers, self._written))

    async def _collect(self, call: Call) -> None:
        while self._unfinished:
            for event in await call.take():
                self._feed(event)

    def _feed(self, event: Event) -> None:
        """Raises EngineError: an input failed. FailedCall: it was refused, or shutdown came."""
        match event:
            case PromptVector():
                self._vectors[event.id] = event.vector
            case Refused():
                raise FailedCall(from_refusal(event))
            case Finished():
                if event.reason is FinishReason.ERROR:
                    raise EngineError(event.error or "the engine could not finish this request")
                if event.reason is FinishReason.ABORT:
                    raise FailedCall(shutting_down())
                self._unfinished.discard(event.id)

    def _written(self) -> bytes:
        job = self._job
        data = [
            EmbeddingEntry(number, self._shown(self._vectors[request.id]))
            for number, request in enumerate(job.requests)
        ]
        tokens = sum(len(request.prompt) for request in job.requests)
        return msgspec.json.encode(EmbeddingAnswer(data, job.model, EmbeddingUsage(tokens, tokens)))

    def _shown(self, vector: bytes) -> tuple[float, ...] | str:
        if self._job.as_base64:
            return base64.b64encode(vector).decode()
        return struct.unpack(f"<{len(vector) // 4}f", vector)
