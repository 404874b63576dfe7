"""The channel between two processes loses nothing, in whatever order its ends come to be."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from toque.errors import EngineError
from toque.ipc import PORTION, ZmqEngineEnd, ZmqServeEnd
from toque.types import Abort, EngineFailed, Heartbeat, Request, SamplingParams, ToEngine

ROUNDS = 8  # what is lost depends on timers of ZeroMQ that are drawn anew each time


def request(number: int) -> Request:
    return Request(
        id=f"r{number}", prompt=(number, 1, 2), sampling=SamplingParams(seed=1), arrived_s=0.0
    )


def received(engine: ZmqEngineEnd, number: int, patience_s: float = 10.0) -> list[ToEngine]:
    """So many messages; fewer if no more come."""
    messages: list[ToEngine] = []
    end_s = time.monotonic() + patience_s
    while len(messages) < number and time.monotonic() < end_s:
        portion = engine.receive(0.05)
        assert len(portion) <= PORTION
        messages += portion
    return messages


@pytest.mark.parametrize("engine_first_s", [0.0, 0.15])
def test_what_is_sent_upon_the_first_word_arrives(tmp_path: Path, engine_first_s: float) -> None:
    """The engine may be ready before the server is: its first word is answered at once."""

    async def answered(folder: Path) -> int:
        engine = ZmqEngineEnd(folder)
        await asyncio.sleep(engine_first_s)
        engine.send(Heartbeat(predicted_ms=1.0))
        serve = ZmqServeEnd(folder, asyncio.get_running_loop().create_future())
        await serve.receive()
        sent = [request(number) for number in range(3)]
        for message in sent:
            serve.send(message)
        got = await asyncio.to_thread(received, engine, len(sent))
        assert got == sent
        serve.close()
        engine.close()
        return len(got)

    for turn in range(ROUNDS):
        folder = tmp_path / str(turn)
        folder.mkdir()
        assert asyncio.run(answered(folder)) == 3


def test_what_is_sent_before_there_is_an_engine_arrives(tmp_path: Path) -> None:
    """And all of a crowd, in order, in portions."""
    sent: list[ToEngine] = [request(number) for number in range(3 * PORTION)]
    sent.append(Abort(id="r1"))

    async def run() -> list[ToEngine]:
        serve = ZmqServeEnd(tmp_path, asyncio.get_running_loop().create_future())
        for message in sent:
            serve.send(message)
        await asyncio.sleep(0.1)
        engine = ZmqEngineEnd(tmp_path)
        got = await asyncio.to_thread(received, engine, len(sent))
        serve.close()
        engine.close()
        return got

    assert asyncio.run(run()) == sent


def test_a_message_that_comes_while_the_engine_waits_wakes_it(tmp_path: Path) -> None:
    """Found empty, then asleep, many times over: no message is left lying until the next one."""

    async def run() -> None:
        serve = ZmqServeEnd(tmp_path, asyncio.get_running_loop().create_future())
        engine = ZmqEngineEnd(tmp_path)
        for number in range(300):
            waiting = asyncio.ensure_future(asyncio.to_thread(received, engine, 1))
            if number % 3:
                await asyncio.sleep(0.001 * (number % 5))
            serve.send(request(number))
            assert await waiting == [request(number)]
            if number % 2:
                engine.send(Heartbeat(predicted_ms=float(number)))
                assert await serve.receive() == Heartbeat(predicted_ms=float(number))
        serve.close()
        engine.close()

    asyncio.run(run())


def test_last_words_are_heard_and_then_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serve = ZmqServeEnd(tmp_path, gone)
        engine = ZmqEngineEnd(tmp_path)
        engine.send(Heartbeat(predicted_ms=2.0))
        engine.close()
        gone.set_result("it was killed")
        assert await serve.receive() == Heartbeat(predicted_ms=2.0)
        with pytest.raises(EngineError, match="it was killed"):
            await serve.receive()
        serve.send(request(1))  # nobody is there: nothing happens
        serve.close()

    asyncio.run(run())


def test_an_engine_is_heard_however_many_were_before_it(tmp_path: Path) -> None:
    """Descriptors of closed sockets are used again: whatever of them is left in the event loop
    makes the next engine's first word go unheard, for ever."""

    async def start_and_end(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        serve = ZmqServeEnd(folder, asyncio.get_running_loop().create_future(), 60.0)
        await asyncio.sleep(0.005)  # it waits for what happens to the connection
        engine = ZmqEngineEnd(folder)
        engine.send(EngineFailed(message=str(number)))
        message = await asyncio.wait_for(serve.receive(), 30)
        assert message == EngineFailed(message=str(number))
        if number % 2:
            serve.close()
        engine.close()
        if not number % 2:
            await asyncio.sleep(0.02)
            serve.close()

    async def run() -> None:
        for number in range(30):
            await start_and_end(number)

    asyncio.run(run())
