"""Several engines behind one port: the same answers as one, whoever is lost on the way."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
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
    sent_tokens = 2 * sum(len(body["prompt"]) for body in bodies())  # each counts once
    assert fleet.metric("toque_prompt_tokens_total") == sent_tokens
    assert fleet.metric("toque_prompt_tokens_by_source_total") == sent_tokens
    assert fleet.metric("toque_key_prompt_tokens_total") == sent_tokens
    assert fleet.metric("toque_anomalies_total") == 0
    moved_tokens = fleet.metric(
        "toque_prompt_tokens_by_source_total", source="external_kv_transfer"
    )
    assert moved_tokens <= fleet.metric("toque_external_prefix_cache_hits_total")
    if fleet.metric("toque_engine_up", role="prefill"):
        assert moved_tokens > 0
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


# ---------------------------------------------------- death of either side, by the way of the pages

PREFILL, DECODE = "prefill", "decode"
MOMENTS = ("before", "during", "after")  # of the hand-overs of requests that are on their way
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


class Struck:
    """A server with one engine of each role, and what is asked of it while one of them dies."""

    def __init__(self, live: Live, alone: LLM) -> None:
        self.live, self._alone = live, alone
        self._pids = dict(zip((PREFILL, DECODE), live.engine_pids(), strict=True))
        self._asked = 0

    def fresh_prompts(self, count: int) -> list[list[int]]:
        """Long, and unlike all before: nothing of them is cached anywhere."""
        numbers = range(self._asked, self._asked + count)
        self._asked += count
        drawn = (random.Random(n) for n in numbers)
        return [[rng.randrange(3, 253) for _ in range(420)] for rng in drawn]

    def round(self, role: str, number: int, moment: str, count: int = 20) -> None:
        """20 requests at a time, one signal."""
        prompts = self.fresh_prompts(count)
        fetched, restarts = self._fetched(), self._restarts(role)
        unwell, missing = self._unwell(), self._pages("missing")
        if moment == "before":
            os.kill(self._pids[role], number)
        with ThreadPoolExecutor(20) as pool:
            asking = [pool.submit(self._ask, prompt) for prompt in prompts]
            if moment != "before":
                enough = fetched + (1 if moment == "during" else min(10, count // 2))
                self.live.wait_for("toque_kv_transfer_seconds_count", enough)
                os.kill(self._pids[role], number)
            answers = [future.result(300) for future in asking]
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True)
        right = [o.outputs[0].token_ids for o in self._alone.generate(prompts, params)]
        wrong = [(a.text, r) for a, r in zip(answers, right, strict=True)
                 if a.status_code == 200 and a.json()["choices"][0]["token_ids"] != r]  # fmt: skip
        assert not wrong
        unserved = [answer.status_code for answer in answers if answer.status_code != 200]
        if role == PREFILL:
            assert not unserved, "prompts are computed where they are needed"
        assert set(unserved) <= {500, 503}
        self._comes_back(role, restarts)
        assert self._unwell() == unwell + len(unserved)
        if role == PREFILL and moment == "during":
            assert self._pages("missing") > missing
        self.live.wait_idle()

    def _ask(self, prompt: list[int]) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        return httpx.post(f"{self.live.url}/v1/completions", json=body, timeout=240)

    def _comes_back(self, role: str, restarts: float) -> None:
        """Another engine takes its place, which is seen; nothing of the old one is left."""
        self.live.wait_for("toque_engine_restarts_total", restarts + 1, role=role)
        self.live.wait_for("toque_engine_up", 1, role=role)
        old = self._pids[role]
        (new,) = set(self.live.engine_pids()) - {*self._pids.values()}
        self._pids[role] = new
        assert not Path(f"/proc/{old}").exists()

    def _fetched(self) -> float:
        return self.live.metric("toque_kv_transfer_seconds_count")

    def _restarts(self, role: str) -> float:
        return self.live.metric("toque_engine_restarts_total", role=role)

    def _unwell(self) -> float:
        """Calls that did not succeed, as the metrics have it."""
        return self.live.metric("toque_errors_total")

    def _pages(self, fate: str) -> float:
        return self.live.metric("toque_kv_transfer_pages_total", fate=fate)


@pytest.mark.parametrize(
    ("transport", "number", "rounds", "count"),
    [
        ("shm", KILL, [(PREFILL, "during"), (DECODE, "after")], 20),
        ("tcp", KILL, [(PREFILL, "before"), (DECODE, "during")], 20),
        ("tcp", STOP, [(PREFILL, "during")], 20),
        *(
            pytest.param(transport, number, list(product((PREFILL, DECODE), MOMENTS)), count,
                         marks=pytest.mark.long)
            for transport, number, count in product(("shm", "tcp"), (KILL, STOP), (20, 500))
        ),
    ],
)  # fmt: skip
def test_prompts_survive_the_engine_that_computes_them(
    tiny_config: Path,
    tmp_path: Path,
    transport: str,
    number: int,
    rounds: list[tuple[str, str]],
    count: int,
) -> None:
    """And whoever loses the engine that answers is told so; nobody gets a wrong token."""
    with serving(
        str(tiny_config), tmp_path, *FLAGS, "--prefill", "1", "--decode", "1",
        "--kv-transfer", transport, "--max-num-batched-tokens", "32", "--max-num-seqs", "20",
    ) as live:  # fmt: skip
        struck = Struck(live, LLM(str(tiny_config), load_format="dummy"))
        for role, moment in rounds:
            struck.round(role, number, moment, count)
