"""An engine that shares work: a port around the channel that takes out what is about pages.

Owns: nothing but its collaborators. Knows: which message goes to whom.
Does not know: the engine's loop, the scheduler, routing.

The loop sees an EnginePort and requests, as always. Whether the engine computes prompts for others,
takes pages from others or both is decided by the messages that it gets, so a role is the router's
choice and not a state of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import structs

from toque.disagg.exporter import Exporter
from toque.disagg.importer import Importer
from toque.disagg.transport import Listener
from toque.ipc import EnginePort
from toque.types import (
    Abort,
    Event,
    Fetch,
    Finished,
    FinishReason,
    FromEngine,
    Kept,
    PagesReady,
    Prefill,
    Release,
    StepReport,
    ToEngine,
)

LOOK_S = 0.002  # how often an engine that waits for pages looks whether they came


class RolePort:
    """The EnginePort of an engine whose pages others may have, and that may have others'."""

    def __init__(
        self,
        port: EnginePort,
        exporter: Exporter,
        importer: Importer,
        listeners: tuple[Listener, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._exporter = exporter
        self._importer = importer
        self._listeners = listeners
        self._clock = clock
        self._prefills: set[str] = set()  # running for others: their ends are no client's
        self._told_kept = Kept()

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Requests and what else the loop understands. Returns after `wait_s` at the latest, and
        at once when pages have come that let a request go on."""
        until_s = self._clock() + wait_s
        while True:
            self._exporter.expire(self._clock())
            left_s = max(0.0, until_s - self._clock())
            messages = self._port.receive(min(left_s, LOOK_S) if self._importer.busy else left_s)
            out: list[ToEngine] = []
            for message in messages:
                out += self._sort(message)
            requests, told = self._importer.poll()
            for fetched in told:
                self._port.send(fetched)
            self._tell_kept()
            out += requests
            if out or messages or self._clock() >= until_s:
                return out

    def _sort(self, message: ToEngine) -> list[ToEngine]:
        """What the loop is to see of a message."""
        match message:
            case Prefill():
                self._prefills.add(message.request.id)
                return [self._exporter.begin(message)]
            case Release():
                self._exporter.release(message.id)
                return [Abort(id=message.id)] if message.id in self._prefills else []
            case Fetch():
                self._importer.begin(message)
                return []
            case PagesReady():
                self._importer.ready(message)
                return []
            case Abort():
                held = self._importer.abort(message.id)  # an end comes after what it ends
                return [message] if held is None else [held, message]
            case _:
                return [message]

    def send(self, message: FromEngine) -> None:
        """A report goes on, followed by what can be read now."""
        if not isinstance(message, StepReport):
            self._port.send(message)
            return
        ready = self._exporter.after_step(message.events, self._clock())
        events = tuple(self._told(event) for event in message.events)
        self._port.send(structs.replace(message, events=events))
        for pages in ready:
            if pages.last:
                self._prefills.discard(pages.id)
            self._port.send(pages)

    def _tell_kept(self) -> None:
        """Where something but an age has changed."""
        kept = structs.replace(
            self._exporter.kept(self._clock()),
            discarded_pages=self._importer.discarded_pages,
            rejected_peers=sum(listener.rejected for listener in self._listeners),
        )
        if structs.replace(kept, oldest_lease_s=self._told_kept.oldest_lease_s) != self._told_kept:
            self._told_kept = kept
            self._port.send(kept)

    def _told(self, event: Event) -> Event:
        """A prompt that was read for others to its end is handed over, not done."""
        if not isinstance(event, Finished) or event.id not in self._prefills:
            return event
        whole = event.reason is FinishReason.LENGTH
        return structs.replace(event, reason=FinishReason.HANDOFF) if whole else event

    def close(self) -> None:
        self._importer.close()
        for listener in self._listeners:
            listener.close()
        self._port.close()
