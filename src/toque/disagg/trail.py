"""What a request went through over several engines, as one timeline.

Owns: the notes that the engine answering now cannot have. Knows: notes, ends of fetches.
Does not know: why anything was done, who asks.

Each engine tells of a request from its arrival on, whichever engine had it then. So what one tells
counts from the moment when the request came to it; what was before is told by the others:

    computes the prompt   queued, wait, admitted, chunk ..., finished: handoff
    takes its pages       fetched: from the order to the last page, with what came and what did not
    answers               queued, wait, admitted, chunk, first_token, decode ...
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from toque.types import Fetched, FinishReason, Note, NoteKind


class Trail:
    def __init__(self, arrived_s: float) -> None:
        self._notes: list[Note] = []
        self._prompt: tuple[Note, ...] = ()  # of who computes it now
        self._since_s = arrived_s  # when it came to the engine that has it now

    def prompt(self, engine: int, notes: Iterable[Note]) -> None:
        """All that the engine computing the prompt tells of it, so far."""
        self._prompt = tuple(
            structs.replace(note, reason=FinishReason.HANDOFF)
            if note.kind is NoteKind.FINISHED and note.reason == FinishReason.LENGTH
            else note
            for note in self._of(engine, notes)
        )

    def fetched(self, engine: int, fetched: Fetched, block_size: int) -> None:
        """The request goes on at the engine that took its pages."""
        self._keep_prompt()
        counts = {
            "moved_pages": fetched.moved_pages,
            "cached_pages": fetched.cached_pages,
            "missing_pages": fetched.missing_pages,
            "moved_bytes": fetched.moved_bytes,
            **{f"{fault}_pages": pages for fault, pages in fetched.failed.items()},
        }
        self._notes.append(
            Note(
                kind=NoteKind.FETCHED,
                at_s=fetched.ended_s - fetched.seconds,
                until_s=fetched.ended_s,
                tokens=fetched.moved_pages * block_size,
                reason=fetched.transport,
                engine=engine,
                counts={name: count for name, count in counts.items() if count},
            )
        )
        self._since_s = fetched.ended_s

    def lost(self, engine: int, now_s: float) -> None:
        """The engine is gone, and with it what it could have told."""
        self._keep_prompt()
        self._notes.append(Note(NoteKind.ENGINE_LOST, now_s, now_s, engine=engine))

    def moves(self, now_s: float) -> None:
        self._since_s = now_s

    def told(self, engine: int, notes: Iterable[Note]) -> tuple[Note, ...]:
        """All of it, with what the engine that answers tells, in order of time."""
        every = [*self._notes, *self._prompt, *self._of(engine, notes)]
        return tuple(sorted(every, key=lambda note: note.at_s))

    def _keep_prompt(self) -> None:
        self._notes += self._prompt
        self._prompt = ()

    def _of(self, engine: int, notes: Iterable[Note]) -> list[Note]:
        """What counts of an engine's notes."""
        since_s = self._since_s
        return [
            structs.replace(
                note,
                at_s=max(note.at_s, since_s),
                until_s=max(note.until_s, since_s),
                engine=engine,
            )
            for note in notes
            if note.kind is not NoteKind.WAIT or note.until_s > since_s
        ]
