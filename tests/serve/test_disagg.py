"""Several engines behind one port: the same answers as one, whoever is lost on the way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import Live, serving
from toque import LLM, SamplingParams

FLAGS = ("--load-format", "dummy", "--served-model-name", "tiny")
LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 150, 300)
SEED = 11


def prompt(length: int) -> list[int]:
    return [50 + (7 * i + length) % 150 for i in range(length)]


def bodies() -> list[dict[str, Any]]:
    """Greedy and seeded, at the edges of pages and beyond a step; one prefix that many share."""
    made: list[dict[str, Any]] = []
    for number, length in enumerate(LENGTHS):
        tokens = prompt(300)[:250] + prompt(length)[:40] if number % 4 == 3 else prompt(length)
        sampled = {"temperature": 1.0, "seed": SEED} if number % 2 else {"temperature": 0}
        made.append({"model": "tiny", "prompt": tokens, "max_tokens": 24, "ignore_eos": True,
                     "return_token_ids": True, **sampled})  # fmt: skip
    return made


@pytest.fixture(scope="module")
def expected(tiny_config: Path) -> list[list[int]]:
    """What one engine answers, alone, one request at a time."""
    llm = LLM(str(tiny_config), load_format="dummy")
    out = []
    for body in bodies():
        params = SamplingParams(
            temperature=body["temperature"],
            seed=body.get("seed", 0),
            max_tokens=24,
            ignore_eos=True,
        )
        (answer,) = llm.generate([body["prompt"]], params)
        out.append(answer.outputs[0].token_ids)
    return out


def ask(live: Live, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def ask_together(live: Live, asked: list[dict[str, Any]]) -> list[list[int]]:
    """All at once, each in a thread."""
    answers: list[list[int]] = [[] for _ in asked]

    def one(index: int) -> None:
        answers[index] = ask(live, asked[index])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(
    scope="module",
    params=[
        ("--prefill", "1", "--decode", "1", "--kv-transfer", "shm"),
        ("--prefill", "1", "--decode", "1", "--kv-transfer", "tcp"),
        ("--data-parallel-size", "2"),
    ],
    ids=["shm", "tcp", "replicas"],
)
def fleet(
    request: pytest.FixtureRequest, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """Chunks of 64 tokens, and a pool that a few sequences fill: chunking and preemption are on."""
    small = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    folder = tmp_path_factory.mktemp("fleet")
    with serving(str(tiny_config), folder, *FLAGS, *small, *request.param) as live:
        yield live
        live.wait_idle()


def test_the_same_tokens_as_one_engine(fleet: Live, expected: list[list[int]]) -> None:
    """Alone, together, and again with everything cached."""
    assert [ask(fleet, body) for body in bodies()] == expected
    assert ask_together(fleet, bodies()) == expected
    if fleet.metric("toque_engine_up", role="prefill"):
        assert fleet.metric("toque_kv_transfer_pages_total", fate="moved") > 0
        assert fleet.metric("toque_kv_transfer_failed_pages_total") == 0
    fleet.wait_idle()


def kill(live: Live, role: int, number: int) -> None:
    """A signal to the engine of that place in the order of starts."""
    os.kill(live.engine_pids()[role], number)


@pytest.mark.parametrize(
    ("role", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_streams_survive_their_engine(
    tiny_config: Path, tmp_path: Path, expected: list[list[int]], role: int, number: int
) -> None:
    """16 streams, two replicas, one of which is killed or frozen: all 16 end with the right text,
    and another engine takes the place of the lost one."""
    asked = [{**body, "max_tokens": 24} for body in (bodies() + bodies())[:16]]
    flags = (*FLAGS, "--data-parallel-size", "2", "--max-num-batched-tokens", "64",
             "--max-num-seqs", "16")  # fmt: skip
    with serving(str(tiny_config), tmp_path, *flags) as live:
        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.extend(ask_together(live, asked)))
        asking.start()
        live.wait_for("toque_generation_tokens_total", 20)
        kill(live, role, number)
        asking.join(120)
        assert answers == (expected + expected)[:16]
        live.wait_for("toque_engine_restarts_total", 1)
        live.wait_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prompts_survive_the_engine_that_computes_them(
    tiny_config: Path, tmp_path: Path, expected: list[list[int]], number: int
) -> None:
    with serving(
        str(tiny_config), tmp_path, *FLAGS, "--prefill", "1", "--decode", "1",
        "--max-num-batched-tokens", "64", "--max-num-seqs", "16",
    ) as live:  # fmt: skip
        assert ask(live, bodies()[2]) == expected[2]
        kill(live, 0, number)
        assert ask_together(live, bodies()) == expected
        live.wait_for("toque_engine_restarts_total", 1)
        live.wait_idle()
