"""`GET /v1/requests/{id}/timeline`: what it tells, whom, and for how long."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.serve.fakes import FakeEngine, ServerThread, error_of, serving, wait_for
from toque.metrics import Pace
from toque.serve.timelines import MOST_CALLS, Origin, Timelines
from toque.types import Note, NoteKind, RefusalCause, Refused, Request, SamplingParams, Slo

OWNER, OTHER, WATCHER = "key-of-owner", "key-of-other", "key-of-watcher"


def notes(start_s: float) -> tuple[Note, ...]:
    return (
        Note(NoteKind.QUEUED, start_s, start_s),
        Note(NoteKind.WAIT, start_s, start_s + 0.25, 1, 3, 0, "rows"),
        Note(NoteKind.ADMITTED, start_s + 0.25, start_s + 0.25, 4, 0, 3),
        Note(NoteKind.CHUNK, start_s + 0.25, start_s + 0.5, 4, 1, 8),
        Note(NoteKind.FIRST_TOKEN, start_s + 0.5, start_s + 0.5),
    )


def timeline(server: ServerThread, name: str, key: str = "") -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.http.get(f"/v1/requests/{name}/timeline", headers=headers)


def test_an_ended_request_tells_its_life_under_each_of_its_names() -> None:
    engine = FakeEngine(notes=notes(time.monotonic()), slos=(Slo(name="fast", ttft_s=1e-9),))
    with serving(engine) as server:
        answer = server.complete(prompt="hello", n=2, request_id="mine", slo="fast")
        told = [timeline(server, name).json() for name in (answer["id"], "mine")]
        assert told[0] == told[1] and told[0]["id"] == answer["id"]
        assert told[0]["request_id"] == "mine" and len(told[0]["sequences"]) == 2
        sequence = told[0]["sequences"][1]
        alone = timeline(server, sequence["id"]).json()
    assert alone == told[0]
    assert sequence["state"] == "ended" and sequence["finish_reason"] == "stop"
    assert sequence["prompt_tokens"] == 6 and sequence["completion_tokens"] == 6
    assert [event["kind"] for event in sequence["events"]] == [
        "queued", "wait", "admitted", "chunk", "first_token"]  # fmt: skip
    wait = sequence["events"][1]
    assert wait["reason"] == "rows" and wait["steps"] == 3
    assert wait["until_ms"] - wait["at_ms"] == pytest.approx(250, abs=0.01)
    assert sequence["waited_ms"] == {"rows": pytest.approx(250, abs=0.01)}
    assert sequence["slo"]["verdict"] == "missed" and sequence["slo"]["missed"] == ["ttft"]


def test_an_open_request_is_asked_for() -> None:
    engine = FakeEngine(paused=True, notes=notes(time.monotonic()))
    with serving(engine) as server:
        thread = threading.Thread(target=lambda: server.complete(request_id="open"))
        thread.start()
        wait_for(lambda: engine.requests())
        body = timeline(server, "open").json()
        (sequence,) = body["sequences"]
        assert sequence["state"] == "open" and len(sequence["events"]) == 5
        assert sequence["cached_tokens"] == 3 and "finish_reason" not in sequence
        engine.answer_looks = False  # in a long step: the last answer is better than none
        assert timeline(server, "open").json() == body
        engine.paused = False
        thread.join(10)
        wait_for(lambda: timeline(server, "open").json()["sequences"][0]["state"] == "ended")


def test_a_refused_request_says_why() -> None:
    refusal = Refused(id="", message="too busy", status=429, retry_after_s=3.0,
                      cause=RefusalCause.SLO)  # fmt: skip
    engine = FakeEngine(refuse=refusal, slos=(Slo(name="default", ttft_s=1.0),))
    with serving(engine) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "x", "request_id": "no"})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        (sequence,) = timeline(server, "no").json()["sequences"]
    assert sequence["finish_reason"] == "refused" and sequence["error"] == "too busy"
    assert sequence["slo"]["verdict"] == "refused"


def test_unknown_names_are_404() -> None:
    with serving() as server:
        error = error_of(timeline(server, "nobody"))
        assert error["code"] == "request_not_found" and error["param"] == "id"


def test_a_timeline_is_its_keys_and_the_watchers() -> None:
    keys = (f"{OWNER}:inference", f"{OTHER}:inference", f"{WATCHER}:metrics")
    with serving(api_key=keys) as server:
        server.http.headers["authorization"] = f"Bearer {OWNER}"
        answer = server.complete()
        del server.http.headers["authorization"]
        assert timeline(server, answer["id"], OWNER).status_code == 200
        assert timeline(server, answer["id"], WATCHER).status_code == 200
        assert timeline(server, answer["id"], OTHER).status_code == 404  # as if it were unknown
        assert timeline(server, answer["id"]).status_code == 401


def test_timelines_are_bounded_and_names_are_released() -> None:
    store = Timelines()

    def call(number: int) -> None:
        request = Request(id=f"s{number}", prompt=(1,), sampling=SamplingParams(seed=1),
                          arrived_s=0.0)  # fmt: skip
        store.opened(Origin(f"c{number}", "again"), [Pace(request)])

    for number in range(MOST_CALLS + 50):
        call(number)
    assert store.find("c49", None) is None and store.find("s49", None) is None
    assert store.find("c50", None) is not None
    latest = store.find("again", None)
    assert latest is not None and latest.origin.call_id == f"c{MOST_CALLS + 49}"
    assert len(store._by_name) == 2 * MOST_CALLS + 1 and len(store._stories) == MOST_CALLS
