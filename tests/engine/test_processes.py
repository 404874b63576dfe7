"""The engine as a process of its own: start, work, death of either side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toque.engine_process import Orders, exit_reason, start_engine
from toque.errors import EngineError
from toque.ipc import ZmqServeEnd
from toque.options import EngineOptions
from toque.types import (
    EngineFailed,
    Finished,
    FinishReason,
    Hello,
    Request,
    SamplingParams,
    Shutdown,
    StepReport,
    Tokens,
)

OPTIONS = EngineOptions(load_format="dummy", kv_cache_memory_bytes=4 << 20)


def orders(folder: Path, model: Path, options: EngineOptions = OPTIONS) -> Orders:
    return Orders(folder=str(folder), model_path=str(model), model_name="tiny", options=options)


@asynccontextmanager
async def engine(what: Orders) -> AsyncIterator[tuple[subprocess.Popen[bytes], ZmqServeEnd]]:
    child = start_engine(what)

    async def ended() -> str:
        return exit_reason(await asyncio.to_thread(child.wait))

    port = ZmqServeEnd(Path(what.folder), asyncio.ensure_future(ended()))
    try:
        yield child, port
    finally:
        child.kill()
        await asyncio.to_thread(child.wait)
        port.close()


async def receive(port: ZmqServeEnd) -> object:
    return await asyncio.wait_for(port.receive(), 60)


def wanted(name: str, max_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt=(5, 6, 7), sampling=sampling, arrived_s=time.monotonic())


def test_hello_work_and_shutdown(tmp_path: Path, tiny_config: Path) -> None:
    """The process says hello, answers, ignores the terminal's signals, and ends when told to."""

    async def scenario() -> None:
        async with engine(orders(tmp_path, tiny_config)) as (child, port):
            hello = await receive(port)
            assert isinstance(hello, Hello)
            assert hello.vocab_size == 259
            assert hello.end_token_ids == (2,)
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGTERM)
            port.send(wanted("a", 5))
            tokens: list[int] = []
            while True:
                report = await receive(port)
                assert isinstance(report, StepReport)
                for event in report.events:
                    if isinstance(event, Tokens):
                        tokens += event.ids
                if any(isinstance(event, Finished) for event in report.events):
                    break
            assert len(tokens) == 5
            port.send(Shutdown())
            with pytest.raises(EngineError, match="code 0"):
                await receive(port)

    asyncio.run(scenario())


def test_shutdown_ends_what_still_runs(tmp_path: Path, tiny_config: Path) -> None:
    async def scenario() -> None:
        async with engine(orders(tmp_path, tiny_config)) as (_, port):
            await receive(port)
            port.send(wanted("a", 500))
            await receive(port)
            port.send(Shutdown())
            while True:
                report = await receive(port)
                assert isinstance(report, StepReport)
                ends = [event for event in report.events if isinstance(event, Finished)]
                if ends:
                    assert ends[0].reason is FinishReason.ABORT
                    return

    asyncio.run(scenario())


def test_a_killed_engine_is_noticed_at_once_and_named(tmp_path: Path, tiny_config: Path) -> None:
    async def scenario() -> None:
        async with engine(orders(tmp_path, tiny_config)) as (child, port):
            await receive(port)
            port.send(wanted("a", 500))
            child.kill()
            with pytest.raises(EngineError, match="SIGKILL"):
                while True:
                    await asyncio.wait_for(port.receive(), 60)

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_said_in_a_sentence(tmp_path: Path) -> None:
    """The key at fault arrives on the channel; the process then ends with code 1."""
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    async def scenario() -> None:
        async with engine(orders(tmp_path, tmp_path)) as (_, port):
            failed = await receive(port)
            assert isinstance(failed, EngineFailed)
            assert "bert" in failed.message.lower()
            with pytest.raises(EngineError, match="code 1"):
                await receive(port)

    asyncio.run(scenario())


def test_an_impossible_choice_is_refused_at_start(tmp_path: Path, tiny_config: Path) -> None:
    options = EngineOptions(load_format="dummy", max_model_len=500, kv_cache_memory_bytes=64 << 10)

    async def scenario() -> None:
        async with engine(orders(tmp_path, tiny_config, options)) as (_, port):
            failed = await receive(port)
            assert isinstance(failed, EngineFailed)
            assert "--kv-cache-memory-bytes" in failed.message

    asyncio.run(scenario())


def test_an_engine_whose_server_is_gone_ends_by_itself(tmp_path: Path, tiny_config: Path) -> None:
    """The server is killed without a word; no orphan keeps the memory."""
    program = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.engine.test_processes import orders
from toque.engine_process import start_engine
child = start_engine(orders(Path({str(tmp_path)!r}), Path({str(tiny_config)!r})))
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(2)  # it may still be loading: it must end all the same
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(1200):
        if not _alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine outlived its server by two minutes")


def _alive(pid: int) -> bool:
    """A zombie that nobody has waited for counts as ended."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
