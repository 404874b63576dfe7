"""`/dashboard/events`: asked of the engine only while somebody looks; the static files' manners."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.fakes import FakeEngine, serving, wait_for
from toque.serve.dashboard import EVENTS_PATH, PAGE_FILES, PAGE_PATHS, feed
from toque.serve.dashboard.feed import runs
from toque.serve.dashboard.recent import KEPT_S, Recent, percentiles
from toque.types import Load, Look, StepReport, StepTimes


def documents(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def looks(engine: FakeEngine) -> int:
    return sum(isinstance(message, Look) for message in engine.got)


def test_the_engine_is_asked_only_while_somebody_looks() -> None:
    engine = FakeEngine()
    with serving(engine) as server:
        server.complete()
        assert looks(engine) == 0
        with server.http.stream("GET", EVENTS_PATH) as answer:
            stream = documents(answer)
            next(stream)
            wait_for(lambda: looks(engine) >= 2)
        wait_for(lambda: server.server.app.in_progress == 0)
        seen = looks(engine)
        server.complete()
        time.sleep(4 * feed.BEAT_S)  # for what must not happen
        assert looks(engine) <= seen + 1  # one may have been on its way


def test_a_document_says_what_is_there() -> None:
    engine = FakeEngine(reply=lambda r: [97] * 400, step_s=0.01)
    with serving(engine) as server:
        server.http.post("/v1/completions", json={"prompt": ""})
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "hello", "stream": True, "max_tokens": 400}
        ) as generation:
            lines = generation.iter_lines()  # kept: an iterator that is dropped closes its stream
            next(lines)
            with httpx.stream("GET", server.url + EVENTS_PATH, timeout=10) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                shown = next(
                    d for d in documents(answer) if d["boards"] and d["boards"]["0"]["lanes"]
                )
    assert shown["state"] == "ready" and shown["model"]["name"] == "fake"
    (lane,) = shown["boards"]["0"]["lanes"]
    assert lane["prompt_tokens"] == 6 and lane["cached_tokens"] == 0 and lane["age_s"] >= 0
    assert shown["boards"]["0"]["pages"] == "1s9h90f" and shown["boards"]["0"]["tree"] == [
        [-1, 2, 2, 0], [0, 1, 0, 0]]  # fmt: skip
    assert shown["boards"]["0"]["shared"] == 1
    assert shown["errors"] == {"validation": 1}
    assert shown["calls"][0]["id"] == lane["id"] and not shown["calls"][0]["ended"]
    assert shown["steps"][-1][3] == 1  # one token was decoded


def test_the_numbers_come_while_the_engine_is_silent() -> None:
    engine = FakeEngine(answer_looks=False)
    with serving(engine) as server, server.http.stream("GET", EVENTS_PATH) as answer:
        stream = documents(answer)
        assert [next(stream)["boards"] for _ in range(3)] == [{}] * 3


def test_a_page_that_is_open_does_not_hold_up_the_end() -> None:
    with serving(FakeEngine(), shutdown_timeout=60.0) as server:
        with server.http.stream("GET", EVENTS_PATH) as answer:
            stream = documents(answer)
            next(stream)
            server.signal()
            list(stream)  # it ends
        server.thread.join(10)
        assert server.exit_code == 0


def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_WATCHERS", 3)
    with serving() as server, ExitStack() as stack:
        kept = []
        for _ in range(3):
            answer = stack.enter_context(httpx.stream("GET", server.url + EVENTS_PATH, timeout=10))
            kept.append(answer.iter_lines())
            next(kept[-1])
        with server.http.stream("GET", EVENTS_PATH) as refused:
            assert refused.status_code == 429 and "retry-after" in refused.headers


# ------------------------------------------------------------------------------------ small parts


@given(st.lists(st.integers(0, 3), max_size=400), st.integers(1, 7))
def test_runs_spell_every_cell(states: list[int], pages_per_cell: int) -> None:
    text = runs(bytes(states), pages_per_cell)
    found = re.findall(r"(\d+)([fchs])", text)
    cells = list(chain.from_iterable([letter] * int(length) for length, letter in found))
    groups = [states[at : at + pages_per_cell] for at in range(0, len(states), pages_per_cell)]
    assert cells == ["fchs"[max(group)] for group in groups]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=40))
def test_percentiles_are_those_of_the_repeated_values(pairs: list[tuple[int, int]]) -> None:
    weights: dict[float, int] = {}
    for value, times in pairs:
        weights[value] = weights.get(value, 0) + times
    flat = sorted(chain.from_iterable([value] * times for value, times in weights.items()))
    expected = [next(v for at, v in enumerate(flat, 1) if at >= share * len(flat))
                for share in (0.5, 0.95, 0.99)]  # fmt: skip
    assert percentiles(weights) == expected
    assert percentiles({}) is None


def test_recent_seconds_are_bounded_and_carry_the_load_on() -> None:
    now = [1000.0]
    recent = Recent(lambda: now[0])
    recent.step(StepReport(load=Load(running=3), times=StepTimes(run_ms=5.0), batch_tokens=9),
                {0.02: 2})  # fmt: skip
    now[0] += 10
    told = recent.since(0)
    assert [second["running"] for second in told] == [3] * 10
    assert told[0]["prompt"] == 7 and told[0]["output"] == 2 and told[1]["steps"] == 0
    now[0] += 10 * KEPT_S
    assert len(recent.since(0)) == KEPT_S - 1


def test_the_pages_files_are_strict_and_self_contained() -> None:
    """No outside host, no inline script or style, and a policy that would stop both."""
    assert set(PAGE_PATHS) == {"/", *(f"/dashboard/{name}" for name in PAGE_FILES)}
    with serving() as server:
        for path in sorted(PAGE_PATHS):
            answer = server.http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|@import|url\(", text), path
        html = server.http.get("/").text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", html)
    for name in re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', html):
        assert name in PAGE_PATHS
    for name, content in PAGE_FILES.items():
        for module in re.findall(rb'from "\./([\w.]+)"', content):
            assert module.decode() in PAGE_FILES, name
