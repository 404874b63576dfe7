"""Chat messages to a prompt: the same string as Hugging Face's, or a refusal that says why."""

# ruff: noqa: E501 (the published template has long lines)

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from toque.errors import ModelError, RequestError
from toque.serve.chat_template import ChatTemplate

# As published with SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct (both Apache-2.0).
SMOLLM2 = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# What else templates in the wild use: loop controls, generation, dates, JSON options, sandboxed methods.
DIALECT = r"""{%- set ns = namespace(count=0) -%}
{{ bos_token }}{% for message in messages %}
    {% if message.role == "skip" %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message.role == "assistant" %}
[{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}]
    {% else %}
<{{ message.role | upper }}>{{ message.content.strip().split("|")[0] }}
    {% endif %}
{% endfor %}
{{ ns.count }} {{ {"b": "<é>", "a": [1, none]} | tojson }} {{ {"b": 1, "a": "é"} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}
{{ tools is none }} {{ documents is none }} {{ undefined_name is defined }} {{ enable_thinking }}
{{- strftime_now("%Y") }}
"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <now> & "here", in °C',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHAT = [
    {"role": "system", "content": "Be <brief> & ünïque."},
    {"role": "user", "content": "  hi 🧑‍🚀|there\n"},
    {"role": "assistant", "content": " KEEPME </think> tail "},
    {"role": "user", "content": "日本"},
]
CALLS = [
    {"role": "user", "content": "Weather in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Ålesund", "days": [1, 2]}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "4 °C"},
    {"role": "tool", "tool_call_id": "call_1", "content": "windy"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def by_hugging_face(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def render(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return ChatTemplate({"default": template}, TOKENS).render(messages, **kwargs)


def refusal(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(template, messages, **kwargs)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]], ids=["all", "no system", "one"])
@pytest.mark.parametrize("template", [SMOLLM2, QWEN, DIALECT], ids=["smollm2", "qwen", "dialect"])
def test_equals_hugging_face(
    template: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    kwargs = {"add_generation_prompt": add_generation_prompt, "enable_thinking": False}
    assert render(template, messages, **kwargs) == by_hugging_face(template, messages, **kwargs)


def test_equals_hugging_face_with_tools() -> None:
    kwargs = {"tools": TOOLS, "add_generation_prompt": True}
    expected = by_hugging_face(QWEN, CALLS, **kwargs)
    assert "<tool_call>" in expected
    assert "Ålesund" in expected
    assert render(QWEN, CALLS, **kwargs) == expected


def test_arguments_sent_as_a_json_string_read_as_the_object_that_they_say() -> None:
    text = json.dumps(CALLS)
    as_openai = json.loads(text)
    function = as_openai[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert render(QWEN, as_openai, tools=TOOLS) == render(QWEN, CALLS, tools=TOOLS)
    assert isinstance(function["arguments"], str), "the caller's messages are not touched"


@pytest.mark.parametrize("arguments", ["{", "[1]", "nonsense", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    error = refusal(QWEN, [{"role": "assistant", "tool_calls": [call]}])
    assert (error.param, "messages[0].tool_calls" in str(error)) == ("messages", True)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = render(QWEN, [{"role": "user", "content": parts}])
    assert joined == render(QWEN, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
        ({"type": "input_audio"}, "'input_audio'"),
        ("bare", "'str'"),
        ({"type": "text", "text": 1}, "without a text"),
        ({"type": "text"}, "without a text"),
    ],
)
def test_other_parts_are_refused_by_name(part: object, says: str) -> None:
    error = refusal(QWEN, [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}])
    assert error.param == "messages"
    assert "messages[1].content" in str(error)
    assert says in str(error)


def test_what_the_template_raises_reaches_the_client() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}", CHAT)
    assert (error.param, "roles must alternate" in str(error)) == ("messages", True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].absent + 'x' }}",
        "{{ messages[99].content.x }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999) %}{% endfor %}",
    ],
)
def test_no_failure_of_a_template_is_a_fault_of_the_server(template: str) -> None:
    """Odd messages and forbidden operations alike: 400, not an exception of Python's."""
    assert refusal(template, CHAT).param == "messages"


def test_a_user_message_without_content_is_refused_in_the_template_s_words() -> None:
    assert "content" in str(refusal(QWEN, [{"role": "user", "content": None}]))


def test_output_is_bounded() -> None:
    template = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    bounded = ChatTemplate({"default": template}, {}, max_chars=1000)
    assert len(bounded.render([{"content": "a"}])) == 1000
    with pytest.raises(RequestError, match="1000 characters"):
        bounded.render([{"content": "ab"}])


def test_a_request_may_not_replace_what_the_server_sets() -> None:
    for name in ("bos_token", "eos_token", "messages"):
        with pytest.raises(RequestError, match=name) as caught:
            ChatTemplate({"default": QWEN}, TOKENS).render(CHAT, **{name: "x"})
        assert caught.value.param == "chat_template_kwargs"


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([]) == "plain"
    assert template.render([], tools=TOOLS) == "tools"
    with pytest.raises(RequestError, match="no default chat template, only rag"):
        ChatTemplate({"rag": "x"}, {}).render([])


def test_a_template_that_does_not_compile_is_the_model_s_fault() -> None:
    with pytest.raises(ModelError, match=r"line 2.*(endfor|end of template)"):
        ChatTemplate({"default": "{% for m in messages %}\n{{ m }}"}, {})


def test_dates_are_today_s() -> None:
    year = render("{{ strftime_now('%Y') }}", [])
    assert abs(int(year) - datetime.now().year) <= 1


# ------------------------------------------------------------------------ continue and time


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"


def test_the_final_message_is_left_open() -> None:
    messages = [{"role": "user", "content": "same"}, {"role": "assistant", "content": " same \n"}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>same</>\n<assistant>same"


@pytest.mark.parametrize("content", ["", "  ", None, "hidden"])
def test_what_cannot_be_continued_is_refused(content: str | None) -> None:
    template = "{% for m in messages if m.content != 'hidden' %}{{ m.content }};{% endfor %}"
    error = refusal(
        template, [{"role": "assistant", "content": content}], continue_final_message=True
    )
    assert error.param == "continue_final_message"


LOOPS = "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOPS + ENDS,
        LOOPS + "{{ a }}" + ENDS,
        LOOPS.replace("999", "99999") + ENDS,
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}"
        "{{ f(30) }}",
        "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(template: str) -> None:
    chat = ChatTemplate({"default": template}, {}, max_s=0.2)
    with pytest.raises(RequestError, match=r"too long|recursion"):
        chat.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "expression", ["'x' * 10**9", "10**9 * [1]", "9 ** 999999", "3 ** 10000000"]
)
def test_products_are_bounded(expression: str) -> None:
    with pytest.raises(RequestError, match="too large"):
        ChatTemplate({"default": "{{ (" + expression + ") | length }}"}, {}).render([])


def test_loops_are_those_of_jinja_all_the_same() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.previtem.content if loop.previtem }}{{ loop.nextitem.content if loop.nextitem }};"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for x in missing %}{% endfor %}{% for x in {'q': 1} %}{{ x }}{% endfor %}"
        "{% for c in 'ab' %}{{ loop.cycle(1, 2) }}{{ c }}{% endfor %}"
    )
    one = {"role": "u", "content": "p"}
    for messages in ([one], [one, {"role": "u", "content": "q"}]):
        assert render(template, messages) == by_hugging_face(template, messages)
