"""The whole of it: `toque serve` as a process, real clients, crowds, and sudden ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.live import Live, serving


@pytest.fixture(scope="module")
def tiny(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "32")
    with serving(str(tiny_config), tmp_path_factory.mktemp("tiny-server"), *flags) as live:
        yield live


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("smollm2-server")
    with serving(
        "smollm2", folder, "--served-model-name", "smollm2", "--served-model-name", "Qwen"
    ) as live:
        yield live


def completion(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, "temperature": 0, "ignore_eos": True, **extra}


# --------------------------------------------------------------------------- real clients


def test_the_line_of_the_readme_works_word_for_word(smollm2: Live) -> None:
    """curl -d sends a form's content type; the model answers to Qwen."""
    body = '{"model": "Qwen", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}'
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(
        f"{smollm2.url}/v1/chat/completions", content=body, headers=headers, timeout=60
    )
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]


def test_the_openai_client_streams_what_it_gets_whole(smollm2: Live) -> None:
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none")
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**arguments)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == text
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    client.close()


def test_a_seed_repeats_an_answer_and_its_choices_differ(smollm2: Live) -> None:
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none")

    def answers() -> list[str]:
        made = client.completions.create(
            model="smollm2", prompt="Once upon a time", n=3, seed=7, max_tokens=12
        )
        return [choice.text for choice in made.choices]

    first = answers()
    assert first == answers()
    assert len(set(first)) == 3
    client.close()


def test_equal_prompts_are_found_in_the_cache(smollm2: Live) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 6, "max_tokens": 2}
    url = f"{smollm2.url}/v1/completions"
    details = [
        httpx.post(url, json=body, timeout=60).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens"] >= 48


# -------------------------------------------------------------------------------- crowds


async def send(
    live: Live, body: dict[str, Any], window_bytes: int | None = None
) -> asyncio.StreamReader:
    """Post a completion; returns when the request has left. Raw, since a thousand full clients
    take far longer than the server that they ask.

    `window_bytes` fixes how much the kernel takes in for a client that does not read: without it
    the system's limit decides, which is 6 MB on one machine and 32 MB on another."""
    sock = socket.socket()
    sock.setblocking(False)
    if window_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", live.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}"
    writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + content)
    await writer.drain()
    reader.writer = writer  # type: ignore[attr-defined]  # closed by whoever reads
    return reader


async def read_stream(reader: asyncio.StreamReader, leave_after: int | None = None) -> str | None:
    """The text of a stream that ends as it should, or None for one that we left."""
    text, events = "", 0
    try:
        assert b" 200 " in await reader.readline()
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return text
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            events += 1
            if events == leave_after:
                return None
        raise AssertionError("a stream ended without [DONE]")
    finally:
        reader.writer.close()  # type: ignore[attr-defined]


def test_64_clients_of_whom_a_third_leave(tiny: Live) -> None:
    """No hang, no error for the others, the same text for equal prompts, and no page left held."""

    async def one(number: int) -> str | None:
        body = completion(f"client {number % 8}", max_tokens=40, stream=True)
        leave_after = number % 11 + 1 if number % 3 == 0 else None
        return await read_stream(await send(tiny, body), leave_after)

    async def crowd() -> list[str | None]:
        return await asyncio.wait_for(asyncio.gather(*map(one, range(64))), 120)

    ended_before = tiny.metric("toque_request_success_total")
    texts = asyncio.run(crowd())
    tiny.wait_idle()
    stayed = {number: text for number, text in enumerate(texts) if number % 3}
    assert None not in stayed.values()
    for number, text in stayed.items():
        assert text == next(t for n, t in stayed.items() if n % 8 == number % 8)
    assert tiny.metric("toque_request_success_total") - ended_before == 64
    assert tiny.metric("toque_request_success_total", finished_reason="error") == 0


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def test_a_thousand_open_streams_wait_fairly_in_flat_memory(tiny: Live) -> None:
    """All are answered, in the order of their arrival up to a few batches, and memory stays."""

    async def crowd() -> list[int]:
        order: list[int] = []

        async def one(number: int, reader: asyncio.StreamReader) -> None:
            assert await read_stream(reader) is not None
            order.append(number)

        tasks = []
        for number in range(1000):  # one after the other: this is the order of arrival
            body = completion(f"{number}", max_tokens=8, stream=True)
            tasks.append(asyncio.create_task(one(number, await send(tiny, body))))
        await asyncio.wait_for(asyncio.gather(*tasks), 200)
        return order

    asyncio.run(crowd())  # the first time fills caches and pools
    tiny.wait_idle()
    pids = (tiny.process.pid, tiny.engine_pid())
    before = [resident_mb(pid) for pid in pids]
    order = asyncio.run(crowd())
    tiny.wait_idle()
    after = [resident_mb(pid) for pid in pids]
    assert sorted(order) == list(range(1000))
    late = max(place - number for place, number in enumerate(order))
    assert late < 100, f"somebody was overtaken by {late} others"
    for was, now in zip(before, after, strict=True):
        assert now < was + 25, f"resident memory went from {was:.0f} to {now:.0f} MB"


def test_a_reader_that_does_not_read_is_cut_off(tiny_config: Path, tmp_path: Path) -> None:
    """Its request ends, its pages come back, and others are served meanwhile."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--slow-reader-timeout", "1")

    async def scenario(live: Live) -> None:
        # Some 20 MB of answer: more than the server's socket buffer (4 MB at most) takes.
        body = completion("x", max_tokens=480, n=32, stream=True, logprobs=20)
        lazy = await send(live, body, window_bytes=1 << 16)
        lazy._transport.pause_reading()  # type: ignore[attr-defined]
        other = await read_stream(await send(live, completion("y", max_tokens=4, stream=True)))
        assert other is not None
        await asyncio.to_thread(
            live.wait_until, "the lazy reader is still served", 60, toque_open_requests=0
        )
        lazy.writer.transport.abort()  # type: ignore[attr-defined]

    with serving(str(tiny_config), tmp_path, *flags) as live:
        asyncio.run(scenario(live))
        live.wait_idle()


# ---------------------------------------------------------------------------- sudden ends


def test_a_dead_engine_ends_every_request_and_the_server(tiny_config: Path, tmp_path: Path) -> None:
    """kill -9 of the engine: an error event at once on open streams, exit code 1, and why."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny")
    with serving(str(tiny_config), tmp_path, *flags) as live:
        body = completion("x", max_tokens=450, stream=True)
        url = f"{live.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(live.engine_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["type"]
        assert live.process.wait(60) == 1
        assert "SIGKILL" in live.log()


def test_sigterm_lets_a_running_request_finish(tiny_config: Path, tmp_path: Path) -> None:
    flags = ("--load-format", "dummy", "--served-model-name", "tiny")
    with serving(str(tiny_config), tmp_path, *flags) as live:
        body = completion("x", max_tokens=200, stream=True)
        url = f"{live.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: {")]
        last = json.loads(rest[-1][6:])
        assert last["choices"][0]["finish_reason"] == "length"
        assert live.process.wait(60) == 0


def test_a_taken_port_is_said_with_the_way_out(tiny: Live, tiny_config: Path) -> None:
    command = [sys.executable, "-m", "toque", "serve", str(tiny_config), "--port", str(tiny.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"port {tiny.port}" in ended.stderr
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_single_process_serves_the_same_tokens(
    tiny: Live, tiny_config: Path, tmp_path: Path
) -> None:
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--single-process")
    body = completion("one process or two", max_tokens=32)
    with serving(str(tiny_config), tmp_path, *flags) as live:
        texts = [
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for url in (live.url, tiny.url)
        ]
    assert texts[0] == texts[1]


def test_pages_are_watched_across_the_processes(tiny_config: Path, tmp_path: Path) -> None:
    """A pool of few pages, and prompts that share nothing: each needs the places of others."""
    flags = ("--load-format", "dummy", "--kernels", "ref", "--max-model-len", "64",
             "--kv-cache-memory-bytes", "64KiB", "--metrics-compat", "vllm",
             "--kv-cache-metrics", "--kv-cache-metrics-sample", "1.0")  # fmt: skip
    with serving(str(tiny_config), tmp_path, *flags) as live:
        total_pages = live.metric("toque_kv_cache_pages")
        full_pages = 0
        for number in range(200):
            prompt = f"{number:03}" + "x" * 45  # 3 pages of 16
            body = {"prompt": prompt, "max_tokens": 1}
            assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).is_success
            full_pages += 3
            if full_pages > total_pages + 9:
                break
        live.wait_idle()
        evicted = full_pages - live.metric("toque_kv_cache_pages", state="cached")
        assert evicted >= 9
        for name in ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"):
            assert live.metric(f"toque_{name}_count") == evicted
            assert live.metric(f"vllm:{name}_sum") == live.metric(f"toque_{name}_sum") > 0
