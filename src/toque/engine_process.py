"""The engine as a process of its own: `python -m toque.engine_process`, started by `toque serve`.

Its orders (folder of the sockets, model, options) come as one JSON line on standard input. It never
ends by a signal from the terminal: the server decides when, and if the server is gone, so is it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from toque.disagg.order import Sharing
from toque.errors import ToqueError
from toque.options import EngineOptions
from toque.types import EngineFailed

log = logging.getLogger(__name__)


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # of the sockets
    model_path: str
    model_name: str
    options: EngineOptions
    sharing: Sharing | None = None  # with other engines
    memory_share: float = 1.0  # of the free memory, where several engines start at once
    server_pid: int = 0  # whose child this is: when it is gone, so is the engine


def start_engine(orders: Orders) -> subprocess.Popen[bytes]:
    """Start the child. Its own session, so that Ctrl-C at the terminal reaches the server only."""
    child = subprocess.Popen(
        [sys.executable, "-m", "toque.engine_process"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    complete = msgspec.structs.replace(orders, server_pid=os.getpid())
    child.stdin.write(msgspec.json.encode(complete) + b"\n")
    child.stdin.close()
    return child


def process_exit(child: subprocess.Popen[bytes]) -> asyncio.Future[str]:
    """Completes with a sentence when the process has ended. A thread of its own waits: the pool of
    `to_thread` is small, and this wait takes as long as the engine lives."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def tell(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    def wait() -> None:
        reason = exit_reason(child.wait())
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(tell, reason)

    threading.Thread(target=wait, name="engine-exit", daemon=True).start()
    return ended


def exit_reason(returncode: int) -> str:
    """A sentence about how the engine process ended."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the engine process was ended by {name}{hint}"
    return f"the engine process ended with code {returncode}"


def main() -> int:
    """Run the engine until Shutdown, or until the parent is gone. Exit code 0, or 1 after saying
    why on the channel and in the log."""
    for number in (signal.SIGINT, signal.SIGTERM):  # service managers signal every process
        signal.signal(number, signal.SIG_IGN)
    setup_logging()
    gc.disable()
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    from toque.build import build_engine  # after the signals are set: this takes a moment
    from toque.ipc import ZmqEngineEnd

    port = ZmqEngineEnd(Path(orders.folder))
    try:
        engine = build_engine(
            Path(orders.model_path),
            orders.model_name,
            orders.options,
            port,
            orders.sharing,
            orders.memory_share,
        )
        started()
        port.send(engine.hello)
        engine.core.run(keep_going=lambda: os.getppid() == orders.server_pid)
        return 0
    except ToqueError as error:
        port.send(EngineFailed(message=str(error)))
        return 1
    except Exception as error:
        log.exception("the engine failed")
        port.send(EngineFailed(message=f"the engine failed: {type(error).__name__}: {error}"))
        return 1
    finally:
        port.close()


def started() -> None:
    """Ends a start that ran with `gc.disable()`: it makes half a million objects that stay, and
    looking through them for garbage, then and at every collection later, is time lost."""
    gc.freeze()
    gc.enable()


def setup_logging() -> None:
    """One line per event on standard error, the time in front."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


if __name__ == "__main__":
    sys.exit(main())
