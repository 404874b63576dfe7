"""What happened to a request, line by line, and why it waited: the timeline in the making.

Owns: one request's notes. Knows: their kinds, how many are kept. Does not know: why anything is so.

A gap between two notes is a wait, for the reason that was given last; so nobody has to note a
waiting sequence in every step. Steps that follow each other leave no gap.
"""

from __future__ import annotations

from toque.types import Note, NoteKind, WaitReason

MOST_NOTES = 48  # then one line says what came after; the end has a line of its own
_SPANS = frozenset({NoteKind.WAIT, NoteKind.DECODE, NoteKind.MORE})  # equal neighbours are one note


class Diary:
    __slots__ = ("_notes", "_step", "_until_s", "waits")

    def __init__(self, arrived_s: float) -> None:
        self._notes: list[Note] = [Note(NoteKind.QUEUED, arrived_s, arrived_s)]
        self._until_s = arrived_s
        self._step = -1  # the step of the last note that has one
        self.waits = WaitReason.STEP

    def wait(self, reason: WaitReason, now_s: float) -> None:
        """From now on it waits for this reason."""
        if reason is not self.waits:
            self._close_gap(now_s)
            self.waits = reason

    def add(
        self, kind: NoteKind, at_s: float, step: int = 0, tokens: int = 0, reason: str = ""
    ) -> None:
        """Something that takes no time."""
        self._close_gap(at_s)
        self._keep(Note(kind, at_s, at_s, step, 0, tokens, reason))

    def computed(
        self, kind: NoteKind, began_s: float, until_s: float, step: int, tokens: int
    ) -> None:
        """A chunk, or one token of decoding."""
        if step != self._step + 1:
            self._close_gap(began_s)
        self._step = step
        self._keep(Note(kind, began_s, until_s, step, 1, tokens))
        self.waits = WaitReason.BUDGET

    def notes(self) -> tuple[Note, ...]:
        return tuple(self._notes)

    def _close_gap(self, now_s: float) -> None:
        if now_s > self._until_s:
            self._keep(Note(NoteKind.WAIT, self._until_s, now_s, reason=self.waits))

    def _keep(self, note: Note) -> None:
        self._until_s = max(self._until_s, note.until_s)
        last = self._notes[-1]
        if len(self._notes) >= MOST_NOTES and note.kind is not NoteKind.FINISHED:
            note = Note(NoteKind.MORE, note.at_s, note.until_s, note.step, note.steps, note.tokens)
        if note.kind in _SPANS and (last.kind, last.reason) == (note.kind, note.reason):
            self._notes[-1] = Note(
                last.kind,
                last.at_s,
                note.until_s,
                last.step,
                last.steps + note.steps,
                last.tokens + note.tokens,
                last.reason,
            )
        else:
            self._notes.append(note)
