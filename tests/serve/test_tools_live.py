"""Tool calls by the real engine: a tiny random model, whose calls are right because they must be.

The cases ST… and RV23 of the public catalogue of faults (tests/serve/test_faults.py) are here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.serve.live import Live, serving_tiny
from tests.serve.test_api_tools import put_together

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% if tools %}<tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}\n{% endfor %}[assistant]"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F", 'a "b" é']},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "days", "exact"],
    "additionalProperties": False,
}


def tool(name: str = "f", parameters: dict[str, Any] = SCHEMA, **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **extra}}


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The tiny model with a template that knows tools, and a context that holds some."""
    with serving_tiny(tiny_config, tmp_path_factory.mktemp("tools"), TEMPLATE) as live:
        yield live


def body(**extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "call f"}]
    return {"messages": messages, "tools": [tool()], "max_tokens": 1500, "temperature": 0, **extra}


def whole(live: Live, **extra: Any) -> dict[str, Any]:
    answer = httpx.post(live.url + CHAT, json=body(**extra), timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(live: Live, **extra: Any) -> dict[str, Any]:
    events = []
    ask = body(stream=True, **extra)
    with httpx.stream("POST", live.url + CHAT, json=ask, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return put_together(events)


FORCED: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "f"}})


@pytest.mark.parametrize("choice", FORCED, ids=["required", "named"])
@pytest.mark.parametrize("seed", range(3))
def test_st13_streamed_arguments_are_the_whole_ones(live: Live, choice: Any, seed: int) -> None:
    extra = {"tool_choice": choice, "temperature": 1, "seed": seed, "parallel_tool_calls": False}
    told = whole(live, **extra)
    (call,) = told["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    (again,) = streamed(live, **extra)["tool_calls"]
    assert again["arguments"] == call["function"]["arguments"] and again["name"] == "f"


def test_st15_both_modes_end_in_the_same_way(live: Live) -> None:
    """As OpenAI's own: a required call ends with "tool_calls", a named one with "stop"."""
    for choice, word in zip(FORCED, ("tool_calls", "stop"), strict=True):
        extra = {"tool_choice": choice, "parallel_tool_calls": False}
        assert whole(live, **extra)["finish_reason"] == word
        assert streamed(live, **extra)["finish_reason"] == word


def test_st16_none_makes_no_call(live: Live) -> None:
    told = whole(live, tool_choice="none", max_tokens=40)
    assert not told["message"].get("tool_calls") and told["finish_reason"] != "tool_calls"
    assert whole(live, tools=None, tool_choice="none", max_tokens=2)


def test_st18_a_cut_call_ends_with_length(live: Live) -> None:
    for most in (1, 5, 12, 30, 50):
        for told in (whole, streamed):
            found = told(live, tool_choice="required", max_tokens=most)
            assert found["finish_reason"] == "length"


def test_st19_malformed_tools_are_400_and_nothing_dies(live: Live) -> None:
    bad_pattern = tool("f", {"type": "object", "properties": {"a": {"pattern": "["}}})
    wrong: list[Any] = [
        [{"type": "function"}],
        [{"type": "zigzag"}],
        [None],
        "x",
        [tool("f" * 999)],
    ]
    for choice in ("auto", "required"):
        for tools in (*wrong, [bad_pattern]):
            ask = body(tools=tools, tool_choice=choice, max_tokens=8)
            answer = httpx.post(live.url + CHAT, json=ask, timeout=60)
            if choice == "auto" and tools == [bad_pattern]:
                assert answer.status_code == 200, "only shown: nobody reads the pattern"
                continue
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].startswith("tools")
    assert whole(live, max_tokens=1)


@pytest.mark.parametrize("text", ["to search", 'Folder.\nNever "none" or {x}', '你"}\\', ""])
def test_st24_descriptions_are_only_words(live: Live, text: str) -> None:
    path = {"enum": ["a", "b"], "description": text}
    parameters = {**SCHEMA, "properties": {"path": path}, "required": ["path"]}
    for extra in ({"tool_choice": "required"}, {}):
        tools = [tool("glob", parameters, description=text, strict=True)]
        told = whole(live, tools=tools, parallel_tool_calls=False, **extra)
        for call in told["message"].get("tool_calls", []):
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
        assert extra == {} or told["finish_reason"] == "tool_calls"


def test_rv23_a_history_of_calls_is_replayed(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"a":"é"}'}}
    for extra in ({"content": None}, {"content": ""}, {}):
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "tool_calls": [call], **extra},
            {"role": "tool", "tool_call_id": "c1", "content": "4 C"},
        ]
        assert whole(live, messages=messages, max_tokens=4)
        assert whole(live, messages=messages, tools=None, max_tokens=4)


# ------------------------------------------------------------------------------------ real clients


class Weather(BaseModel):
    """The weather of some days."""

    unit: Literal["C", "F"]
    days: int = Field(ge=0, le=9)


def test_openai_parses_pydantic_tools(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        asked: dict[str, Any] = {
            "model": "tiny", "messages": body()["messages"], "tool_choice": "required",
            "tools": [openai.pydantic_function_tool(Weather)], "max_tokens": 1500, "temperature": 1,
            "parallel_tool_calls": False, "seed": 5,
        }  # fmt: skip
        parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        assert parsed and isinstance(parsed[0].function.parsed_arguments, Weather)
        with client.chat.completions.stream(**asked) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        assert done[0].parsed_arguments == parsed[0].function.parsed_arguments


def test_langchain_calls_a_local_function(live: Live) -> None:
    """The loop of an agent: the model calls, we compute, the model is told, and answers."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool

    @as_tool(args_schema=Weather)
    def weather(unit: str, days: int) -> str:
        """The weather of some days."""
        return f"{days * 2} {unit}"

    model = langchain.ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="x", model="tiny", max_tokens=1500, temperature=1, seed=3
    )
    only: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    caller = model.bind_tools([weather], strict=True, **only)
    messages: list[Any] = [HumanMessage("How is the weather?")]
    for _ in range(2):
        answer = caller.invoke(messages)
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and call["args"]["unit"] in ("C", "F")
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage) and result.content
        messages += [answer, result]
    items = langchain.ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="x", model="tiny", temperature=1, use_responses_api=True
    ).bind_tools([weather], strict=True, **only)
    (called,) = items.invoke(messages, max_tokens=1500).tool_calls
    assert called["name"] == "weather"
    last = model.bind(max_tokens=5).invoke(messages)
    assert not last.tool_calls and last.response_metadata["finish_reason"] == "length"
    chunks = list(caller.stream(messages))
    whole_call = sum(chunks[1:], chunks[0]).tool_calls
    assert [c["name"] for c in whole_call] == ["weather"]
