"""Budgets of reasoning over HTTP, by the real engine: a tiny random model that thinks for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import Live, serving_tiny
from tests.serve.test_api_tools import put_together

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]<think>\n"
    "{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving_tiny(tiny_config, tmp_path_factory.mktemp("thinking"), TEMPLATE) as live:
        yield live


def body(**extra: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 200, "temperature": 1, "seed": 5, **extra}


def whole(live: Live, **extra: Any) -> dict[str, Any]:
    answer = httpx.post(live.url + CHAT, json=body(**extra), timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def thought(answer: dict[str, Any]) -> int:
    details = answer["usage"]["completion_tokens_details"]
    return int(details["reasoning_tokens"])


@pytest.mark.parametrize("budget", [0, 1, 9, 60])
def test_the_reasoning_takes_its_budget_and_the_answer_goes_on(live: Live, budget: int) -> None:
    free = whole(live, ignore_eos=True, return_token_ids=True)
    held = whole(live, ignore_eos=True, return_token_ids=True, thinking_token_budget=budget)
    assert thought(free) > 60 and not free["choices"][0]["message"]["content"]
    assert held["choices"][0]["message"]["content"]
    assert held["usage"]["completion_tokens"] == 200
    assert thought(held) <= budget, "less where it ends amid a character"
    ids, others = (a["choices"][0]["token_ids"] for a in (held, free))
    assert ids[:budget] == others[:budget] and ids != others


def test_a_budget_that_is_not_needed_changes_nothing(live: Live) -> None:
    free = whole(live, max_tokens=40, ignore_eos=True)
    held = whole(live, max_tokens=40, ignore_eos=True, thinking_token_budget=40)
    assert held["choices"] == free["choices"] and held["usage"] == free["usage"]
    off = {"chat_template_kwargs": {"enable_thinking": False}, "ignore_eos": True}
    plain = whole(live, **off)
    assert whole(live, thinking_token_budget=0, **off)["choices"] == plain["choices"]
    assert plain["choices"][0]["message"]["content"]


def test_streams_and_choices(live: Live) -> None:
    ask = body(ignore_eos=True, thinking_token_budget=12, n=2, max_tokens=40)
    told = whole(live, **ask)
    assert thought(told) <= 24
    events = []
    with httpx.stream("POST", live.url + CHAT, json={**ask, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    for choice in told["choices"]:
        streamed = put_together(events, choice["index"])
        assert streamed["content"] == choice["message"]["content"] != ""
        assert streamed.get("reasoning") == choice["message"].get("reasoning")


@pytest.mark.parametrize("budget", [0, 5, 6, 7, 8])
def test_what_is_constrained_comes_after_it(live: Live, budget: int) -> None:
    """Wherever the budget runs out, within a character too."""
    answer = whole(live, thinking_token_budget=budget, response_format=FORM)
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"ok"} and thought(answer) <= budget
    answer = whole(live, thinking_token_budget=budget, tools=[TOOL], tool_choice="required",
                   max_tokens=1500)  # fmt: skip
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "length":
        calls = choice["message"]["tool_calls"]
        assert {json.loads(c["function"]["arguments"])["ok"] for c in calls} <= {True, False}
    assert thought(answer) <= budget


def test_responses_have_it_too(live: Live) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    ask = {"input": "hi", "thinking_token_budget": 7, "text": text, "seed": 5}
    answer = httpx.post(live.url + RESPONSES, json=ask, timeout=60)
    assert answer.status_code == 200, answer.text
    output, usage = answer.json()["output"], answer.json()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] <= 7
    assert json.loads(output[-1]["content"][0]["text"]).keys() == {"ok"}


def test_a_text_held_back_for_a_stop_string_is_not_counted_twice(live: Live) -> None:
    free = whole(live, ignore_eos=True, return_token_ids=True)
    last = (free["choices"][0]["message"]["reasoning"])[8]
    held = whole(live, ignore_eos=True, thinking_token_budget=9, stop=[last + "zzz"])
    assert thought(held) <= 9


@pytest.mark.parametrize("value", [-1, "x", 1.5])
def test_what_is_no_budget_is_refused(live: Live, value: Any) -> None:
    for path, ask in ((CHAT, body()), (RESPONSES, {"input": "hi"})):
        answer = httpx.post(live.url + path, json={**ask, "thinking_token_budget": value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "thinking_token_budget"


# ------------------------------------------------------------------ an end token amid the reasoning

END = 2


def ends_early(live: Live, **extra: Any) -> dict[str, Any]:
    """The end token is all that is ever likely, and may come after ten others."""
    return whole(live, logit_bias={str(END): 100.0}, min_tokens=10, **extra)


def streamed(live: Live, **extra: Any) -> dict[str, Any]:
    events = []
    ask = body(stream=True, logit_bias={str(END): 100.0}, min_tokens=10, **extra)
    with httpx.stream("POST", live.url + CHAT, json=ask, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return put_together(events)


def test_an_end_amid_the_reasoning_is_an_end(live: Live) -> None:
    """Nothing holds the answer to anything: all of it is reasoning."""
    answer = ends_early(live)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    assert choice["message"]["reasoning"] and thought(answer) == 10
    told = streamed(live)
    assert told["finish_reason"] == "stop" and told["content"] is None
    assert told["reasoning"] == choice["message"]["reasoning"]
    ask = {"input": "hi", "logit_bias": {str(END): 100.0}, "min_tokens": 10, "seed": 5}
    made = httpx.post(live.url + RESPONSES, json={**ask, "temperature": 1}, timeout=60).json()
    assert made["status"] == "completed"
    (item,) = made["output"]
    assert item["type"] == "reasoning" and item["status"] == "completed"
    assert item["content"][0]["text"] == choice["message"]["reasoning"]


STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
BOUND: list[dict[str, Any]] = [
    {"response_format": FORM},
    {"response_format": FORM, "tools": [STRICT]},
    {"tools": [TOOL], "tool_choice": "required"},
]


@pytest.mark.parametrize("bound", BOUND, ids=["format", "format or calls", "required"])
def test_an_end_is_no_way_around_what_comes_after_the_reasoning(
    live: Live, bound: dict[str, Any]
) -> None:
    """It may not come before the answer is whole: the reasoning goes on, to its budget or a cut."""
    for told in (ends_early(live, **bound)["choices"][0], streamed(live, **bound)):
        message = told.get("message", told)
        assert told["finish_reason"] == "length" and not message["content"]
        assert message["reasoning"] and not message.get("tool_calls")
    held = {**bound, "thinking_token_budget": 12, "max_tokens": 1500, "parallel_tool_calls": False}
    for told in (ends_early(live, **held)["choices"][0], streamed(live, **held)):
        message = told.get("message", told)
        calls = message.get("tool_calls") or []
        assert told["finish_reason"] == ("tool_calls" if calls else "stop")
        texts = [c.get("function", c)["arguments"] for c in calls] or [message["content"]]
        assert json.loads(texts[0]).keys() == {"ok"}
