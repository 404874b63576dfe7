"""The load generator against servers whose every byte and moment is scripted."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from bench.client import Address, Reply, Usage, complete, parse_url, request_body
from bench.load import closed_loop, run_loop
from bench.summary import Run, problem, summarize
from bench.workloads import WORKLOADS, Workload, make_prompts

WORKLOAD = Workload("three", requests=3, clients=2, prompt_tokens=4, output_tokens=3)
GAP_S = 0.002

Writer = asyncio.StreamWriter
Script = Callable[[dict[str, Any], Writer], Any]


def toque_event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return sse({"id": "x", "object": "text_completion", "choices": [choice], "usage": None})


def llama_event(text: str, finish: str | None = None, **extra: Any) -> bytes:
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    return sse({"choices": [choice], "model": "m", "object": "text_completion", **extra})


def sse(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def chunked(part: bytes) -> bytes:
    return f"{len(part):x}\r\n".encode() + part + b"\r\n"


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def toque_like(body: dict[str, Any], writer: Writer) -> None:
    """Usage in a chunk of its own; the last text together with the finish reason; a token whose
    text is held back comes with the next one; packets cut where no event ends."""
    writer.write(HEAD + chunked(toque_event("a")))
    await writer.drain()
    await asyncio.sleep(GAP_S)
    assert body["max_tokens"] == 3
    last = {"choices": [], "usage": usage(len(body["prompt"]), 3)}
    rest = chunked(toque_event("bc", "length")) + chunked(sse(last) + DONE) + b"0\r\n\r\n"
    for cut in (10, 37, len(rest)):
        writer.write(rest[:cut])
        rest = rest[cut:]
        await writer.drain()
        await asyncio.sleep(0.001)


async def llama_like(body: dict[str, Any], writer: Writer) -> None:
    """An event per token, then one without text that has the finish reason, usage and timings."""
    writer.write(HEAD)
    for text in "abc":
        writer.write(chunked(llama_event(text)))
        await writer.drain()
        await asyncio.sleep(GAP_S)
    end = {"usage": usage(len(body["prompt"]), 3), "timings": {"predicted_n": 3}}
    writer.write(chunked(llama_event("", "length", **end)) + chunked(DONE) + b"0\r\n\r\n")


async def without_usage(body: dict[str, Any], writer: Writer) -> None:
    """No chunks and no usage: the body ends with the connection, lines with CR LF."""
    events = b"".join(map(toque_event, "abc")) + toque_event("", "length") + b": a comment\n\n"
    crlf = (events + DONE).replace(b"\n", b"\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + crlf)


async def refuses(body: dict[str, Any], writer: Writer) -> None:
    error = b'{"error": {"message": "too long"}}'
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(error), error))


async def fails_midway(body: dict[str, Any], writer: Writer) -> None:
    events = toque_event("a") + sse({"error": {"message": "the model failed"}}) + DONE
    writer.write(HEAD + chunked(events) + b"0\r\n\r\n")


async def breaks_off(body: dict[str, Any], writer: Writer) -> None:
    writer.write(HEAD + chunked(toque_event("a")))


async def ends_without_done(body: dict[str, Any], writer: Writer) -> None:
    writer.write(HEAD + chunked(toque_event("a", "length")) + b"0\r\n\r\n")


async def too_short(body: dict[str, Any], writer: Writer) -> None:
    end = {"usage": usage(len(body["prompt"]), 1)}
    writer.write(HEAD + chunked(llama_event("a", "stop", **end) + DONE) + b"0\r\n\r\n")


async def no_http(body: dict[str, Any], writer: Writer) -> None:
    writer.write(b"220 mail.example ESMTP\r\n")


async def silent(body: dict[str, Any], writer: Writer) -> None:
    await asyncio.sleep(5)


class FakeServer:
    """Serves one script; `bodies` are the requests in the order in which they came."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("post /v1/completions http/1.1\r\n")
            size = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            self.bodies.append(body)
            await self.script(body, writer)
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Address]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1], "/v1")
        finally:
            server.close()


def drive(script: Script, workload: Workload = WORKLOAD, timeout_s: float = 60.0) -> Any:
    """(summary, replies, server) of a workload against a script."""
    server = FakeServer(script)
    prompts = make_prompts(workload, 0, 32000)
    bodies = [request_body("m", prompt, workload.output_tokens, 0) for prompt in prompts]

    async def go() -> list[Reply]:
        async with server.running() as address:
            return await closed_loop(address, bodies, workload.clients, timeout_s)

    t0 = time.perf_counter()
    replies = run_loop(go())
    run = Run(workload, replies, time.perf_counter() - t0, 0.0)
    return summarize(run), replies, server


def most_at_once(replies: list[Reply]) -> int:
    """How many requests were open at the same time."""
    ends = sorted([(r.sent_s, 1) for r in replies] + [(r.end_s, -1) for r in replies])
    return max(itertools.accumulate(step for _, step in ends))


@pytest.mark.parametrize(
    ("script", "counted_by", "events"),
    [(toque_like, "usage", 2), (llama_like, "usage", 3), (without_usage, "events", 3)],
)
def test_every_dialect_gives_the_same_counts(script: Script, counted_by: str, events: int) -> None:
    summary, replies, server = drive(script)
    assert summary["errors"] == 0, summary["error_messages"]
    assert summary["out_tokens"] == 9
    assert summary["counted_by"] == counted_by
    assert [len(reply.token_s) for reply in replies] == [events] * 3
    assert len(server.bodies) == 3 and most_at_once(replies) <= WORKLOAD.clients
    rate = summary["out_tokens"] / summary["wall_s"]
    assert summary["out_tok_per_s"] == pytest.approx(rate)
    assert summary["prompt_tok_per_s"] == pytest.approx(rate * 4 / 3)


@pytest.mark.parametrize("script", [toque_like, llama_like])
def test_moments_are_in_order(script: Script) -> None:
    summary, replies, _ = drive(script)
    for reply in replies:
        moments = [reply.sent_s, reply.first_s, *reply.token_s[1:], reply.finish_s, reply.end_s]
        assert moments == sorted(moments)
        assert reply.first_s == reply.token_s[0] > reply.sent_s
    assert 0 < summary["ttft_p50_ms"] <= summary["ttft_p99_ms"]
    assert 0 <= summary["itl_p50_ms"] <= summary["itl_p99_ms"]


def test_times_are_from_sending_to_the_first_token_and_between_tokens() -> None:
    def reply(sent_s: float, *token_s: float) -> Reply:
        return Reply(sent_s, list(token_s), token_s[-1], token_s[-1], Usage(4, 3))

    replies = [reply(0.0, 1.0, 1.5, 1.6), reply(2.0, 5.0, 5.1, 5.2), reply(1.0, 3.0, 3.1, 3.2)]
    failed = Reply(0.0, [9.0], error="broken")
    summary = summarize(Run(WORKLOAD, [*replies, failed], 10.0, 0.5))
    assert summary["ttft_p50_ms"] == pytest.approx(2000)  # of 1, 3 and 2 s
    assert summary["ttft_p99_ms"] == pytest.approx(2980)  # linear between the two highest
    assert summary["itl_p50_ms"] == pytest.approx(100)  # of 0.5 s once and 0.1 s five times
    assert summary["itl_p99_ms"] == pytest.approx(480)
    assert summary["out_tok_per_s"] == pytest.approx(0.9)
    assert summary["prompt_tok_per_s"] == pytest.approx(1.2)
    assert (summary["errors"], summary["error_messages"]) == (1, ["broken"])


def test_the_request_is_the_one_that_the_workload_says() -> None:
    _, _, server = drive(llama_like)
    prompts = make_prompts(WORKLOAD, 0, 32000)
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompts)
    body = server.bodies[0]
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (refuses, "status 400"),
        (fails_midway, "the model failed"),
        (breaks_off, "closed"),
        (ends_without_done, r"without \[DONE\]"),
        (too_short, "1 tokens came, 3 were asked for"),
        (no_http, "not HTTP"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_and_counts_no_token(
    script: Script, message: str
) -> None:
    summary, _, _ = drive(script)
    assert summary["errors"] == summary["requests"] == 3
    assert summary["out_tokens"] == summary["out_tok_per_s"] == 0
    assert all(re.search(message, text) for text in summary["error_messages"])


def test_a_silent_server_and_none_at_all_are_errors() -> None:
    summary, _, _ = drive(silent, replace(WORKLOAD, requests=1, clients=1), timeout_s=0.2)
    assert summary["error_messages"] == ["no end after 0.2 s"]
    reply = run_loop(complete(Address("127.0.0.1", 1, "/v1"), b"{}", 5.0))
    assert reply.error is not None and reply.error.startswith("connection")


def test_one_bad_answer_does_not_spoil_the_others() -> None:
    async def first_fails(body: dict[str, Any], writer: Writer) -> None:
        bad = body["prompt"] == make_prompts(WORKLOAD, 0, 32000)[0]
        await (refuses if bad else llama_like)(body, writer)

    summary, replies, _ = drive(first_fails)
    assert summary["errors"] == 1 and summary["out_tokens"] == 6
    assert [problem(reply, WORKLOAD) is None for reply in replies] == [False, True, True]


def test_a_prompt_that_the_server_changed_is_an_error() -> None:
    async def adds_a_token(body: dict[str, Any], writer: Writer) -> None:
        await llama_like({**body, "prompt": [1, *body["prompt"]]}, writer)

    summary, _, _ = drive(adds_a_token)
    assert summary["error_messages"] == ["the prompt counted 5 tokens, not the sent ones"]


def test_a_first_token_without_text_shows_in_the_finish_reason() -> None:
    async def one_held_back(body: dict[str, Any], writer: Writer) -> None:
        end = {"choices": [], "usage": usage(len(body["prompt"]), 1)}
        events = toque_event("", "length") + sse(end) + DONE
        writer.write(HEAD + chunked(events) + b"0\r\n\r\n")

    summary, _, _ = drive(one_held_back, replace(WORKLOAD, output_tokens=1))
    assert summary["errors"] == 0 and summary["out_tokens"] == 3
    assert summary["ttft_p50_ms"] is not None and summary["itl_p50_ms"] is None


# ---------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_prompts_are_repeatable_and_share_what_they_should(name: str) -> None:
    workload = WORKLOADS[name]
    prompts = make_prompts(workload, 7, 32000)
    assert prompts == make_prompts(workload, 7, 32000)
    assert len(prompts) == workload.requests
    assert {len(prompt) for prompt in prompts} == {workload.prompt_tokens}
    assert all(1000 <= token < 31000 for prompt in prompts for token in prompt)
    shared = workload.shared_tokens
    assert len({tuple(prompt[:shared]) for prompt in prompts}) == 1
    # Not one token more: the first of their own differs in every two prompts.
    assert len({prompt[shared] for prompt in prompts}) == workload.requests


def test_other_seeds_and_other_workloads_share_nothing() -> None:
    firsts = [
        make_prompts(WORKLOADS[name], seed, 32000)[0][:8] for name in WORKLOADS for seed in (0, 1)
    ]
    assert len(set(map(tuple, firsts))) == len(firsts)


def test_a_small_vocabulary_keeps_its_margins() -> None:
    tokens = {t for p in make_prompts(WORKLOADS["batch32"], 0, 400) for t in p}
    assert min(tokens) >= 100 and max(tokens) < 300


def test_the_issues_workloads() -> None:
    table = {
        name: (w.requests, w.clients, w.prompt_tokens, w.output_tokens, w.shared_tokens)
        for name, w in WORKLOADS.items()
        if name not in ("single", "prefill")
    }
    assert table == {
        "batch16": (32, 16, 128, 128, 0),
        "batch32": (64, 32, 64, 128, 0),
        "prefix": (32, 8, 1088, 32, 1024),
    }


def test_urls() -> None:
    assert parse_url("http://127.0.0.1:8000") == Address("127.0.0.1", 8000, "/v1")
    assert parse_url("http://host:1/v1/").url == "http://host:1/v1"
    for wrong in ("https://host", "host:8000", "ftp://host"):
        with pytest.raises(ValueError, match="not an http"):
            parse_url(wrong)
