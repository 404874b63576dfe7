"""`toque verify`: make a saved answer again and say whether it is the same, or where they part.

Owns: a server of its own, on this machine's loopback address, for one request. Knows: the order of
things. Does not know: how answers are compared (`saved_answer.py`). It is the very server of
`toque serve` that answers, so that everything on the way is the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.commands.saved_answer import (
    Json,
    Saved,
    differences,
    fingerprint_difference,
    read_saved,
)
from toque.commands.serve import bind, engine_thread, tokenizer_of
from toque.errors import ConfigError, EngineError
from toque.files.fetch import Located, locate
from toque.files.progress import terminal_progress
from toque.options import EngineOptions, ServeOptions

if TYPE_CHECKING:
    import socket

    from toque.serve.server import Server

EQUAL, PARTED = 0, 1  # exit codes; 2 = another fingerprint, or nothing to compare


def verify(
    paths: tuple[Path, Path | None],
    model: str | None,
    engine: EngineOptions,
    options: ServeOptions,
) -> int:
    """`paths`: the request and the response, or one file with both. Returns 0 if the answer is
    equal, 1 if not. Raises ConfigError for input that cannot be used, and where another engine than
    this one made the answer."""
    saved = read_saved(*paths)
    located = locate(_model(model, saved), progress=terminal_progress())
    answer = _replayed(saved, located, engine, options)
    parted = list(differences(saved, answer["choices"]))
    for difference in parted:
        print(difference)
    if not parted:
        seed = "" if saved.seed is None else f", seed {saved.seed}"
        print(f"equal: {len(saved.choices)} choices{seed}, {saved.fingerprint}")
    return PARTED if parted else EQUAL


def _model(given: str | None, saved: Saved) -> str:
    model = given or saved.model
    if not model:
        raise ConfigError("the response does not name its model: give it with --model")
    return model


def _replayed(saved: Saved, located: Located, engine: EngineOptions, options: ServeOptions) -> Json:
    from toque.serve.server import run

    answers: list[Json] = []
    options = replace(options, served_model_name=located.served_names)
    with bind("127.0.0.1", 0) as listening:
        run(_serve_one(listening, saved, located, engine, options, answers))
    return answers[0]


async def _serve_one(
    listening: socket.socket,
    saved: Saved,
    located: Located,
    engine: EngineOptions,
    options: ServeOptions,
    answers: list[Json],
) -> int:
    from toque.ipc import InProcess
    from toque.serve.server import Server

    channel = InProcess()
    name = located.served_names[0]
    arguments = (channel, located, name, engine)
    threading.Thread(target=engine_thread, args=arguments, name="engine", daemon=True).start()
    server = Server(listening, options, channel)
    running = asyncio.create_task(server.run(partial(tokenizer_of, located, engine)))
    try:
        await _ready(server, running)
        hello = server.client.hello
        assert hello is not None
        if other := fingerprint_difference(saved.fingerprint, hello.fingerprint):
            raise ConfigError(f"another engine made this answer: {other}")
        port = listening.getsockname()[1]
        answers.append(await asyncio.to_thread(_post, port, saved))
    finally:
        server.signalled()
        server.signalled()
        code = await running
    return code


async def _ready(server: Server, running: asyncio.Task[int]) -> None:
    """Raises EngineError if it never will be."""
    while server.service.not_serving() is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 0.02)
        if running.done():
            raise EngineError(str(server.client.failure or "the model could not be loaded"))


def _post(port: int, saved: Saved) -> Json:
    """Raises ConfigError where the request is refused."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{saved.route}",
        data=json.dumps(saved.replay_body()).encode(),
        headers={"content-type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as response:
            answer: Any = json.load(response)
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        print(message, file=sys.stderr)
        raise ConfigError(f"the request is refused now, with status {error.code}") from error
    if not isinstance(answer, dict):
        raise ConfigError("the server's answer is not an object")
    return answer
