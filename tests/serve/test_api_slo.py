"""Classes of service over HTTP: how a call gets one, and what it is told when it cannot be kept."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.fakes import FakeEngine, serving
from toque.types import Abort, RefusalCause, Refused, Request, Slo

CLASSES = (Slo(name="chat", ttft_s=0.5), Slo(name="batch", deadline_s=60.0))
BODY = {"prompt": "x", "max_tokens": 2}


def engine() -> FakeEngine:
    return FakeEngine(slos=CLASSES)


def classes_of(made: FakeEngine) -> list[str | None]:
    return [got.slo and got.slo.name for got in made.got if isinstance(got, Request)]


def post(url: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**BODY, **fields}, headers=headers)


def test_a_call_names_its_class_in_the_body_or_a_header() -> None:
    made = engine()
    with serving(made) as server:
        assert post(server.url).status_code == 200
        assert post(server.url, slo="chat").status_code == 200
        assert post(server.url, {"X-SLO-Class": "batch"}).status_code == 200
        assert post(server.url, {"X-SLO-Class": "chat"}, slo="chat", n=2).status_code == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "slo": "batch", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 200
    assert classes_of(made) == [None, "chat", "batch", "chat", "chat", "batch"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"slo": "none"}),
        ({"X-SLO-Class": "none"}, {}),
        ({"X-SLO-Class": "chat"}, {"slo": "batch"}),
        ({}, {"slo": ""}),
        ({}, {"slo": 5}),
    ],
)
def test_a_class_that_is_not_there_is_refused_by_name(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    with serving(engine()) as server:
        answer = post(server.url, headers, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "slo"


def test_without_classes_the_field_is_refused() -> None:
    with serving() as server:
        answer = post(server.url, slo="chat")
        assert answer.status_code == 400 and "--slo" in answer.json()["error"]["message"]


def test_a_key_has_a_class_for_calls_that_name_none() -> None:
    made = engine()
    keys = ("for-the-night:inference,slo=batch", "for-the-day:slo=chat", "for-anything")
    with serving(made, api_key=keys) as server:
        for key in ("for-the-night", "for-the-day", "for-anything"):
            assert post(server.url, {"Authorization": f"Bearer {key}"}).status_code == 200
        asked = {"Authorization": "Bearer for-the-night"}
        assert post(server.url, asked, slo="chat").status_code == 200
    assert classes_of(made) == ["batch", "chat", None, "chat"]


def test_what_cannot_be_kept_is_429_with_the_time_to_come_again() -> None:
    made = engine()
    made.refuse = Refused(
        id="", message="not now", status=429, retry_after_s=7.2, cause=RefusalCause.SLO
    )
    with serving(made) as server:
        answer = post(server.url, slo="chat", stream=True)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "8"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_stop_string_tells_the_engine_how_much_was_kept() -> None:
    made = engine()
    with serving(made) as server:
        answer = post(server.url, stop=["ll"], max_tokens=5)
        assert answer.json()["choices"][0]["text"] == "He"
    (abort,) = [got for got in made.got if isinstance(got, Abort)]
    assert abort.kept_tokens == 4
