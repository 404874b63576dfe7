"""Every field is implemented, refused by name, or a no-op on the list: nothing else passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.fakes import CONTEXT, VOCAB, ServerThread, error_of, serving
from toque.serve import fields, schema
from toque.serve.fields import NoOp, Refused

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: Any = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    TEXT: {"prompt": "x", "max_tokens": 2},
}
BOTH_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 2000}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "text", "extra": 1}}, "response_format.extra"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=a)a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar"),
    (
        {"structured_outputs": {"grammar": 'start[temperature=0.5]: "a"'}},
        "structured_outputs.grammar",
    ),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": {}}, "guided_json"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": ["x" * 2000]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * (VOCAB + 1)}, "allowed_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 10**9}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"priority": 1}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"model": 5}, "model"),
    ({"bogus": 1}, "bogus"),
    ({"bogus": None}, "bogus"),
]
TEXT_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], [10**30]]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 512, "n": 3}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"suffix": 5}, "suffix"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"messages": HI}, "messages"),
]
CHAT_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "bogus": 5}]}, "messages[0].bogus"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"max_completion_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    (
        {"chat_template_kwargs": {"add_generation_prompt": True}},
        "chat_template_kwargs.add_generation_prompt",
    ),
    ({"continue_final_message": 1}, "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving() as server:
        yield server


def refused(server: ServerThread, path: str, body: Any) -> dict[str, Any]:
    before = len(server.engine.requests())
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert len(server.engine.requests()) == before, "a refused call reached the engine"
    return error_of(answer)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("wrong,param", BOTH_WRONG, ids=lambda v: str(v)[:40])
def test_wrong_value_names_its_field(
    server: ServerThread, path: str, wrong: dict[str, Any], param: str
) -> None:
    error = refused(server, path, {**BASE[path], **wrong})
    assert error["param"] == param and param in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("wrong,param", TEXT_WRONG, ids=lambda v: str(v)[:40])
def test_wrong_completion_value(server: ServerThread, wrong: dict[str, Any], param: str) -> None:
    assert refused(server, TEXT, {**BASE[TEXT], **wrong})["param"] == param


@pytest.mark.parametrize("wrong,param", CHAT_WRONG, ids=lambda v: str(v)[:40])
def test_wrong_chat_value(server: ServerThread, wrong: dict[str, Any], param: str) -> None:
    assert refused(server, CHAT, {**BASE[CHAT], **wrong})["param"] == param


RULES = [(TEXT, n, r) for n, r in fields.COMPLETION_RULES.items()]
RULES += [(CHAT, n, r) for n, r in fields.CHAT_RULES.items()]


@pytest.mark.parametrize("path,name,rule", RULES, ids=lambda v: str(v)[:40])
def test_every_row_of_the_table_is_what_it_says(
    server: ServerThread, path: str, name: str, rule: fields.Rule
) -> None:
    """Neutral values and no-ops are answered as if absent; anything else is refused by name."""
    neutral = rule.neutral if isinstance(rule, Refused) else (None, *rule.values)
    for value in neutral:
        answer = server.http.post(path, json={**BASE[path], name: value})
        assert answer.status_code == 200, (value, answer.text)
    if isinstance(rule, NoOp) and not rule.values:
        good = {str: "x", dict: {"a": "b"}, bool: True}[rule.kind]
        assert server.http.post(path, json={**BASE[path], name: good}).status_code == 200
    error = refused(server, path, {**BASE[path], name: [["wrong"]]})
    assert error["param"] == name and f"'{name}'" in error["message"]


def test_true_is_not_one(server: ServerThread) -> None:
    """JSON's true is no 1, although Python's is."""
    refused(server, TEXT, {**BASE[TEXT], "best_of": True})
    refused(server, CHAT, {**BASE[CHAT], "store": True})
    assert server.http.post(TEXT, json={**BASE[TEXT], "length_penalty": 1}).status_code == 200


def test_tables_do_not_overlap() -> None:
    """A field has one meaning: implemented fields are in no other table."""
    assert not set(schema.CompletionBody.model_fields) & set(fields.COMPLETION_RULES)
    assert not set(schema.ChatBody.model_fields) & set(fields.CHAT_RULES)


def test_prompt_beyond_the_context_gives_both_numbers(server: ServerThread) -> None:
    for size in (CONTEXT, CONTEXT + 7):
        error = refused(server, TEXT, {"prompt": [1] * size})
        assert str(size) in error["message"] and str(CONTEXT) in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    long = [{"role": "user", "content": "x" * CONTEXT}]
    assert refused(server, CHAT, {"messages": long})["param"] == "messages"
    assert server.http.post(TEXT, json={"prompt": [1] * (CONTEXT - 1)}).status_code == 200


def test_errors_do_not_echo_huge_values(server: ServerThread) -> None:
    big = "x" * 100_000
    for body in ({"model": big}, {big: 1}, {"stop": [big]}, {"logit_bias": {big: 1}},
                 {"messages": [{"role": big, "content": ""}]}, {"user": [big]}):  # fmt: skip
        answer = server.http.post(CHAT, json={**BASE[CHAT], **body})
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000, body


def test_unknown_model_is_404_on_every_route(server: ServerThread) -> None:
    for path, body in (
        *BASE.items(),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": []}),
    ):
        answer = server.http.post(path, json={**body, "model": "nope"})
        assert answer.status_code == 404
        assert error_of(answer)["param"] == "model"


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "x", "bogus": 1}, "bogus"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_wrong_token_calls(server: ServerThread, path: str, body: Any, param: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == param


@pytest.mark.parametrize(
    "query",
    ["", "prompt=", "prompt=a&max_tokens=x", "prompt=a&bogus=1", "prompt=a&temperature=nan",
     "prompt=a&temperature=inf", "prompt=a&logit_bias=x", "prompt=a&n=0", "prompt=a&tools=1"],
)  # fmt: skip
def test_browser_form_is_checked_alike(server: ServerThread, query: str) -> None:
    answer = server.http.get("/v1/completions?" + query)
    assert answer.status_code == 400 and error_of(answer)["param"]


# --------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded",
                                          "text/plain", "nonsense", None])  # fmt: skip
def test_json_is_read_whatever_its_type_says(
    server: ServerThread, content_type: str | None
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = server.http.post(TEXT, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "content,says",
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "byte 1"),
        (b'{"prompt": nan}', "byte"),
        (b'{"prompt": "x"} x', "byte 17"),
        (b'{"prompt": "\xff"}', "byte 12"),
        (b"prompt=x", "byte"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"null", "object"),
        (b'{"temperature": 1e999, "prompt": "x"}', "range"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"prompt": "\\ud800"}', "JSON"),
    ],
)
def test_bad_json_says_where(server: ServerThread, content: bytes, says: str) -> None:
    for path in (*BASE, "/tokenize", "/detokenize"):
        answer = server.http.post(path, content=content)
        assert answer.status_code == 400
        assert says in error_of(answer)["message"]


def test_large_bodies_are_413_by_length_and_by_count() -> None:
    with serving(max_body_bytes=1000) as server:
        body = b'{"prompt": "' + b"x" * 2000 + b'"}'
        chunks = iter([body[:900], body[900:]])
        for content in (body, chunks):
            answer = server.http.post(TEXT, content=content)
            assert answer.status_code == 413
            assert "1000" in error_of(answer)["message"]
        huge = server.http.post(TEXT, content=b"x" * (20 << 20))  # told, not cut while it writes
        assert huge.status_code == 413
        assert server.http.post(TEXT, content=b'{"prompt": "x"}').status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = sorted({*schema.ChatBody.model_fields, *schema.CompletionBody.model_fields,
                *fields.CHAT_RULES, *fields.COMPLETION_RULES})  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from([TEXT, CHAT]), extra=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_body_is_a_server_error(server: ServerThread, path: str, extra: dict[str, Any]) -> None:
    """Whatever the values, the answer is 200 or a 4xx that names a field."""
    answer = server.http.post(path, json={**BASE[path], **extra, "n": 1})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert error_of(answer)["param"]
