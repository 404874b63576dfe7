"""Bytes of pages between pools: all of them or an error, from whoever knows the secret, in time."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec import structs

from toque.disagg import shm, tcp
from toque.disagg.order import Sharing
from toque.disagg.sharing import SharedEngine
from toque.disagg.transport import Peer, PoolView, TransferError, checksum, verified
from toque.types import PageRef, Source

LAYERS, PAGES, SECRET = (96, 32, 64), 40, b"s" * 32
FAR_S = 60.0


def filled(engine: SharedEngine) -> PoolView:
    random = np.random.default_rng(3)
    for layer in engine.pool.layers:
        layer[:] = random.integers(0, 256, layer.shape, dtype=np.uint8)
    for page in range(PAGES):
        engine.pool.epochs[page] = page % 7
    return engine.pool


MADE: list[SharedEngine] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Whatever a test makes is closed after it, peers included."""
    connections: list[tcp.TcpPeer] = []
    connect = tcp.TcpPeer._connect

    def noted(peer: tcp.TcpPeer, deadline_s: float) -> socket.socket:
        connections.append(peer)
        return connect(peer, deadline_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp.TcpPeer, "_connect", noted)
        yield
    for peer in connections:
        peer.close()
    for engine in MADE:
        for listener in engine._listeners:
            listener.close()
    MADE.clear()


def shared(transport: str = "auto", secret: bytes = SECRET, layout: str = "l") -> SharedEngine:
    MADE.append(SharedEngine(Sharing(secret=secret, transport=transport), LAYERS, PAGES, layout))
    return MADE[-1]


def soon() -> float:
    return time.monotonic() + FAR_S


def bounce(count: int) -> np.ndarray:
    return np.zeros((count, sum(LAYERS)), dtype=np.uint8)


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[PoolView, Peer, Source]]:
    """A filled pool, a peer that reads it, and how it is described."""
    source, reader = shared(request.param), shared(request.param)
    peer = reader.connect(source.source)
    assert peer.name == request.param
    yield filled(source), peer, source.source
    peer.close()


def test_pages_arrive_as_they_lie(pair: tuple[PoolView, Peer, Source]) -> None:
    pool, peer, _ = pair
    for pages in ([5], list(range(PAGES)), [7, 3, 7, 39, 0]):
        refs = [pool.reference(page) for page in pages]
        data = bounce(len(pages))
        peer.pull(refs, data, soon())
        for page, row in zip(pages, data, strict=True):
            assert row.tobytes() == b"".join(layer[page].tobytes() for layer in pool.layers)
        assert verified(refs, data) == [True] * len(pages)


def test_another_use_of_a_page_is_not_the_page(pair: tuple[PoolView, Peer, Source]) -> None:
    """And the peer goes on to serve others afterwards."""
    pool, peer, _ = pair
    ref = pool.reference(4)
    pool.epochs[4] += 1
    with pytest.raises(TransferError, match="something else"):
        peer.pull([pool.reference(3), ref], bounce(2), soon())
    data = bounce(1)
    peer.pull([pool.reference(3)], data, soon())
    assert verified([pool.reference(3)], data) == [True]


def test_contents_that_changed_do_not_verify(pair: tuple[PoolView, Peer, Source]) -> None:
    """Same page, same epoch, one bit: what the checksum is for."""
    pool, peer, _ = pair
    refs = [pool.reference(8), pool.reference(9)]
    pool.layers[1][9, 31] ^= 1
    data = bounce(2)
    peer.pull(refs, data, soon())
    assert verified(refs, data) == [True, False]


def test_pages_that_do_not_exist(pair: tuple[PoolView, Peer, Source]) -> None:
    _, peer, _ = pair
    with pytest.raises(TransferError):
        peer.pull([PageRef(page=PAGES, epoch=0, checksum=b"")], bounce(1), soon())


def test_another_layout_is_refused() -> None:
    source, reader = shared(layout="a"), shared(layout="b")
    with pytest.raises(TransferError, match="not those of this engine"):
        reader.connect(source.source)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_secret_is_refused(transport: str) -> None:
    source, reader = shared(transport), shared(transport, b"x" * 32)
    pool = filled(source)
    with pytest.raises(TransferError):
        reader.connect(source.source).pull([pool.reference(0)], bounce(1), soon())


def test_shared_memory_of_another_host_falls_back_to_tcp() -> None:
    source, reader = shared(), shared()
    pool = filled(source)
    near, far = source.source.addresses
    moved = structs.replace(source.source, addresses=(near.split("?")[0] + "?elsewhere", far))
    peer = reader.connect(moved)
    assert peer.name == "tcp"
    data = bounce(1)
    peer.pull([pool.reference(2)], data, soon())
    assert verified([pool.reference(2)], data) == [True]
    with pytest.raises(TransferError, match="another host"):
        shared("shm").connect(moved)


def test_a_file_that_is_not_the_pool_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Process ids and file numbers are used again."""
    file = tmp_path_factory.mktemp("other") / "file"
    file.write_bytes(os.urandom(1 << 16))
    source = structs.replace(shared("shm").source, addresses=(f"shm:{file}?{shm.host_id()}",))
    with pytest.raises(TransferError, match="not the pool"):
        shared("shm").connect(source)


# --------------------------------------------------------------------------- who talks to the port


def address(engine: SharedEngine) -> tuple[str, int]:
    host, _, port = engine.source.addresses[0].removeprefix("tcp:").rpartition(":")
    return host, int(port)


def server_of(engine: SharedEngine) -> tcp.PageServer:
    (server,) = engine._listeners
    assert isinstance(server, tcp.PageServer)
    return server


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + FAR_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def welcome(engine: SharedEngine) -> socket.socket:
    """A connection that knows the secret."""
    connection = socket.create_connection(address(engine), timeout=FAR_S)
    theirs, ours = tcp.receive(connection, 32), os.urandom(32)
    connection.sendall(ours + tcp._proof(SECRET, theirs, ours))
    tcp.receive(connection, 32)
    return connection


def test_strangers_and_nonsense_are_counted_and_closed() -> None:
    """Random bytes, a claim of 2^32 - 1 pages, a page beyond the pool; good peers go on."""
    engine = shared("tcp")
    pool = filled(engine)
    with socket.create_connection(address(engine), timeout=FAR_S) as stranger:
        stranger.sendall(os.urandom(4096))
        wait(lambda: server_of(engine).rejected == 1)
    for nonsense in (struct.pack("<I", 2**32 - 1), struct.pack("<I", 0),
                     struct.pack("<IIQ", 1, PAGES, 0)):  # fmt: skip
        before = server_of(engine).rejected
        with welcome(engine) as peer:
            peer.sendall(nonsense)
            assert peer.recv(1) == b""
        wait(lambda before=before: server_of(engine).rejected == before + 1)  # type: ignore[misc]
    data = bounce(1)
    shared("tcp").connect(engine.source).pull([pool.reference(1)], data, soon())
    assert verified([pool.reference(1)], data) == [True]


def listening() -> tuple[socket.socket, str]:
    bound = socket.create_server(("127.0.0.1", 0))
    return bound, f"tcp:127.0.0.1:{bound.getsockname()[1]}"


def test_a_peer_that_says_nothing_is_late() -> None:
    """It accepts and is silent, like a process that is stopped: the deadline holds."""
    bound, where = listening()
    with bound, pytest.raises(TransferError):
        tcp.TcpPeer(where, SECRET).pull(
            [PageRef(page=0, epoch=0, checksum=b"")], bounce(1), time.monotonic() + 0.2
        )


def test_a_pull_that_blocks_ends_when_it_is_closed() -> None:
    """By another thread: an engine that stops does not wait for one that is frozen."""
    bound, where = listening()
    peer, failed = tcp.TcpPeer(where, SECRET), threading.Event()

    def pull() -> None:
        with pytest.raises(TransferError):
            peer.pull([PageRef(page=0, epoch=0, checksum=b"")], bounce(1), soon() + FAR_S)
        failed.set()

    thread = threading.Thread(target=pull)
    thread.start()
    wait(lambda: peer._connection is not None)
    peer.close()
    thread.join(FAR_S / 2)
    assert failed.is_set()
    bound.close()


def test_a_server_that_is_closed_is_closed() -> None:
    """For who comes, and for who is there; its threads waited at sockets that were still open."""
    engine = shared("tcp")
    filled(engine)
    server = server_of(engine)
    with welcome(engine) as peer:
        server.close()
        assert peer.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(engine), timeout=FAR_S)


def test_nobody_is_there() -> None:
    bound, where = listening()
    bound.close()
    with pytest.raises(TransferError):
        tcp.TcpPeer(where, SECRET).pull([PageRef(page=0, epoch=0, checksum=b"")], bounce(1), soon())


def test_a_listener_is_on_loopback_unless_told_otherwise() -> None:
    assert address(shared("tcp"))[0] == "127.0.0.1"


def test_checksums_differ_in_every_byte() -> None:
    data = np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)
    whole = checksum(data)
    for place in range(500):
        changed = data.copy()
        changed[place] ^= 0x80
        assert checksum(changed) != whole


def test_a_view_scatters_what_it_gathers() -> None:
    layers = tuple(np.zeros((PAGES, size), dtype=np.uint8) for size in LAYERS)
    view = PoolView(layers, memoryview(array("q", bytes(8 * PAGES))))
    row = np.arange(sum(LAYERS), dtype=np.uint8)
    view.scatter(6, row)
    back = np.empty_like(row)
    view.gather(6, back)
    assert (back == row).all()
    assert sum(int(layer.sum()) for layer in layers) == int(row.sum())
