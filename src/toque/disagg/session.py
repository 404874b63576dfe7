"""What a server and an engine on another host say to each other beside the channel's messages.

Owns: the words of a session, how its keys come from the secret, how times get from one clock to
the other. Knows: messages with times in them. Does not know: sockets, when a session ends.

A session is one server's use of one engine. It begins with Join, and everything of an engine that
came before it, or after its end, belongs to no one. Both ends prove that they know the secret by
CURVE (RFC 26 of ZeroMQ), which also encrypts: both pairs of keys are made of the secret, and who
does not know the engine's public key cannot even say hello to it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq
from msgspec import structs
from zmq.utils import z85

from toque.telemetry import Note, Wire
from toque.types import (
    Event,
    Fetch,
    Fetched,
    Finished,
    FromEngine,
    Prefill,
    Request,
    Snapshot,
    StepReport,
    Timeline,
    Times,
    ToEngine,
)

PING_S = 1.0  # how often a server says that it is there
SILENT_S = 10.0  # an end that is silent for so long is taken for dead by the other
CLOCK_SAMPLES = 32


class Join(Wire, frozen=True, kw_only=True):
    """A server wants this engine; versions must be equal, since messages are not versioned."""

    server: str  # its name; what it left behind in an earlier session ends with this one
    version: str
    now_s: float  # of the server's clock


class Ping(Wire, frozen=True, kw_only=True):
    now_s: float


class Pong(Wire, frozen=True, kw_only=True):
    """The answer to Join and Ping, at the end of the engine's step."""

    asked_s: float  # of the server's clock
    now_s: float  # of the engine's


class Busy(Wire, frozen=True):
    """Another server has this engine."""


ToRemote = ToEngine | Join | Ping
FromRemote = FromEngine | Pong | Busy


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys of one end, and the public one of the other; Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes
    other: bytes

    def put_on(self, socket: zmq.Socket[Any], *, engine: bool) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        if engine:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.other)


def keys(secret: bytes, *, engine: bool) -> Keys:
    """`secret`: 32 bytes that both ends know."""
    pairs = {}
    for name in (b"engine", b"server"):
        drawn = hashlib.blake2b(name, key=secret, digest_size=32, person=b"toque-session").digest()
        private = z85.encode(drawn)
        pairs[name] = (zmq.curve_public(private), private)
    mine, other = (b"engine", b"server") if engine else (b"server", b"engine")
    return Keys(*pairs[mine], other=pairs[other][0])


class ClockOffset:
    """How far the engine's clock is ahead of the server's, seconds, from questions and answers.

    An answer that came quickly tells it to half the time that it took; one that waited for a step
    to end tells little. So the quickest of the last ones counts (as in NTP, RFC 5905, 10)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=CLOCK_SAMPLES)

    def learn(self, pong: Pong, now_s: float) -> None:
        took_s = now_s - pong.asked_s
        self._samples.append((took_s, pong.now_s - (pong.asked_s + now_s) / 2))

    @property
    def ahead_s(self) -> float:
        return min(self._samples)[1] if self._samples else 0.0


# ------------------------------------------------------------------------------------ two clocks


def to_engine_clock(message: ToEngine, ahead_s: float) -> ToEngine:
    match message:
        case Request():
            return structs.replace(message, arrived_s=message.arrived_s + ahead_s)
        case Fetch() | Prefill():
            request = to_engine_clock(message.request, ahead_s)
            return structs.replace(message, request=request)
    return message


def to_server_clock(message: FromEngine, ahead_s: float) -> FromEngine:
    match message:
        case StepReport():
            events = tuple(_event(event, ahead_s) for event in message.events)
            return structs.replace(message, events=events)
        case Timeline():
            return structs.replace(message, notes=_notes(message.notes, ahead_s))
        case Fetched():
            return structs.replace(message, ended_s=message.ended_s - ahead_s)
        case Snapshot():
            lanes = tuple(
                structs.replace(lane, arrived_s=lane.arrived_s - ahead_s) for lane in message.lanes
            )
            return structs.replace(message, lanes=lanes)
    return message


def _event(event: Event, ahead_s: float) -> Event:
    if not isinstance(event, Finished):
        return event
    moments: dict[str, Any] = {
        name: None if (at_s := getattr(event.times, name)) is None else at_s - ahead_s
        for name in Times.__struct_fields__
    }
    return structs.replace(event, times=Times(**moments), timeline=_notes(event.timeline, ahead_s))


def _notes(notes: tuple[Note, ...], ahead_s: float) -> tuple[Note, ...]:
    return tuple(
        structs.replace(note, at_s=note.at_s - ahead_s, until_s=note.until_s - ahead_s)
        for note in notes
    )
