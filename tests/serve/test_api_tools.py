"""Tool calls and reasoning over HTTP, played by an engine that follows a transcript.

What a transcript means is written here by hand; that no cut of it changes the parts is shown by
tests/unit/test_tool_parsers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from tests.serve.fakes import (
    ByteTokenizer,
    FakeEngine,
    ServerThread,
    bytes_then_end,
    error_of,
    serving,
)

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class HermesTokenizer(ByteTokenizer):
    """Of a model whose template knows tools and reasoning, as Qwen3's does."""

    template_text = "{% if tools %}<tool_call>{% endif %}<think></think>{{ enable_thinking }}"
    template_variables = frozenset({"tools", "enable_thinking"})

    def encode_chat(self, messages: list[dict[str, Any]], /, **kw: Any) -> list[int]:
        """What a template is given, as JSON; thinking is over where it was switched off."""
        text = json.dumps({"messages": messages, **kw})
        off = "<think>\n\n</think>\n\n" if kw.get("enable_thinking") is False else ""
        return list((text + off).encode())


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def strict(properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}, days={"type": "integer"}), tool("now")]
CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Os\\"lo 😀", "days": 2}}\n</tool_call>'
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving(FakeEngine(context=8192), load_tokenizer=HermesTokenizer) as server:
        yield server


@pytest.fixture(autouse=True)
def _reset(server: ServerThread) -> None:
    server.engine.per_step = 1


def plays(server: ServerThread, text: str) -> None:
    server.engine.reply = lambda request: bytes_then_end(text)


def put_together(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice as a message, by the rules of OpenAI's chunks; asserts them."""
    message: dict[str, Any] = {"content": None, "tool_calls": [], "warnings": []}
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        delta = choice["delta"]
        message["warnings"] += choice.get("warnings", [])
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert set(call) == {"index", "id", "type", "function"}, "the first of a call"
                assert call["type"] == "function" and call["function"]["arguments"] == ""
                message["tool_calls"].append({"id": call["id"], **call["function"]})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def both(server: ServerThread, **body: Any) -> dict[str, Any]:
    """The whole answer's choice as `put_together` writes one; asserts that streams equal it."""
    choice = server.chat(**body)["choices"][0]
    told = choice["message"]
    whole = {
        "content": told["content"],
        "tool_calls": [c["function"] for c in told.get("tool_calls", [])],
        "warnings": choice.get("warnings", []),
        "finish_reason": choice["finish_reason"],
        **{k: told[k] for k in ("reasoning", "reasoning_content") if k in told},
    }
    for server.engine.per_step in (1, 2, 3, 7, 500):
        streamed = put_together(server.stream(CHAT, messages=HI, **body))
        calls = [{"name": c["name"], "arguments": c["arguments"]} for c in streamed["tool_calls"]]
        assert {**streamed, "tool_calls": calls} == {
            **whole,
            "tool_calls": [{"name": c["name"], "arguments": c["arguments"]}
                           for c in whole["tool_calls"]],
        }  # fmt: skip
    return whole


# ------------------------------------------------------------------------------------------ calls


def test_a_call_is_a_message_without_text(server: ServerThread) -> None:
    plays(server, CALL)
    told = both(server, tools=TOOLS)
    assert told["content"] is None and told["finish_reason"] == "tool_calls"
    assert [c["name"] for c in told["tool_calls"]] == ["weather"]
    assert json.loads(told["tool_calls"][0]["arguments"]) == {"city": 'Os"lo 😀', "days": 2}


def test_each_choice_that_is_read_for_calls_is_counted_once() -> None:
    """Streamed or whole, with a call or without; a chat without tools is not read."""
    engine = FakeEngine(context=8192)
    with serving(engine, load_tokenizer=HermesTokenizer, metrics_compat="vllm") as server:
        plays(server, CALL)
        server.chat(tools=TOOLS, n=2)
        server.stream(CHAT, messages=HI, tools=TOOLS)
        server.chat()
        body = {
            "input": "hi",
            "model": "fake",
            "tools": [{"type": "function", **TOOLS[0]["function"]}],
        }
        assert server.http.post("/v1/responses", json=body).status_code == 200
        plays(server, "no call")
        server.chat(tools=TOOLS)
        server.stream(CHAT, messages=HI, tools=TOOLS)
        families = text_string_to_metric_families(server.http.get("/metrics").text)
    told = next(f for f in families if f.name == "vllm:tool_call_parser_invocations")
    names = ("mode", "request_type", "outcome")
    assert {tuple(s.labels[n] for n in names): s.value for s in told.samples} == {
        ("non_streaming", "chat_completions", "tool_call"): 2,
        ("streaming", "chat_completions", "tool_call"): 1,
        ("non_streaming", "responses", "tool_call"): 1,
        ("non_streaming", "chat_completions", "no_tool_call"): 1,
        ("streaming", "chat_completions", "no_tool_call"): 1,
    }


def test_text_before_and_after_calls_is_kept(server: ServerThread) -> None:
    plays(server, f"I look.\n{CALL}\n{NOW}\nDone.")
    told = both(server, tools=TOOLS)
    assert told["content"] == "I look.\nDone." and len(told["tool_calls"]) == 2
    assert told["finish_reason"] == "tool_calls" and told["tool_calls"][1]["arguments"] == "{}"


def test_arguments_are_streamed_while_they_are_written(server: ServerThread) -> None:
    plays(server, CALL)
    events = server.stream(CHAT, messages=HI, tools=TOOLS)
    pieces = [c["function"]["arguments"] for event in events
              for c in event["choices"][0]["delta"].get("tool_calls", [])]  # fmt: skip
    assert len(pieces) > 20 and pieces[0] == ""


def test_ids_are_unique(server: ServerThread) -> None:
    plays(server, CALL + NOW)
    ids = [c["id"] for _ in range(5)
           for choice in server.chat(tools=TOOLS, n=2)["choices"]
           for c in choice["message"]["tool_calls"]]  # fmt: skip
    assert len(set(ids)) == 20 and all(i.startswith("call_") for i in ids)


def test_a_malformed_call_is_text_with_a_warning(server: ServerThread) -> None:
    text = 'Look: <tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
    plays(server, text)
    told = both(server, tools=TOOLS)
    assert told["content"] == text and told["finish_reason"] == "stop" and not told["tool_calls"]
    assert len(told["warnings"]) == 1 and "nobody" in told["warnings"][0]


def test_st18_a_cut_call_is_never_reported_as_complete(server: ServerThread) -> None:
    plays(server, CALL)
    for most in range(1, len(CALL.encode()) + 2):
        choice = server.chat(tools=TOOLS, max_tokens=most)["choices"][0]
        if most <= len(CALL.encode()):
            assert choice["finish_reason"] == "length"
    assert choice["finish_reason"] == "tool_calls"


def test_a_broken_call_does_not_end_with_tool_calls(server: ServerThread) -> None:
    plays(server, NOW + '<tool_call>{"name": "weather", "arguments": {"days": 01}}')
    told = both(server, tools=TOOLS)
    assert told["finish_reason"] == "stop" and len(told["tool_calls"]) == 2
    assert "call 1" in told["warnings"][0]


def test_at_most_one_call_where_they_are_not_parallel(server: ServerThread) -> None:
    plays(server, f"{NOW}{CALL} and more text that nobody needs")
    told = both(server, tools=TOOLS, parallel_tool_calls=False)
    assert [c["name"] for c in told["tool_calls"]] == ["now"] and told["content"] is None
    assert told["finish_reason"] == "tool_calls"
    usage = server.chat(tools=TOOLS, parallel_tool_calls=False)["usage"]
    assert usage["completion_tokens"] < len(NOW), "it stops with the call"


def test_st16_none_is_as_if_there_were_no_tools(server: ServerThread) -> None:
    plays(server, f"a {NOW} b")
    told = both(server, tools=TOOLS, tool_choice="none")
    assert told["content"] == "a b" and not told["tool_calls"] and told["finish_reason"] == "stop"
    assert "now" in told["warnings"][0]
    prompt = bytes(server.engine.requests()[-1].prompt).decode()
    assert "weather" not in prompt
    plays(server, "plain")
    assert both(server, tool_choice="none")["content"] == "plain"


def test_without_tools_markup_is_text(server: ServerThread) -> None:
    plays(server, NOW)
    assert both(server)["content"] == NOW


def test_the_template_is_given_the_tools_and_the_history(server: ServerThread) -> None:
    plays(server, "ok")
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function",
                         "function": {"name": "now", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]  # fmt: skip
    answer = server.http.post(CHAT, json={"messages": history})
    assert answer.status_code == 200, answer.text
    given = json.loads(bytes(server.engine.requests()[-1].prompt))["messages"]
    assert given[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert given[2] == {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    counted = server.http.post("/tokenize", json={"messages": HI, "tools": TOOLS}).json()
    assert '"now"' in bytes(counted["tokens"]).decode()


def test_logprobs_and_ids_cover_every_token(server: ServerThread) -> None:
    plays(server, f"a {NOW}")
    size = len(f"a {NOW}")
    body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    choice = server.chat(**body)["choices"][0]
    assert len(choice["logprobs"]["content"]) == size
    events = server.stream(CHAT, messages=HI, **body)
    logprobs = [c["logprobs"] for event in events for c in event["choices"]]
    ids = [c.get("token_ids", []) for event in events for c in event["choices"]]
    assert sum(len(p["content"]) for p in logprobs if p) == size
    assert sum(map(len, ids)) == len(choice["token_ids"])


def test_a_stop_string_ends_calls_too(server: ServerThread) -> None:
    plays(server, f"a {NOW} STOP {CALL}")
    told = both(server, tools=TOOLS, stop="STOP")
    assert told["content"] == "a" and len(told["tool_calls"]) == 1


def test_choices_keep_their_calls_apart(server: ServerThread) -> None:
    server.engine.reply = lambda request: bytes_then_end(NOW * request.choice + "x")
    events = server.stream(CHAT, messages=HI, tools=TOOLS, n=3)
    assert [len(put_together(events, i)["tool_calls"]) for i in range(3)] == [0, 1, 2]


# ---------------------------------------------------------------------------------------- refusals

FORM = "response_format.json_schema"
NO_VALUE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
ANY_OBJECT = {"type": "json_object"}
NAMED = {"type": "function", "function": {"name": "now"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "zigzag", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": 7}]}, "tools[0].function"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("f" * 5000)]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
    ({"tools": "x"}, "tools"),
    ({"tools": [None]}, "tools[0]"),
    ({"tools": [{**tool("f"), "bogus": 1}]}, "tools[0].bogus"),
    ({"tools": [tool("f")] * 1000}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
     "tools[0].function.strict"),
    ({"tools": [tool("f", a={"type": "nope", "pattern": "["})]},
     "tools[0].function.parameters.properties.a"),
    ({"tools": [tool("f", a={"anyOf": [{"type": 5}]})]},
     "tools[0].function.parameters.properties.a.anyOf[0]"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    *(({"tools": TOOLS, "tool_choice": choice, "response_format": NO_VALUE}, f"{FORM}.schema")
      for choice in ("none", "auto", "required", NAMED)),
    *(({"tools": TOOLS, "structured_outputs": {name: asked}}, f"structured_outputs.{name}")
      for name, asked in (("regex", "a|\\n.tool_call>.*"), ("choice", ["<tool_call>x"]),
                          ("grammar", 'start: "<" /[a-z]+/'))),
    ({"tools": [strict({"a": {"pattern": "["}})], "response_format": ANY_OBJECT}, "tools"),
    ({"tools": [strict({"a": {"bogus": 1}})], "response_format": ANY_OBJECT}, "tools[0]"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=lambda v: str(v)[:40])
def test_st19_wrong_tools_are_refused_by_name(
    server: ServerThread, wrong: dict[str, Any], param: str
) -> None:
    answer = server.http.post(CHAT, json={"messages": HI, **wrong})
    assert answer.status_code == 400 and error_of(answer)["param"] == param


@pytest.mark.parametrize("arguments", ["[]", "null", "7", '"Lima"', "{bad", '{"a":1}{"b":2}', 5])
def test_st21_arguments_of_the_history_are_an_object(server: ServerThread, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = server.http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("arguments", ["", None, "{}", " {} "])
def test_no_arguments_are_an_empty_object(server: ServerThread, arguments: Any) -> None:
    plays(server, "ok")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for extra in ({"content": None}, {"content": ""}, {}):
        messages = [*HI, {"role": "assistant", "tool_calls": [call], **extra}]
        assert server.http.post(CHAT, json={"messages": messages}).status_code == 200


def test_a_template_without_tools_is_no_place_for_them() -> None:
    with serving() as server:
        answer = server.http.post(CHAT, json={"messages": HI, "tools": TOOLS})
        assert answer.status_code == 400 and error_of(answer)["param"] == "tools"
        assert "--tool-call-parser" in error_of(answer)["message"]
    with serving(FakeEngine(context=8192), tool_call_parser="hermes") as server:
        plays(server, CALL)
        assert both(server, tools=TOOLS)["finish_reason"] == "tool_calls"
        prompt = bytes(server.engine.requests()[-1].prompt).decode()
        assert prompt.startswith("system: ") and '"weather"' in prompt


# --------------------------------------------------------------------------------------- reasoning


def test_reasoning_is_told_apart_and_counted(server: ServerThread) -> None:
    plays(server, "<think>\nhm, so\n</think>\n\nYes.")
    told = both(server)
    assert told["content"] == "Yes." and told["reasoning"] == told["reasoning_content"] == "hm, so"
    usage = server.chat()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}, "without its marks"
    hidden = server.chat(include_reasoning=False)["choices"][0]["message"]
    assert hidden["content"] == "Yes." and "reasoning" not in hidden


def test_st22_with_thinking_off_all_of_it_is_content(server: ServerThread) -> None:
    plays(server, "Hello <think> there")
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        told = both(server, **off)
        assert told["content"] == "Hello <think> there" and "reasoning" not in told


def test_st22_cut_inside_reasoning(server: ServerThread) -> None:
    plays(server, "<think>\nhm, so")
    told = both(server, max_tokens=12)
    assert told["content"] is None and told["finish_reason"] == "length"
    assert told["reasoning"] == "hm,"


def test_calls_come_after_reasoning(server: ServerThread) -> None:
    plays(server, f"<think>I need {NOW}</think>\n{CALL}")
    told = both(server, tools=TOOLS)
    assert len(told["tool_calls"]) == 1 and told["reasoning"] == f"I need {NOW}"


def test_a_turn_whose_reasoning_the_client_began(server: ServerThread) -> None:
    plays(server, "on</think>end")
    messages = [*HI, {"role": "assistant", "content": "<think>and so "}]
    body = {"messages": messages, "continue_final_message": True}
    message = server.http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == "on" and message["content"] == "end"


def test_a_budget_needs_reasoning_that_is_known(server: ServerThread) -> None:
    """Where thinking is off there is nothing to hold to it."""
    plays(server, "ok")
    off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 3}
    assert server.chat(**off)["choices"][0]["message"]["content"] == "ok"
    assert server.engine.requests()[-1].thinking is None
    server.chat(thinking_token_budget=3)
    asked = server.engine.requests()[-1].thinking
    assert asked is not None and (asked.num_tokens, asked.is_open) == (3, False)
    answer = server.http.post("/v1/completions", json={"prompt": "x", "thinking_token_budget": 3})
    assert answer.status_code == 400 and error_of(answer)["param"] == "thinking_token_budget"
    with serving(FakeEngine()) as plain:
        for path, ask in ((CHAT, {"messages": HI}), ("/v1/responses", {"input": "hi"})):
            answer = plain.http.post(path, json={**ask, "thinking_token_budget": 3})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "thinking_token_budget"


# -------------------------------------------------------------------------------------- real client


class Weather(BaseModel):
    city: str
    days: int


def test_openai_streams_tools(server: ServerThread) -> None:
    """The client's own helper puts the stream together and parses the arguments."""
    plays(server, f"I look.\n{CALL}")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    tools = [{**openai.pydantic_function_tool(Weather, name="weather")}]
    tools[0]["function"]["strict"] = False  # type: ignore[typeddict-item]
    with client, client.chat.completions.stream(
        model="fake", messages=HI, tools=tools  # type: ignore[arg-type]
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert {"tool_calls.function.arguments.done", "content.done"} <= kinds
    assert message.content == "I look." and message.tool_calls
    assert json.loads(message.tool_calls[0].function.arguments)["days"] == 2
    again = [*HI, message.to_dict(), {"role": "tool", "content": "4 C",
                                      "tool_call_id": message.tool_calls[0].id}]  # fmt: skip
    answer = server.http.post(CHAT, json={"messages": again})
    assert answer.status_code == 200, answer.text
