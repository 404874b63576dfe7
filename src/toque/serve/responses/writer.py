"""The frame around a response's items: the whole object, or its events in order.

Owns: the count of events, the items of one answer. Knows: OpenAI's Response object.
Does not know: HTTP, the engine, where responses are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from toque.serve.answers import usage_of
from toque.serve.choice import Choice
from toque.serve.failures import Failure
from toque.serve.prepare import Job
from toque.serve.responses.output import Json, OutputItems
from toque.serve.tools.parts import merged

Keep = Callable[[Json, list[Json]], None]  # the finished response and its output items


class ResponseWriter:
    """What `GenerationResponse` asks of a writer, for one choice."""

    done = b""  # a stream ends with its last event

    def __init__(self, job: Job, echoed: Json, keep: Keep) -> None:
        """`echoed`: what the response repeats of its request. `keep` is told of a finished one."""
        self._job = job
        self._echoed = echoed
        self._keep = keep
        self._encoder = msgspec.json.Encoder()
        self._next = 0
        self._out = bytearray()
        self._items = OutputItems(self._event, job.form.tools == "mistral")

    # ------------------------------------------------------------------------------------ writer

    def whole(self, choices: Sequence[Choice]) -> bytes:
        self._take(choices[0])
        self._out.clear()
        return self._encoder.encode(self._finished(choices))

    def opening(self, choices: Sequence[Choice]) -> bytes:
        for event in ("response.created", "response.in_progress"):
            self._event(event, {"response": self._frame("in_progress")})
        return self._drained()

    def chunks(self, choice: Choice) -> bytes:
        self._take(choice)
        return self._drained()

    def usage(self, choices: Sequence[Choice]) -> bytes:
        """The last event: the whole response."""
        response = self._finished(choices)
        self._event(f"response.{response['status']}", {"response": response})
        return self._drained()

    def failed(self, failure: Failure) -> bytes:
        response = self._frame("failed")
        code = failure.code or ("rate_limit_exceeded" if failure.status == 429 else "server_error")
        response["error"] = {"code": code, "message": failure.message}
        response["output"] = self._items.items
        self._event("response.failed", {"response": response})
        return self._drained()

    # ----------------------------------------------------------------------------------- content

    def _take(self, choice: Choice) -> None:
        for part in merged(choice.drain().parts):
            if self._job.show.reasoning or part.kind.value != "reasoning":
                self._items.take(part)
        if choice.finish_reason is not None:
            self._items.finish(choice.finish_reason != "length")

    def _finished(self, choices: Sequence[Choice]) -> Json:
        cut = choices[0].finish_reason == "length"
        response = self._frame("incomplete" if cut else "completed")
        response["output"] = self._items.items
        response["usage"] = self._usage(choices)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if self._items.warnings:
            response["warnings"] = self._items.warnings
        self._keep(response, self._items.items)
        return response

    def _usage(self, choices: Sequence[Choice]) -> Json:
        used = usage_of(self._job, choices)
        cached = choices[0].usage.cached_tokens if choices[0].usage else 0
        return {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choices[0].num_reasoning},
            "total_tokens": used.total_tokens,
        }

    def _frame(self, status: str) -> Json:
        job = self._job
        return {
            "id": job.id,
            "object": "response",
            "created_at": job.created_unix_s,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": job.model,
            "output": [],
            "usage": None,
            **self._echoed,
        }

    # ------------------------------------------------------------------------------------ events

    def _event(self, kind: str, what: Json) -> None:
        data: dict[str, Any] = {"type": kind, "sequence_number": self._next, **what}
        self._next += 1
        self._out += b"event: %b\ndata: %b\n\n" % (kind.encode(), self._encoder.encode(data))

    def _drained(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out
