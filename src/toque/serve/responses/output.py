"""An answer's parts as output items, and the events that tell of each as it grows.

Owns: the items of one response. Knows: OpenAI's items and the order of their events.
Does not know: bytes, the frame around them.

One builder serves both ways of answering: a whole response is its items, a stream is its events.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toque.serve.chat_answers import call_id
from toque.serve.tools.parts import Kind, Part

Json = dict[str, Any]
Tell = Callable[[str, Json], None]  # the event's type and what it says
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PART_TYPE = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True)
class _Open:
    kind: str
    index: int
    body: Json
    text: list[str] = field(default_factory=list)


class OutputItems:
    def __init__(self, tell: Tell, short_call_ids: bool = False) -> None:
        self.items: list[Json] = []
        self.warnings: list[str] = []
        self._tell = tell
        self._short_call_ids = short_call_ids
        self._open: _Open | None = None

    def take(self, part: Part) -> None:
        match part.kind:
            case Kind.TEXT:
                self._grow("message", part.text)
            case Kind.REASONING:
                self._grow("reasoning", part.text)
            case Kind.CALL:
                self._begin("function_call", name=part.text)
            case Kind.ARGUMENTS:
                self._grow("function_call", part.text)
            case Kind.CALL_END:
                self._end("completed")
            case Kind.WARNING:
                self.warnings.append(part.text)

    def finish(self, complete: bool) -> None:
        """The answer is over; an item that it cut is incomplete. No item is an empty text."""
        if not self.items and complete:
            self._begin("message")
        self._end("completed" if complete else "incomplete")

    def _grow(self, kind: str, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            text = text.lstrip() if self.items else text  # blanks between items are nobody's
            self._begin(kind)
        item = self._open
        assert item is not None
        item.text.append(text)
        if kind == "function_call":
            self._say("response.function_call_arguments.delta", delta=text)
        elif kind == "reasoning":
            self._say("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            self._say("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _begin(self, kind: str, name: str = "") -> None:
        # Only a call can be left open by what comes next: its arguments were broken.
        broken = self._open is not None and self._open.kind == "function_call"
        self._end("incomplete" if broken else "completed")
        body: Json = {"id": f"{_PREFIX[kind]}_{secrets.token_hex(16)}", "type": kind}
        body["status"] = "in_progress"
        if kind == "message":
            body |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            body |= {"summary": [], "content": []}
        else:
            body |= {"call_id": call_id(self._short_call_ids), "name": name, "arguments": ""}
        self._open = _Open(kind, len(self.items), body)
        self.items.append(body)
        self._tell(
            "response.output_item.added", {"output_index": self._open.index, "item": dict(body)}
        )
        if kind in _PART_TYPE:
            self._say("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _end(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        text = "".join(item.text)
        if item.kind == "function_call":
            item.body["arguments"] = text
            self._say(
                "response.function_call_arguments.done", name=item.body["name"], arguments=text
            )
        else:
            part = _part(item.kind, text)
            item.body["content"] = [part]
            if item.kind == "message":
                self._say("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                self._say("response.reasoning_text.done", content_index=0, text=text)
            self._say("response.content_part.done", content_index=0, part=part)
        item.body["status"] = status
        self._open = None
        self._tell("response.output_item.done", {"output_index": item.index, "item": item.body})

    def _say(self, event: str, **what: Any) -> None:
        item = self._open
        assert item is not None
        self._tell(event, {"item_id": item.body["id"], "output_index": item.index, **what})


def _part(kind: str, text: str) -> Json:
    part: Json = {"type": _PART_TYPE[kind], "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
