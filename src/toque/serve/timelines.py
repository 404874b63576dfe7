"""Timelines of recent requests, and `GET /v1/requests/{id}/timeline`.

Owns: what is remembered of the last calls.
Knows: notes of the engine, verdicts, keys. Does not know: how notes are made, streams, text.

A timeline holds times and counts, never text. Its id is the answer's id, the client's request_id,
or the engine's name of one sequence, which the page shows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toque.metrics.slo import REFUSED, Pace, verdict
from toque.serve.keys import METRICS, Key
from toque.types import Finished, Note, NoteKind, Refused, Request

MOST_CALLS = 1024  # remembered, open ones included


@dataclass(frozen=True, slots=True)
class Origin:
    """Which call a sequence belongs to, and whose it is."""

    call_id: str = ""
    client_id: str | None = None
    key: Key | None = None

    @property
    def label(self) -> str:
        return "none" if self.key is None else self.key.label


NOBODY = Origin()


@dataclass(slots=True)
class Story:
    """What is known of one sequence."""

    request: Request
    pace: Pace
    end: Finished | Refused | None = None
    notes: tuple[Note, ...] = ()  # the engine's last answer, while it is open

    def told(self) -> dict[str, Any]:
        """As JSON: milliseconds after arrival."""
        request, end = self.request, self.end
        facts: dict[str, Any] = {
            "id": request.id,
            "choice": request.choice,
            "state": "open" if end is None else "ended",
            "prompt_tokens": len(request.prompt),
            "max_tokens": request.sampling.max_tokens,
            "slo": self._slo(),
            "cached_tokens": self._cached_tokens(),
            "ttft_ms": _ms(self.pace.first_s),
            "events": [self._event(note) for note in self.all_notes()],
            "waited_ms": self._waited_ms(),
        }
        if parts := handover_parts_s(self.all_notes(), request.arrived_s, self.pace.first_s):
            facts["handover_ms"] = {name: _ms(part_s) for name, part_s in parts.items()}
        if isinstance(end, Refused):
            return {**facts, "finish_reason": "refused", "error": end.message,
                    "cause": end.cause.value}  # fmt: skip
        if end is not None:
            facts |= {
                "finish_reason": end.reason.value,
                "error": end.error,
                "completion_tokens": end.usage.completion_tokens,
                "total_ms": self._after_ms(end.times.finished_s),
            }
        return facts

    def all_notes(self) -> tuple[Note, ...]:
        return self.end.timeline if isinstance(self.end, Finished) else self.notes

    def _slo(self) -> dict[str, Any] | None:
        slo, end = self.request.slo, self.end
        if slo is None:
            return None
        word: str | None = REFUSED if isinstance(end, Refused) else None
        missed: tuple[str, ...] = ()
        if isinstance(end, Finished):
            word, missed = verdict(self.pace, end)
        return {
            "class": slo.name,
            "ttft_ms": _ms(slo.ttft_s),
            "itl_ms": _ms(slo.itl_s),
            "deadline_ms": _ms(slo.deadline_s),
            "verdict": word,
            "missed": list(missed),
        }

    def _cached_tokens(self) -> int | None:
        """At the first admission; None = it has not been admitted, as far as is known."""
        if isinstance(self.end, Finished):
            return self.end.usage.cached_tokens
        admitted = [note for note in self.notes if note.kind is NoteKind.ADMITTED]
        return admitted[0].tokens if admitted else None

    def _waited_ms(self) -> dict[str, float]:
        """By reason."""
        waited: dict[str, float] = {}
        for note in self.all_notes():
            if note.kind is NoteKind.WAIT:
                spent = 1e3 * (note.until_s - note.at_s)
                waited[note.reason] = round(waited.get(note.reason, 0.0) + spent, 3)
        return waited

    def _event(self, note: Note) -> dict[str, Any]:
        told: dict[str, Any] = {"kind": note.kind.value, "at_ms": self._after_ms(note.at_s)}
        if note.until_s > note.at_s:
            told["until_ms"] = self._after_ms(note.until_s)
        for name in ("step", "steps", "tokens", "reason"):
            if value := getattr(note, name):
                told[name] = value
        if note.engine >= 0:
            told["engine"] = note.engine
        return told | note.counts

    def _after_ms(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else _ms(moment_s - self.request.arrived_s)


def handover_parts_s(
    notes: Sequence[Note], arrived_s: float, ttft_s: float | None
) -> dict[str, float]:
    """Where the time to the first token went, when the prompt was computed elsewhere; the parts
    add up to it. `transfer` is what is left of it when the prompt is computed: pages of finished
    chunks travel before. `report`: until the server had the token. Empty for all others."""
    fetches = [note for note in notes if note.kind is NoteKind.FETCHED]
    if not fetches or ttft_s is None:
        return {}
    fetch = fetches[-1]
    there = [note for note in notes if note.engine != fetch.engine and note.at_s < fetch.until_s]
    here = [note for note in notes if note.engine == fetch.engine and note.at_s >= fetch.until_s]

    def first_s(of: Sequence[Note], *kinds: NoteKind) -> float:
        """0 = never."""
        return min((note.at_s for note in of if note.kind in kinds), default=0.0)

    ends_s = {
        "queued_at_prefill": first_s(there, NoteKind.CHUNK, NoteKind.FINISHED),
        "prefill": first_s(there, NoteKind.FINISHED),
        "transfer": fetch.until_s,
        "queued_at_decode": first_s(here, NoteKind.CHUNK),
        "first_step": first_s(here, NoteKind.FIRST_TOKEN),
        "report": arrived_s + ttft_s,
    }
    parts: dict[str, float] = {}
    reached_s = arrived_s
    for name, end_s in ends_s.items():
        end_s = min(max(end_s, reached_s), ends_s["report"])
        parts[name], reached_s = end_s - reached_s, end_s
    return parts


@dataclass(slots=True)
class CallStory:
    origin: Origin
    arrived_unix_s: float
    stories: list[Story] = field(default_factory=list)

    def seen_by(self, key: Key | None) -> bool:
        """Its own key's, and those that see the whole server's numbers. None: keys are off."""
        if key is None or METRICS in key.scopes:
            return True
        return self.origin.key is not None and self.origin.key.digest == key.digest

    def open_ids(self) -> list[str]:
        return [story.request.id for story in self.stories if story.end is None]

    def told(self) -> dict[str, Any]:
        return {
            "id": self.origin.call_id,
            "object": "request.timeline",
            "request_id": self.origin.client_id,
            "arrived": round(self.arrived_unix_s, 6),
            "sequences": [story.told() for story in self.stories],
        }


class Timelines:
    """The last MOST_CALLS calls, by each of their names."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, CallStory] = OrderedDict()
        self._by_name: dict[str, int] = {}
        self._stories: dict[str, Story] = {}
        self._next = 0

    def opened(self, origin: Origin, paces: list[Pace]) -> None:
        number, self._next = self._next, self._next + 1
        ago_s = time.monotonic() - paces[0].request.arrived_s if paces else 0.0
        call = self._calls[number] = CallStory(origin, time.time() - ago_s)
        for pace in paces:
            story = Story(pace.request, pace)
            call.stories.append(story)
            self._stories[pace.request.id] = story
        for name in self._names(call):
            self._by_name[name] = number
        while len(self._calls) > MOST_CALLS:
            self._forget()

    def _names(self, call: CallStory) -> list[str]:
        own = (call.origin.call_id, call.origin.client_id)
        return [name for name in (*own, *(s.request.id for s in call.stories)) if name]

    def _forget(self) -> None:
        number, call = self._calls.popitem(last=False)
        for story in call.stories:
            self._stories.pop(story.request.id, None)
        for name in self._names(call):
            if self._by_name.get(name) == number:  # a request_id may name a later call by now
                del self._by_name[name]

    def ended(self, event: Finished | Refused) -> None:
        story = self._stories.get(event.id)
        if story is not None:
            story.end, story.notes = event, ()

    def explained(self, request_id: str, notes: tuple[Note, ...]) -> None:
        """The engine's answer for a sequence that was open when it was asked."""
        story = self._stories.get(request_id)
        if story is not None and story.end is None and notes:
            story.notes = notes

    def find(self, name: str, key: Key | None) -> CallStory | None:
        """None: unknown, forgotten, or not for this key's eyes."""
        number = self._by_name.get(name)
        call = None if number is None else self._calls[number]
        return call if call is not None and call.seen_by(key) else None

    def last(self, most: int) -> list[CallStory]:
        """The latest calls, newest first."""
        numbers = list(reversed(self._calls))[:most]
        return [self._calls[number] for number in numbers]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
