"""The engine as a process of its own: `python -m toque.engine_process`, started by `toque serve`.

Its orders (folder of the sockets, model, options) come as one JSON line on standard input. It never
ends by a signal from the terminal: the server decides when, and if the server is gone, so is it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from toque.config import EngineOptions
from toque.errors import ToqueError
from toque.types import EngineFailed

log = logging.getLogger(__name__)


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # of the sockets
    model_path: str
    model_name: str
    options: EngineOptions
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
        engine = build_engine(Path(orders.model_path), orders.model_name, orders.options, port)
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
