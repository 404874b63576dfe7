"""One streamed completion over HTTP/1.1: when it was sent, when each token came, how it ended.

Owns: the socket of one request. Knows: chunked bodies, server-sent events, OpenAI's chunks.
Does not know: workloads, statistics.

The client shares the machine with the server that it measures, so it does little: httptools parses
HTTP, msgspec decodes only the fields that are looked at, and there is one callback per read.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """What we read of a chunk. Servers differ in where usage comes: beside the last choice, or in
    a chunk of its own without choices."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Reply:
    """Times are of time.perf_counter(). A reply without `error` came to its regular end."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)  # arrival of each event with text
    finish_s: float | None = None  # arrival of the finish reason
    end_s: float = 0.0
    usage: Usage | None = None
    error: str | None = None

    @property
    def first_s(self) -> float | None:
        """Arrival of the first token. One whose text is held back (half a character) or empty
        shows only in the finish reason."""
        return self.token_s[0] if self.token_s else self.finish_s

    @property
    def completion_tokens(self) -> int:
        """By the server's usage; by events (one token each) where it sends none."""
        return len(self.token_s) if self.usage is None else self.usage.completion_tokens

    @property
    def counted_by(self) -> str:
        return "events" if self.usage is None else "usage"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server's OpenAI API is. `base` is the path before /completions, e.g. /v1."""

    host: str
    port: int
    base: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.base}"


def parse_url(url: str) -> Address:
    """http://host:port with or without /v1. Raises ValueError for anything but plain http."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// address")
    base = parts.path.rstrip("/")
    return Address(parts.hostname, parts.port or 80, base if base.endswith("/v1") else base + "/v1")


def get_json(url: str, timeout_s: float = 10.0) -> Any:
    """Raises OSError where there is no answer of status 200, ValueError where it is no JSON."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def request_body(model: str, prompt: Sequence[int], output_tokens: int, seed: int) -> bytes:
    """Greedy, exactly `output_tokens` long whatever the model would like to say."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body)


async def complete(address: Address, body: bytes, timeout_s: float) -> Reply:
    """Send one request on a connection of its own. Never raises: what goes wrong is in `error`."""
    loop = asyncio.get_running_loop()
    reply = Reply(sent_s=time.perf_counter())
    stream = _Stream(reply, loop.create_future())
    transport: asyncio.WriteTransport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            made, _ = await loop.create_connection(lambda: stream, address.host, address.port)
            # uvloop's transports are not of asyncio's classes, though they do the same.
            transport = cast(asyncio.WriteTransport, made)
            transport.write(_head(address, len(body)) + body)
            await stream.ended
    except TimeoutError:
        reply.error = reply.error or f"no end after {timeout_s:g} s"
    except OSError as error:
        reply.error = reply.error or f"connection: {error}"
    finally:
        if transport is not None:
            transport.close()
    reply.end_s = time.perf_counter()
    return reply


def _head(address: Address, body_bytes: int) -> bytes:
    return (
        f"POST {address.base}/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {body_bytes}\r\n"
        "Accept: text/event-stream\r\nConnection: close\r\n\r\n"
    ).encode()


class _Stream(asyncio.Protocol):
    """Feeds a Reply. The methods `on_...` are called by httptools."""

    def __init__(self, reply: Reply, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self._decoder = msgspec.json.Decoder(Chunk)
        self._rest = b""  # an event that has not come to its end
        self._now_s = 0.0
        self._done = False

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        data = self._rest + body
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._fail(f"status {status}: {self._rest[:200].decode(errors='replace')}")
        elif not self._done:
            self._fail("the stream ended without [DONE]")
        self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends with the connection: [DONE] says that it was whole.
        if not self.ended.done() and not self._done:
            self._fail(f"the connection was closed{f': {exc}' if exc else ''}")
        self._finish()

    def _event(self, event: bytes) -> None:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue  # comments and event names
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._done = True
                continue
            try:
                self._chunk(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                self._fail(f"not a completion chunk: {error}")

    def _chunk(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            self._fail(f"error event: {str(chunk.error)[:200]}")
        if chunk.usage is not None:
            self._reply.usage = chunk.usage
        for choice in chunk.choices:
            if choice.text:
                self._reply.token_s.append(self._now_s)
            if choice.finish_reason is not None:
                self._reply.finish_s = self._now_s

    def _fail(self, message: str) -> None:
        """The first failure is the one that is told."""
        self._reply.error = self._reply.error or message

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
