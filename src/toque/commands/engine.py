"""`toque engine`: an engine that listens for a server on another host.

Owns: the process's signals. Knows: how an engine is built and told to share.
Does not know: sessions, requests.
"""

from __future__ import annotations

import gc
import logging
import signal

from toque.commands.secret import shared_secret
from toque.disagg.order import Sharing
from toque.engine_process import setup_logging, started
from toque.errors import ConfigError
from toque.files.fetch import locate
from toque.files.progress import terminal_progress
from toque.options import EngineOptions, ListenOptions, check_sharing, parse_address

log = logging.getLogger("toque.engine")

EVERYWHERE = ("0.0.0.0", "::", "*")


def engine(model: str, options: EngineOptions, listen: ListenOptions) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code. The address is taken first."""
    setup_logging()
    host, number = parse_address(listen.listen)
    if host in EVERYWHERE:
        raise ConfigError(
            f"--listen {listen.listen} names no host: other engines fetch pages from the address "
            "given here, so give the one that they reach"
        )
    check_sharing(options)
    sharing = Sharing(
        secret=shared_secret(listen.secret_file),
        transport=listen.kv_transfer,
        host=host,
        role=listen.role,
    )
    gc.disable()
    try:
        return _run(model, options, sharing, number)
    finally:
        gc.enable()


def _run(model: str, options: EngineOptions, sharing: Sharing, number: int) -> int:
    from toque.disagg.listening import ListeningEnd

    told: list[int] = []

    def going() -> bool:
        """What runs here goes on elsewhere: the server hears of the end before anything ends."""
        if told:
            port.leave("it was told to end")
        return not told

    port = ListeningEnd(sharing.host, number, sharing.secret)
    try:
        located = locate(model, progress=terminal_progress())
        from toque.build import build_engine

        name = located.served_names[0]
        made = build_engine(located.path, name, options, port, sharing)
        port.send(made.hello)
        started()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, lambda got, _: told.append(got))
        log.info("%s: %s engine on %s:%d", name, sharing.role, sharing.host, port.port)
        made.core.run(keep_going=going)
    finally:
        port.close()
    log.info("ended by %s", signal.Signals(told[0]).name)
    return 0
