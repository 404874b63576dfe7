"""`/v1/responses`, by hand and by the real client: items, the order of events, what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from pydantic import BaseModel

from tests.serve.fakes import FakeEngine, ServerThread, bytes_then_end, error_of, serving
from tests.serve.test_api_tools import CALL, NOW, HermesTokenizer
from toque.serve.responses.store import ResponseStore, Stored
from toque.types import FinishReason

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather",
     "parameters": {"type": "object", "properties": {"city": {"type": "string"},
                                                     "days": {"type": "integer"}}}},
    {"type": "function", "name": "now", "description": "The time.", "parameters": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving(FakeEngine(context=8192), load_tokenizer=HermesTokenizer) as server:
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    server.engine.per_step = 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def plays(server: ServerThread, text: str) -> None:
    server.engine.reply = lambda request: bytes_then_end(text)


def create(server: ServerThread, given: Any = "hi", **extra: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json={"input": given, **extra})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(server: ServerThread, given: Any = "hi", **extra: Any) -> list[dict[str, Any]]:
    """The events; asserts their numbers, and that each says its own type."""
    ask = {"input": given, "stream": True, **extra}
    with server.http.stream("POST", PATH, json=ask) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def asked(server: ServerThread) -> Any:
    """The messages that the template got."""
    return json.loads(bytes(server.engine.requests()[-1].prompt).decode())


def without_ids(value: Any) -> Any:
    """What two answers of the same text share."""
    if isinstance(value, dict):
        drop = ("id", "call_id", "created_at", "completed_at")
        return {k: without_ids(v) for k, v in value.items() if k not in drop}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------- shapes


def test_a_text(server: ServerThread) -> None:
    plays(server, "Hello")
    body = create(server, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    assert body["id"].startswith("resp_") and body["object"] == "response"
    assert body["status"] == "completed" and body["error"] is None
    assert body["incomplete_details"] is None and body["metadata"] == {"a": "b"}
    assert body["instructions"] == "Be kind." and body["temperature"] == 0.5
    (item,) = body["output"]
    assert item["type"] == "message" and item["role"] == "assistant"
    assert item["status"] == "completed" and item["id"].startswith("msg_")
    text = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item["content"] == [text]
    assert body["usage"]["output_tokens"] == 6 and body["usage"]["total_tokens"] > 6
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    roles = [(m["role"], m["content"]) for m in asked(server)["messages"]]
    assert roles == [("system", "Be kind."), ("user", "hi")]


def test_a_cut_answer_is_incomplete(server: ServerThread) -> None:
    plays(server, "Hello")
    body = create(server, max_output_tokens=2)
    assert body["status"] == "incomplete" and body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream(server, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_nothing_said_is_an_empty_text(server: ServerThread) -> None:
    plays(server, "")
    assert create(server)["output"][0]["content"][0]["text"] == ""


def test_items_in_the_order_in_which_they_were_written(server: ServerThread) -> None:
    plays(server, f"<think>hm</think>I look.\n{CALL}\n{NOW}\nDone.")
    output = create(server, tools=TOOLS)["output"]
    kinds = [item["type"] for item in output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[0]["summary"] == []
    assert output[2]["name"] == "weather" and json.loads(output[2]["arguments"])["days"] == 2
    assert output[3]["arguments"] == "{}" and output[3]["call_id"] != output[2]["call_id"]
    assert output[4]["content"][0]["text"] == "Done."


EVENTS = """
created in_progress
output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done
output_item.done
output_item.added content_part.added output_text.delta output_text.done content_part.done
output_item.done
output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
completed
""".split()  # noqa: SIM905


@pytest.mark.parametrize("per_step", [1, 3, 500])
def test_events_come_in_order_and_end_with_the_whole(server: ServerThread, per_step: int) -> None:
    server.engine.per_step = per_step
    plays(server, f"<think>hm</think>I look.\n{CALL}")
    events = stream(server, tools=TOOLS)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [k for k, before in zip(kinds, ["", *kinds], strict=False) if k != before]
    assert once == EVENTS
    final = events[-1]["response"]
    server.engine.per_step = 1
    assert without_ids(final) == without_ids(create(server, tools=TOOLS))
    for index, item in enumerate(final["output"]):
        mine = [e for e in events if e.get("output_index") == index]
        assert mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"] == item
        assert {e["item_id"] for e in mine if "item_id" in e} == {item["id"]}
        told = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
        assert told == (item.get("arguments") or item["content"][0]["text"])
    assert (
        events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    )


def test_a_broken_call_is_incomplete_and_said(server: ServerThread) -> None:
    plays(server, '<tool_call>{"name": "now", "arguments": {"a": 01}} and more')
    body = create(server, tools=TOOLS)
    assert body["output"][0]["status"] == "incomplete" and len(body["warnings"]) == 1
    assert body["output"][1]["content"][0]["text"].startswith("01}")


def test_a_failure_in_the_middle_is_the_last_event() -> None:
    engine = FakeEngine()
    advance = engine._advance

    def fail(row: Any) -> list[Any]:
        events = advance(row)
        if row.done == 3:
            finished = engine._finished(row, FinishReason.ERROR)
            engine.running.pop(row.request.id)
            return [*events, structs.replace(finished, error="not a number")]
        return events

    engine._advance = fail  # type: ignore[method-assign]
    with serving(engine) as server:
        events = stream(server)
        assert "".join(e.get("delta", "") for e in events) == "Hel"
        last = events[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        error = {"code": "engine_error", "message": "not a number"}
        assert last["response"]["error"] == error
        assert server.http.get(f"{PATH}/{last['response']['id']}").status_code == 404
        assert server.http.post(PATH, json={"input": "x"}).status_code == 500


# ----------------------------------------------------------------------------------------- input


def test_items_of_an_assistant_are_one_turn(server: ServerThread) -> None:
    plays(server, "ok")
    create(
        server,
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now",
             "arguments": '{"a": 1}', "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "function_call_output", "call_id": "c2", "output": "noon too"},
        ],
    )  # fmt: skip
    messages = asked(server)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool"]
    turn = messages[2]
    assert turn["content"] == "I look." and turn["reasoning_content"] == "hm"
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == [{"a": 1}, {}]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "noon"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "x", "bogus": 1}]}, "input[0].bogus"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
     "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"bogus": 1}, "bogus"),
    ({"background": True}, "background"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "zigzag"}}}},
     "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"bogus": 1}}, "reasoning.bogus"),
    ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
    ({"temperature": 3}, "temperature"),
    *(({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": []}}},
        "tools": TOOLS, "tool_choice": choice}, "text.format.schema")
      for choice in ("none", "auto", "required")),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=lambda v: str(v)[:50])
def test_wrong_fields_are_refused_by_name(
    server: ServerThread, wrong: dict[str, Any], param: str
) -> None:
    before = len(server.engine.requests())
    answer = server.http.post(PATH, json={"input": "hi", **wrong})
    assert answer.status_code == 400 and error_of(answer)["param"] == param, answer.text
    assert len(server.engine.requests()) == before


def test_a_format_becomes_a_grammar_after_the_reasoning(server: ServerThread) -> None:
    plays(server, '<think>hm</think>{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    create(server, text={"format": form}, reasoning={"effort": "high"})
    grammar = server.engine.requests()[-1].grammar
    assert grammar is not None and json.loads(grammar.text) == schema
    assert grammar.after == "</think>" and asked(server)["enable_thinking"] is True
    create(server, text={"format": form}, reasoning={"effort": "none"})
    grammar = server.engine.requests()[-1].grammar
    assert grammar is not None and grammar.after == ""


# ------------------------------------------------------------------------------------------- store


def test_a_conversation_goes_on_from_what_is_stored(server: ServerThread) -> None:
    plays(server, f"I look.{NOW}")
    first = create(server, "When?", tools=TOOLS, instructions="Once.")
    plays(server, "Noon.")
    call_id = first["output"][1]["call_id"]
    answered = [{"type": "function_call_output", "call_id": call_id, "output": "12:00"}]
    second = create(server, answered, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    messages = asked(server)["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"], (
        "instructions are not kept"
    )
    third = create(server, "Sure?", previous_response_id=second["id"])
    assert [m["content"] for m in asked(server)["messages"]] == [
        "When?", "I look.", "12:00", "Noon.", "Sure?",
    ]  # fmt: skip
    assert server.http.get(f"{PATH}/{third['id']}").json() == third
    listed = server.http.get(f"{PATH}/{third['id']}/input_items").json()
    assert listed["data"] == [{"type": "message", "role": "user", "content": "Sure?"}]
    gone = server.http.delete(f"{PATH}/{third['id']}")
    assert gone.json() == {"id": third["id"], "object": "response", "deleted": True}
    for again in (server.http.get, server.http.delete):
        assert again(f"{PATH}/{third['id']}").status_code == 404
    cancelled = server.http.post(f"{PATH}/{second['id']}/cancel")
    assert cancelled.status_code == 400 and "background" in error_of(cancelled)["message"]


def test_what_shall_not_be_stored_is_not(server: ServerThread) -> None:
    plays(server, "Hello")
    for body in (create(server, store=False), stream(server, store=False)[-1]["response"]):
        assert body["store"] is False
        assert server.http.get(f"{PATH}/{body['id']}").status_code == 404
    kept = stream(server)[-1]["response"]
    assert server.http.get(f"{PATH}/{kept['id']}").json() == kept


def test_each_key_has_its_own(server: ServerThread) -> None:
    with serving(api_key=("first-key", "second-key")) as guarded:
        first, second = ({"authorization": f"Bearer {k}-key"} for k in ("first", "second"))
        made = guarded.http.post(PATH, json={"input": "x"}, headers=first).json()
        url = f"{PATH}/{made['id']}"
        assert guarded.http.get(url, headers=first).status_code == 200
        assert guarded.http.get(url, headers=second).status_code == 404
        assert guarded.http.delete(url, headers=second).status_code == 404
        ask = {"input": "x", "previous_response_id": made["id"]}
        answer = guarded.http.post(PATH, json=ask, headers=second)
        assert answer.status_code == 400
        assert guarded.http.get(url).status_code == 401


def test_the_store_is_bounded_and_forgets_the_oldest() -> None:
    def stored(size: int) -> Stored:
        return Stored(b"x" * size, b"", b"")

    store = ResponseStore(max_entries=3, max_bytes=100)
    for name in "abcd":
        store.put(b"", name, stored(10))
    assert store.get(b"", "a") is None and len(store) == 3
    assert store.get(b"", "b") is not None  # used: now c is the oldest
    store.put(b"", "e", stored(90))
    assert len(store) == 2 and store.get(b"", "c") is None and store.get(b"", "b") is not None
    store.put(b"", "f", stored(101))
    assert store.get(b"", "f") is None
    assert store.get(b"other", "b") is None and not store.delete(b"other", "b")
    empty = ResponseStore(max_entries=0, max_bytes=100)
    empty.put(b"", "a", stored(1))
    assert len(empty) == 0


# -------------------------------------------------------------------------------------- real client


class Weather(BaseModel):
    city: str
    days: int


def test_openai_creates_streams_and_goes_on(server: ServerThread, client: openai.OpenAI) -> None:
    plays(server, "Hello there")
    made = client.responses.create(model="fake", input="hi")
    assert made.output_text == "Hello there" and made.usage and made.usage.output_tokens == 12
    on = client.responses.create(model="fake", input="more", previous_response_id=made.id)
    assert on.previous_response_id == made.id
    assert client.responses.retrieve(on.id).output_text == "Hello there"
    assert client.responses.input_items.list(on.id).data[0].type == "message"
    client.responses.delete(on.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(on.id)
    with client.responses.stream(model="fake", input="hi") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_text == "Hello there" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds


def test_openai_parses_tools(server: ServerThread, client: openai.OpenAI) -> None:
    plays(server, f"<think>hm</think>I look.\n{CALL}")
    tools: Any = [openai.pydantic_function_tool(Weather, name="weather")]
    flat = [{"type": "function", **tools[0]["function"]}]
    with client.responses.stream(model="fake", input="hi", tools=flat) as events:  # type: ignore[arg-type]
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} <= kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call = final.output[2]
    assert call.type == "function_call" and json.loads(call.arguments)["days"] == 2
    # What came out goes in again as it is.
    again: Any = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(exclude_none=True) for item in final.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "4 C"},
    ]
    plays(server, "It is 4 C.")
    assert client.responses.create(model="fake", input=again).output_text == "It is 4 C."


def test_openai_parses_a_format(server: ServerThread, client: openai.OpenAI) -> None:
    plays(server, '{"city": "Oslo", "days": 2}')
    parsed = client.responses.parse(
        model="fake", input="hi", text_format=Weather, reasoning={"effort": "none"}
    )
    assert parsed.output_parsed == Weather(city="Oslo", days=2)


def test_a_client_that_leaves_ends_its_response(server: ServerThread) -> None:
    server.engine.step_s, server.engine.per_step = 0.02, 1
    plays(server, "x" * 400)
    try:
        with server.http.stream("POST", PATH, json={"input": "x", "stream": True}) as answer:
            next(answer.iter_lines())
    finally:
        server.engine.step_s = 0.0
    for _ in range(500):
        if not server.engine.running:
            break
        httpx.get(f"{server.url}/health")
    assert not server.engine.running
