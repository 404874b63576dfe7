"""Pages over TCP: always there, and the only way between two hosts.

Owns: a listening socket and its threads (PageServer), one connection (TcpPeer).
Knows: the frames below. Does not know: trees, requests, who may read which page: whoever knows the
secret may read all.

    server -> client   challenge                     32 random bytes
    client -> server   challenge, proof              32 random bytes, 32 bytes: keyed BLAKE2b of
                                                     both challenges
    server -> client   proof                         the same for the server, over them reversed
    client -> server   n, then n x (page, epoch)     u32; u32 and u64 each, at most MOST_PAGES
    server -> client   n x (state, bytes)            u8: 0 = [page_bytes] follow, 1 = gone

All numbers are little-endian. Whatever does not fit these frames closes the connection and is
counted. The proof is of knowing the secret, not a cipher: pages travel in the clear, so a link
that others can listen to needs a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from toque.disagg.transport import Bytes, PoolView, TransferError
from toque.types import PageFault, PageRef

log = logging.getLogger(__name__)

SCHEME = "tcp:"
MOST_PAGES = 4096  # of one request
CHALLENGE_BYTES = PROOF_BYTES = 32
HELLO_S = 5.0  # what a stranger gets to prove himself
CONNECT_S = 3.0
COUNT, PAGE = struct.Struct("<I"), struct.Struct("<IQ")
HERE, GONE = b"\0", b"\1"


def _proof(secret: bytes, first: bytes, second: bytes) -> bytes:
    return hashlib.blake2b(first + second, key=secret, digest_size=PROOF_BYTES).digest()


class PageServer:
    """Serves a pool's pages to peers, each in a thread; pages are read where they lie."""

    def __init__(self, pool: PoolView, secret: bytes, host: str = "127.0.0.1") -> None:
        self._pool = pool
        self._secret = secret
        self._host = host
        self._listening = socket.create_server((host, 0))
        self._open: set[socket.socket] = set()
        self.rejected = 0  # connections that did not know the secret or sent something else
        threading.Thread(target=self._accept, name="pages", daemon=True).start()

    @property
    def address(self) -> str:
        return f"{SCHEME}{self._host}:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        end(self._listening)
        for connection in list(self._open):
            end(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(HELLO_S)
                if not self._welcome(connection):
                    self.rejected += 1
                    return
                connection.settimeout(None)
                while self._answer(connection):
                    pass
        except OSError:
            pass  # the peer left, or never said a word
        except ValueError as error:
            self.rejected += 1
            log.warning("a peer sent what is no request for pages: %s", error)
        finally:
            self._open.discard(connection)

    def _welcome(self, connection: socket.socket) -> bool:
        ours = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(ours)
        theirs = receive(connection, CHALLENGE_BYTES)
        if not hmac.compare_digest(
            receive(connection, PROOF_BYTES), _proof(self._secret, ours, theirs)
        ):
            return False
        connection.sendall(_proof(self._secret, theirs, ours))
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """One request for pages; false when the peer is done. Raises ValueError for nonsense."""
        first = connection.recv(COUNT.size)
        if not first:
            return False
        (count,) = COUNT.unpack(first + receive(connection, COUNT.size - len(first)))
        if not 0 < count <= MOST_PAGES:
            raise ValueError(f"{count} pages at once")
        wanted = list(PAGE.iter_unpack(receive(connection, count * PAGE.size)))
        row = np.empty(self._pool.page_bytes, dtype=np.uint8)
        for page, epoch in wanted:
            if page >= self._pool.total_pages:
                raise ValueError(f"page {page} of {self._pool.total_pages}")
            if self._pool.epochs[page] != epoch:
                connection.sendall(GONE)
                continue
            self._pool.gather(page, row)  # the epoch is not read again: the checksum decides
            connection.sendall(HERE)
            connection.sendall(row.data)
        return True


def end(connection: socket.socket) -> None:
    """Closed alone, it would go on for whoever waits at it in another thread."""
    with suppress(OSError):  # the other end was faster
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises ConnectionError (an OSError) when the peer ends before."""
    data = bytearray(count)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]


class TcpPeer:
    """A pool behind an address. Connects at the first pull; a failed pull drops the connection."""

    name = "tcp"

    def __init__(self, address: str, secret: bytes) -> None:
        host, _, port = address.removeprefix(SCHEME).rpartition(":")
        self._where = (host, int(port))
        self._secret = secret
        self._connection: socket.socket | None = None

    def pull(self, refs: Sequence[PageRef], out: Bytes, deadline_s: float) -> None:
        """In portions of MOST_PAGES, so that any number of pages may be asked for."""
        try:
            connection = self._connection or self._connect(deadline_s)
            for begin in range(0, len(refs), MOST_PAGES):
                self._pull(
                    connection,
                    refs[begin : begin + MOST_PAGES],
                    out[begin : begin + MOST_PAGES],
                    deadline_s,
                )
        except (OSError, TransferError) as error:
            self.close()  # what is still under way would be taken for the next pull's answer
            raise TransferError(f"the pages did not come: {error}", _fault(error)) from error

    def _connect(self, deadline_s: float) -> socket.socket:
        timeout_s = min(CONNECT_S, _left_s(deadline_s))
        connection = socket.create_connection(self._where, timeout=timeout_s)
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive(connection, CHALLENGE_BYTES)
        ours = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(ours + _proof(self._secret, theirs, ours))
        answer = receive(connection, PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(self._secret, ours, theirs)):
            raise TransferError("the peer does not know the secret")
        return connection

    def _pull(
        self, connection: socket.socket, refs: Sequence[PageRef], out: Bytes, deadline_s: float
    ) -> None:
        connection.settimeout(_left_s(deadline_s))
        asked = b"".join(PAGE.pack(ref.page, ref.epoch) for ref in refs)
        connection.sendall(COUNT.pack(len(refs)) + asked)
        for ref, row in zip(refs, out, strict=True):
            connection.settimeout(_left_s(deadline_s))
            if receive(connection, 1) != HERE:
                raise TransferError(
                    f"page {ref.page} is used for something else by now", PageFault.STALE
                )
            view = memoryview(row.data).cast("B")
            while view:  # a peer that sends a byte a second is late all the same
                connection.settimeout(_left_s(deadline_s))
                got = connection.recv_into(view)
                if not got:
                    raise TransferError("the peer closed the connection")
                view = view[got:]

    def fence(self) -> None:
        """Bytes that are under way end in the kernel's buffer of a connection that is closed."""

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            end(connection)


def _fault(error: OSError | TransferError) -> PageFault:
    if isinstance(error, TransferError):
        return error.fault
    return PageFault.LATE if isinstance(error, TimeoutError) else PageFault.LOST


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TransferError("the deadline has passed", PageFault.LATE)
    return left_s
