"""A format together with tools that may be called, over HTTP and by the real engine, in every form
of calls: whichever of both a tiny random model draws is whole, valid, and the same in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.serve.live import Live, serving_tiny
from tests.serve.test_api_tools import put_together

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
)
HI: Any = [{"role": "user", "content": "f or not"}]
# With letters that calls have where answers have others.
FORMATS = {"hermes": "<", "qwen3_coder": "<", "llama3_json": "pg", "mistral": "["}
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["f", "é"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS, "strict": True}}
    for name in ("f", "g")
]


@pytest.fixture(scope="module", params=FORMATS)
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def live(
    parser: str, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp(parser)
    with serving_tiny(tiny_config, folder, TEMPLATE, "--tool-call-parser", parser) as live:
        yield live


@pytest.fixture(scope="module")
def leanings(live: Live, parser: str) -> list[dict[str, float]]:
    """Logit biases under which calls come, an answer does, and either."""
    ask = {"prompt": FORMATS[parser], "add_special_tokens": False}
    letters = httpx.post(f"{live.url}/tokenize", json=ask, timeout=60).json()["tokens"]
    return [dict.fromkeys(map(str, letters), bias) for bias in (100.0, -100.0)] + [{}]


def body(**extra: Any) -> dict[str, Any]:
    ask = {"messages": HI, "tools": TOOLS, "response_format": FORM, "max_tokens": 3000}
    return {**ask, "temperature": 1, "seed": 1, "n": 4, **extra}


def whole(live: Live, **extra: Any) -> list[dict[str, Any]]:
    answer = httpx.post(live.url + CHAT, json=body(**extra), timeout=120)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def streamed(live: Live, **extra: Any) -> list[dict[str, Any]]:
    events, ask = [], body(stream=True, **extra)
    with httpx.stream("POST", live.url + CHAT, json=ask, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return [put_together(events, index) for index in range(ask["n"])]


def check(choice: dict[str, Any]) -> bool:
    """Calls or an answer, and valid; whether it is calls."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    if choice["finish_reason"] == "length":  # blanks, or one call after the other
        return bool(calls)
    assert not choice.get("warnings")
    if calls:
        assert choice["finish_reason"] == "tool_calls" and message["content"] is None
        for call in calls:
            assert call["function"]["name"] in ("f", "g")
            jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS)
        return True
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(message["content"]), ANSWER)
    return False


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_either_is_valid_and_the_same_in_a_stream(
    live: Live, leanings: list[dict[str, float]], parallel: bool, thinks: bool
) -> None:
    made = set()
    for seed, bias in enumerate(leanings):
        extra: dict[str, Any] = {"seed": seed, "parallel_tool_calls": parallel, "max_tokens": 500}
        extra["logit_bias"] = bias
        if thinks:
            extra["chat_template_kwargs"] = {"enable_thinking": True}
            extra["thinking_token_budget"] = 5 + seed
        told = whole(live, **extra)
        for choice, again in zip(told, streamed(live, **extra), strict=True):
            made.add(check(choice))
            message = choice["message"]
            assert bool(message.get("reasoning")) is thinks
            calls = [call["function"] for call in message.get("tool_calls", [])]
            assert len(calls) <= 1 or parallel
            assert [(c["name"], c["arguments"]) for c in again["tool_calls"]] == [
                (c["name"], c["arguments"]) for c in calls
            ]
            assert again["content"] == message["content"]
            assert again["finish_reason"] == choice["finish_reason"]
            assert again["warnings"] == choice.get("warnings", [])
    assert made == {True, False}, "one of both was never drawn"


def test_what_tool_choice_leaves_to_the_format(live: Live) -> None:
    """All of it, or nothing."""
    for choice in whole(live, tool_choice="none"):
        assert choice["finish_reason"] == "stop" and not check(choice)
    for forced in ("required", {"type": "function", "function": {"name": "g"}}):
        for choice in whole(live, tool_choice=forced, parallel_tool_calls=False):
            assert choice["finish_reason"] == ("tool_calls" if forced == "required" else "stop")
            (call,) = choice["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS)
            assert choice["message"]["content"] is None


def test_any_object_or_calls(live: Live, leanings: list[dict[str, float]]) -> None:
    """Of bare calls an object is none for want of their key."""
    made = set()
    for seed, bias in enumerate(leanings):
        extra = {"response_format": {"type": "json_object"}, "logit_bias": bias, "max_tokens": 400}
        for choice in whole(live, seed=seed, n=8, parallel_tool_calls=False, **extra):
            message, calls = choice["message"], choice["message"].get("tool_calls", [])
            made.add(bool(calls))
            if calls and choice["finish_reason"] == "tool_calls":
                jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), ARGUMENTS)
            elif not calls and choice["finish_reason"] == "stop":
                assert isinstance(json.loads(message["content"]), dict)
    assert False in made


def test_what_could_be_taken_for_a_call_is_refused_where_it_could(live: Live, parser: str) -> None:
    keys = {"name": {"type": "string"}, "parameters": {"type": "object"}}
    like = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": keys}}}
    answer = httpx.post(live.url + CHAT, json=body(response_format=like, max_tokens=1), timeout=60)
    if parser == "llama3_json":
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
        assert "tool_choice" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


def test_responses_have_it_too(live: Live, leanings: list[dict[str, float]]) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": ANSWER, "strict": True}}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    made = set()
    for seed, bias in enumerate(leanings):
        ask = {"logit_bias": bias, "input": HI, "text": text, "tools": tools, "seed": seed,
               "temperature": 1, "parallel_tool_calls": False,
               "store": False, "max_output_tokens": 3000}  # fmt: skip
        found = httpx.post(live.url + RESPONSES, json=ask, timeout=120).json()
        assert found["status"] == "completed", found
        (item,) = found["output"]
        made.add(item["type"])
        if item["type"] == "function_call":
            jsonschema.validate(json.loads(item["arguments"]), ARGUMENTS)
        else:
            jsonschema.validate(json.loads(item["content"][0]["text"]), ANSWER)
    assert made == {"function_call", "message"}


class Answer(BaseModel):
    name: Literal["f", "é"]
    ok: bool


class f(BaseModel):
    unit: Literal["C", "F"]
    exact: bool


def test_openai_s_parse_takes_both_at_once(live: Live) -> None:
    """pydantic models of both kinds in one call."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        found = client.chat.completions.parse(
            model="tiny", messages=HI, n=8, seed=2,
            tools=[openai.pydantic_function_tool(f)], response_format=Answer, temperature=1,
            parallel_tool_calls=False, max_tokens=3000,
        )  # fmt: skip
    for choice in found.choices:
        calls = choice.message.tool_calls or []
        if calls:
            assert isinstance(calls[0].function.parsed_arguments, f)
        else:
            assert isinstance(choice.message.parsed, Answer)
