"""The engine's door: a request with a grammar enters when that is compiled.

Owns: requests that wait for their grammar. Knows: the engine's port, Grammars.
Does not know: the scheduler. Compiling is a thread's work: everybody else goes on meanwhile.

It stands around the engine's port, so the loop and the scheduler know of no grammars: to them such
a request arrives a moment later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from toque.ipc import EnginePort
from toque.structured.grammars import Grammars
from toque.types import (
    Abort,
    Finished,
    FromEngine,
    Refused,
    Request,
    Shutdown,
    Spellings,
    StepReport,
    ToEngine,
)

POLL_S = 0.002  # how often an engine without work looks whether a grammar is ready


@dataclass(slots=True)
class _Held:
    request: Request
    compiled: Future[Any] | None = None  # None: no room for another grammar yet


class Gate:
    """An EnginePort around another."""

    def __init__(self, port: EnginePort, grammars: Grammars) -> None:
        self._port = port
        self._grammars = grammars
        self._held: dict[str, _Held] = {}  # in order of arrival

    def receive(self, wait_s: float) -> list[ToEngine]:
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            come = self._port.receive(min(left_s, POLL_S) if self._held else left_s)
            entered = [entering for message in come for entering in self._sort(message)]
            entered += self._ready()
            if entered or come or left_s == 0.0:
                return entered

    def _sort(self, message: ToEngine) -> Iterator[ToEngine]:
        """What of a message enters now. An end comes after what it ends."""
        match message:
            case Spellings():
                self._grammars.learn(message)
            case Request(grammar=grammar) if grammar is not None:
                self._held[message.id] = _Held(message)
            case Abort() if message.id in self._held:
                yield self._held.pop(message.id).request
                yield message
            case Shutdown():
                yield from [held.request for held in self._held.values()]
                self._held.clear()
                yield message
            case _:
                yield message

    def _ready(self) -> list[ToEngine]:
        """Those whose grammar is compiled; also where that failed: their row will say so."""
        entered: list[ToEngine] = []
        for held in list(self._held.values()):
            request = held.request
            assert request.grammar is not None
            if held.compiled is None and self._grammars.has_room(request.grammar):
                held.compiled = self._grammars.take(request.id, request.grammar)
            if held.compiled is not None and held.compiled.done():
                del self._held[request.id]
                entered.append(request)
        return entered

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            for event in message.events:
                if isinstance(event, Finished | Refused):
                    self._grammars.release(event.id)
        self._port.send(message)

    def close(self) -> None:
        self._port.close()
