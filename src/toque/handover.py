"""What engines that share work say to each other, through the server. See `disagg/`.

Owns: nothing. Knows: pages by number, epoch and checksum. Does not know: requests, transports.

These travel beside the values of `types.py`, which exports them too: import them from there.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from toque.telemetry import Load, Wire


class PageFault(StrEnum):
    """Why a page that another engine had was not used."""

    CORRUPT = "corrupt"  # what came is not what it should be
    STALE = "stale"  # its place holds something else by now
    LATE = "late"  # it had not come when the time was over
    LOST = "lost"  # its engine cannot be reached, or left, or sent what nobody understands


class Source(Wire, frozen=True, kw_only=True):
    """Where an engine's pages can be read, in the order of preference, and what they are."""

    engine: str  # of this start of the engine: a restarted one is another source
    addresses: tuple[str, ...]  # "shm:PATH?HOST-ID", "tcp:HOST:PORT"
    layout: str  # equal layouts have equal bytes for equal tokens: fingerprint and page shape
    layer_bytes: tuple[int, ...]  # of one page in each layer
    total_pages: int

    @property
    def page_bytes(self) -> int:
        """Of all layers together."""
        return sum(self.layer_bytes)


class PageRef(Wire, frozen=True, kw_only=True):
    """One page of a source. The epoch says which use of the page is meant, the checksum what it
    holds: a page that is reused meanwhile has another epoch and, whatever happens, another sum."""

    page: int
    epoch: int
    checksum: bytes


class PagesReady(Wire, frozen=True, kw_only=True):
    """Pages first, first + 1, ... of a prefill's prompt can be read. `id`: of the Prefill, and on
    its way to who fetches them of the Fetch. `last`: there will be no more; then `pages` are all
    of those that are kept, from the first one on."""

    id: str
    first: int
    pages: tuple[PageRef, ...]
    last: bool = False


class Release(Wire, frozen=True, kw_only=True):
    """Nobody will read the pages of this prefill any more."""

    id: str


class Fetched(Wire, frozen=True, kw_only=True):
    """A fetch is over, in whatever way. Pages of the prompt by where they came from; the sum is
    what was wanted. `seconds`: from Fetch until the request could go on."""

    id: str
    cached_pages: int = 0  # were here already
    moved_pages: int = 0  # came and were what they should be
    missing_pages: int = 0  # did not come in time, or at all
    # PageFault -> pages that were asked for and not used, once for each try
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    moved_bytes: int = 0
    seconds: float = 0.0
    ended_s: float = 0.0  # the moment when the request could go on
    transport: str = ""
    timed_out: bool = False  # its deadline ended it


class Kept(Wire, frozen=True, kw_only=True):
    """What an engine keeps for others now, and what became of it and of what came too late: totals
    since its start, which never decrease."""

    leases: int = 0  # prompts whose pages are kept
    oldest_lease_s: float = 0.0  # age
    released: int = 0  # leases that their readers ended
    expired: int = 0  # leases that nobody ended in time
    discarded_pages: int = 0  # came when nobody wanted them any more
    rejected_peers: int = 0  # connections without the secret, or with nonsense


class EngineState(Wire, frozen=True, kw_only=True):
    """One engine of several, as the server sees it."""

    index: int
    role: str  # both, prefill or decode
    alive: bool
    starting: bool = False  # its process is there and has not said hello
    restarts: int = 0
    open_requests: int = 0  # it answers, or computes the prompt of
    computed_tokens: int = 0  # over all its starts
    load: Load = Load()
    kept: Kept = Kept()  # its totals are of all starts


# Of a request that takes pages of another engine: none is announced yet; they travel; it may go on.
FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


class Transfers(Wire, frozen=True, kw_only=True):
    """Totals of pages that travelled since the server's start; they never decrease."""

    moved_pages: int = 0
    moved_bytes: int = 0
    # PageFault -> pages that were asked for and not used, once for each try
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    timed_out: int = 0  # fetches that their deadline ended
    missing_pages: int = 0  # computed where they were needed instead
    cached_pages: int = 0  # needed no journey
    fetches: int = 0
    moves: int = 0  # requests that went on at another engine after theirs was lost
    seconds: float = 0.0  # over all fetches, from its order to its end


class FleetReport(Wire, frozen=True, kw_only=True):
    """Several engines behind one server: who is there, and what travelled."""

    engines: tuple[EngineState, ...]
    transfers: Transfers
    stages: dict[str, int] = msgspec.field(default_factory=dict)  # FETCH_STAGES -> open requests
    last: Fetched | None = None  # the fetch that this report is about, where it is about one
