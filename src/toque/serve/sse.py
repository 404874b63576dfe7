"""One HTTP answer to a generation call: whole JSON or server-sent events.

Owns: the answer's progress. Knows: ASGI, Call, Writer. Does not know: the shapes it sends.

The status line waits for the engine's first event, so a refusal is still a status code. A failure
after that is a last, typed event, `data: {"error": …}`, and then `data: [DONE]`. No task per token:
one task per call watches for the client's disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toque.errors import EngineError
from toque.serve.answers import Writer, Writing
from toque.serve.choice import Choice, choices_of
from toque.serve.edge import OUTCOME
from toque.serve.failures import FailedCall, Failure, cause_of, describe
from toque.serve.frontend import Call, ClientGone
from toque.serve.keys import key_of
from toque.serve.prepare import Job
from toque.serve.service import Service
from toque.serve.timelines import Origin
from toque.types import FinishReason, Request

log = logging.getLogger("toque.serve")

Header = tuple[bytes, bytes]
SCORE_CHARS = 64  # a prompt token's logprobs take about as long to write as so much text to read
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind must not hold events back
)


class GenerationResponse(Response):
    """Submits the job when it is sent, and answers from its events."""

    def __init__(self, service: Service, job: Job, writer: Writing | None = None) -> None:
        super().__init__()
        hello, tokenizer = service.require_ready()
        self._service = service
        self._job = job
        self._writer: Writing = writer or Writer(job, tokenizer, hello.fingerprint)
        self._choices = choices_of(job, tokenizer)
        self._by_id = {choice.id: choice for choice in self._choices}
        self._own_headers = [(b"toque-seed", str(job.sampling.seed).encode())]
        if job.cut_to_tokens is not None:
            self._own_headers.append((b"toque-max-tokens", str(job.cut_to_tokens).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises FailedCall, EngineError: before anything was sent, for the error handlers."""
        job = self._job
        names = (job.id, job.client_id)
        async with open_call(self._service, names, job.requests, scope, receive) as call:
            if job.stream:
                await self._stream(call, send, scope[OUTCOME])
            else:
                await self._whole(call, send)

    async def _whole(self, call: Call, send: Send) -> None:
        while not self._settled():
            await self._feed(call)
        body = await self._written(lambda: self._writer.whole(self._choices))
        await send_json(send, body, self._own_headers)

    async def _stream(self, call: Call, send: Send, told: dict[str, str]) -> None:
        touched = await self._feed(call)  # may raise: then the answer is a status code
        while not self._can_open():
            touched |= await self._feed(call)
        headers = [*_SSE_HEADERS, *self._own_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            opening = await self._written(lambda: self._writer.opening(self._choices))
            await _send_part(send, opening + self._chunks(touched))
            while not self._told():
                await _send_part(send, self._chunks(await self._feed(call)))
            last = self._writer.usage(self._choices) if self._wants_usage else b""
        except ClientGone:
            raise
        except (FailedCall, EngineError) as error:
            # What came together with the failure has not been told yet.
            open_ones = {i: c for i, c in self._by_id.items() if c.finish_reason is None}
            last = self._chunks(open_ones) + self._failed(describe(error), told)
        except Exception as error:
            log.exception("a stream failed")
            last = self._failed(describe(error), told)
        await send(
            {"type": "http.response.body", "body": last + self._writer.done, "more_body": False}
        )

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        """Thousands of scored tokens are written in a thread, so that other streams go on."""
        scores = sum(len(choice.scores) for choice in self._choices)
        return await self._service.text_work(SCORE_CHARS * scores, write)

    def _failed(self, failure: Failure, told: dict[str, str]) -> bytes:
        told["outcome"], told["cause"] = "failed", cause_of(failure.status, failure.code)
        self._service.metrics.refused(failure.status)
        return self._writer.failed(failure)

    # ---------------------------------------------------------------------------------- progress

    @property
    def _wants_usage(self) -> bool:
        return bool(self._job.options.include_usage)

    def _told(self) -> bool:
        """Whether nothing is left to wait for; usage comes with the engine's own end."""
        if self._wants_usage:
            return self._settled()
        return all(choice.finish_reason is not None for choice in self._choices)

    def _settled(self) -> bool:
        return all(choice.usage is not None for choice in self._choices)

    def _can_open(self) -> bool:
        """No event before the first token; with an echoed prompt's logprobs, all of those first."""
        if self._job.show.echo_logprobs is None:
            return any(choice.begun for choice in self._choices)
        return all(choice.can_open for choice in self._choices)

    async def _feed(self, call: Call) -> dict[str, Choice]:
        """Wait for events and take them in; the choices that they touched, in order, by id."""
        touched: dict[str, Choice] = {}
        for event in await call.take():
            choice = self._by_id[event.id]
            was_open = choice.finish_reason is None
            if was_open:
                touched[event.id] = choice
            if choice.feed(event):
                kept_tokens = choice.completion_tokens
                self._service.client.abort(event.id, FinishReason.STOP, kept_tokens)
            if was_open and choice.finish_reason is not None and self._job.form.tools is not None:
                self._service.metrics.tools_read(self._job.stream, self._job.kind, choice.called)
        return touched

    def _chunks(self, choices: dict[str, Choice]) -> bytes:
        return b"".join([self._writer.chunks(choice) for choice in choices.values()])


async def send_json(send: Send, body: bytes, own_headers: Sequence[Header] = ()) -> None:
    """A whole answer."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *own_headers,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def open_call(
    service: Service,
    names: tuple[str, str | None],  # of the call: its own, and the client's where it gave one
    requests: Sequence[Request],
    scope: Scope,
    receive: Receive,
) -> AsyncIterator[Call]:
    """The engine's answers to `requests`, while the client is there: leaving the block aborts what
    is unfinished, and a ClientGone in it ends here."""
    peer = scope["client"]
    origin = Origin(*names, key_of(scope))
    with (
        service.open_ids.held(names[1]),
        service.client.submit(requests, lambda: service.connections.cut(peer), origin) as call,
    ):
        async with _watching(receive, call):
            try:
                yield call
            except ClientGone:
                scope[OUTCOME]["outcome"] = "cancelled"


@asynccontextmanager
async def _watching(receive: Receive, call: Call) -> AsyncIterator[None]:
    """While the block runs, a disconnect of the client ends the call's `take` at once."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.fail(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
