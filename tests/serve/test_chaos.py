"""Nonsense and haste: good streams do not notice, and every counter adds up afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import Live, serving
from toque.serve import fields, schema

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "stream": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/embeddings": {"input": ["hello", "you"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
NAMES = sorted({*schema.ChatBody.model_fields, *schema.CompletionBody.model_fields,
                *schema.EmbeddingBody.model_fields, *fields.CHAT_RULES, *fields.COMPLETION_RULES,
                *fields.EMBEDDING_RULES, "stream", "odd"})  # fmt: skip
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 0.5, -1e300, "", "x", "é",
                     "\x00", [], {}, [[]], [1], ["a"], {"a": 1}, [None], "x" * 5000, [0] * 3000,
                     {"type": "text"}, [{"role": "user", "content": []}], {"5": 1e9}]  # fmt: skip
GOOD = [f"good stream number {i} " * (i + 1) for i in range(8)]


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Few rows and pages: waiting and preemption are part of it."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "6",
             "--slo", "default:ttft=1s,itl=500ms", "--max-model-len", "300",
             "--max-num-batched-tokens", "48",
             "--kv-cache-memory-bytes", str(768 * 800), "--read-timeout", "8")  # fmt: skip
    with serving(str(tiny_config), tmp_path_factory.mktemp("chaos"), *flags) as live:
        yield live


# ------------------------------------------------------------------------------------- fuzz


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that was good once."""
    path = rng.choice(PATHS)
    body = json.loads(json.dumps(BASE[path]))
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(NAMES)] = rng.choice(VALUES)
    content = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(content))
            kind = rng.randrange(4)
            if kind == 0:
                content[place] = rng.randrange(256)
            elif kind == 1:
                del content[place : place + rng.randint(1, 20)]
            elif kind == 2:
                content[place:place] = content[: rng.randint(1, 30)]
            else:
                del content[place:]
            content = content or bytearray(b"{")
    return path, bytes(content)


async def good_stream(client: httpx.AsyncClient, prompt: str) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0.9, "seed": len(prompt),
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice["token_ids"]
    return ids


async def nonsense(live: Live, client: httpx.AsyncClient, rng: random.Random) -> None:
    if rng.random() < 0.15:  # not even HTTP
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(rng.randbytes(rng.randint(1, 400)) + rng.choice([b"", b"\r\n\r\n"]))
        if rng.random() < 0.5:
            writer.close()
            return
        await asyncio.wait_for(reader.read(100), 60)
        writer.close()
        return
    path, content = mutated(rng)
    answer = await client.post(path, content=content)
    assert answer.status_code in (200, 400, 404, 409), (path, content[:300], answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(answer.content) < 2000


async def fuzz(live: Live, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
        quiet = [await good_stream(client, prompt) for prompt in GOOD]
        assert all(len(ids) == 60 for ids in quiet)
        for _ in range(rounds):
            streams = [asyncio.create_task(good_stream(client, prompt)) for prompt in GOOD]
            await asyncio.gather(*(nonsense(live, client, rng) for _ in range(25)))
            assert await asyncio.gather(*streams) == quiet
    live.wait_idle()


def test_good_streams_are_the_same_among_nonsense(live: Live) -> None:
    asyncio.run(fuzz(live, rounds=6, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_good_streams_are_the_same_among_much_nonsense(live: Live, seed: int) -> None:
    asyncio.run(fuzz(live, rounds=40, seed=seed))


# ---------------------------------------------------------------------------- conservation

TOTALS = ("prompt_tokens_total", "computed_tokens_total", "generation_tokens_total",
          "prefix_cache_hits_total", "recomputed_tokens_total", "calls_received_total",
          "calls_finished_total", "request_success_total", "request_prompt_tokens_sum",
          "request_generation_tokens_sum", "request_prompt_tokens_count",
          "prompt_tokens_by_source_total", "key_prompt_tokens_total", "key_generation_tokens_total",
          "key_calls_total", "errors_total", "slo_requests_total", "request_params_n_count",
          "http_request_duration_seconds_count", "http_requests_total",
          "request_time_per_output_token_seconds_count")  # fmt: skip


def totals(live: Live) -> dict[str, float]:
    live.wait_idle()
    live.wait_until("calls are still open", toque_calls_in_progress=0)
    found = {name: live.metric("toque_" + name) for name in TOTALS}
    found["succeeded"] = live.metric("toque_calls_finished_total", outcome="success")
    for state in ("free", "cached", "held"):
        found[state] = live.metric("toque_kv_cache_pages", state=state)
    return found


async def one_of_many(
    client: httpx.AsyncClient, rng: random.Random, leave: bool
) -> tuple[int, int]:
    """A mixed request; returns how many sequences it started at most, to generate and in all."""
    n = rng.choice([1, 1, 1, 2, 4])
    body: dict[str, Any] = {
        "prompt": [3 + rng.randrange(4)] * rng.randint(1, 200) + [9],
        "max_tokens": rng.randint(1, 60),
        "n": n,
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.5,
        "stop": rng.choice([None, "a", ["zz", "b"]]),
        "cache_salt": rng.choice([None, None, "s"]),
    }
    if rng.random() < 0.2:
        body |= {"echo": True, "logprobs": 1, "max_tokens": rng.choice([0, 3])}
    if rng.random() < 0.1:
        body["temperature"] = -1
        n = 0
    body["stream"] = rng.random() < 0.6
    path = "/v1/completions"
    if rng.random() < 0.1:
        path, n = "/v1/embeddings", rng.randint(1, 3)
        body = {"input": [body["prompt"]] * n, "pooling": rng.choice(["last", "mean"])}
    try:
        timeout_s = rng.choice([0.02, 0.2, 60]) if leave else 120
        async with client.stream("POST", path, json=body, timeout=timeout_s) as answer:
            async for _ in answer.aiter_lines():
                if leave and rng.random() < 0.3:
                    break
    except httpx.TimeoutException:
        assert leave
    return (n if path == "/v1/completions" else 0), n


async def crowd(live: Live, count: int, seed: int, leave: bool) -> tuple[int, int]:
    rng = random.Random(seed)
    slots = asyncio.Semaphore(40)

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, int]:
        async with slots:
            return await one_of_many(client, random.Random(seed * 100_003 + number), leave)

    numbers = list(range(count))
    rng.shuffle(numbers)
    async with httpx.AsyncClient(base_url=live.url) as client:
        counts = await asyncio.gather(*(one(client, number) for number in numbers))
    return sum(generating for generating, _ in counts), sum(every for _, every in counts)


def check_conservation(live: Live, count: int) -> None:
    before = totals(live)
    generating, sequences = asyncio.run(crowd(live, count, 5, leave=False))
    calm = totals(live)
    grown = {name: calm[name] - before[name] for name in (*TOTALS, "succeeded")}
    assert grown["calls_received_total"] == grown["calls_finished_total"] == count
    assert grown["request_success_total"] == sequences
    assert grown["slo_requests_total"] == generating  # vectors are promised nothing
    asyncio.run(crowd(live, count, 6, leave=True))
    after = totals(live)
    wild = {name: after[name] - calm[name] for name in (*TOTALS, "succeeded")}
    assert wild["calls_received_total"] == wild["calls_finished_total"] <= count
    assert live.metric("toque_calls_finished_total", outcome="cancelled") > 0
    for change in (grown, wild):
        failed = change["calls_finished_total"] - change["succeeded"]
        assert change["errors_total"] == failed
        assert change["key_calls_total"] == change["calls_finished_total"]
        assert change["slo_requests_total"] <= change["request_success_total"]
        assert change["prompt_tokens_by_source_total"] == change["prompt_tokens_total"]
        assert change["key_prompt_tokens_total"] == change["prompt_tokens_total"]
        assert change["key_generation_tokens_total"] == change["generation_tokens_total"]
        assert change["http_request_duration_seconds_count"] == change["http_requests_total"]
        assert change["prompt_tokens_total"] == change["request_prompt_tokens_sum"]
        assert change["generation_tokens_total"] == change["request_generation_tokens_sum"]
        computed = change["computed_tokens_total"] - change["recomputed_tokens_total"]
        first = change["prompt_tokens_total"] - change["prefix_cache_hits_total"]
        assert computed <= first + change["generation_tokens_total"]
        if change is grown:  # all of every prompt; of the output all but the last tokens
            assert computed >= first + change["generation_tokens_total"] - sequences
    assert (
        after["held"] == 0 and after["free"] + after["cached"] == before["free"] + before["cached"]
    )
    assert live.metric("toque_anomalies_total") == 0
    assert live.metric("toque_calls_finished_total", outcome="failed") == 0


def test_counters_add_up_after_chaos(live: Live) -> None:
    check_conservation(live, 250)


@pytest.mark.long
def test_counters_add_up_after_much_chaos(live: Live) -> None:
    check_conservation(live, 2000)
