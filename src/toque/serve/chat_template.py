"""Chat messages to one prompt string, by the model's own Jinja template.

Owns: the compiled templates. Knows: the variables, filters and functions that templates rely on.
Does not know: token ids.

The dialect is that of Hugging Face's `apply_chat_template`
(https://huggingface.co/docs/transformers/chat_templating_writing). A template comes with the model
and is not trusted: it runs in a sandbox, and its time and its output are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from toque.errors import ModelError, RequestError
from toque.serve.sandbox import TimedSandbox

MAX_RENDERED_CHARS = 32 << 20  # twice the largest request body that is taken by default
MAX_RENDER_S = 10.0
# Set by the server; `chat_template_kwargs` of a request may not.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
)
# What odd messages make a template raise, besides Jinja's own errors.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """The model's templates, compiled once. Rendering changes nothing: threads may share it."""

    def __init__(
        self,
        templates: Mapping[str, str],
        tokens: Mapping[str, str],
        max_chars: int = MAX_RENDERED_CHARS,
        max_s: float = MAX_RENDER_S,
    ) -> None:
        """`templates` by name, `tokens` by variable (bos_token, …).

        Raises ModelError for a template that does not compile.
        """
        self._sandbox = _environment()
        self._max_s = max_s
        self._templates = {n: _compile(self._sandbox, n, s) for n, s in templates.items()}
        self._tokens = dict(tokens)
        self._max_chars = max_chars
        self.text = "\n".join(templates.values())
        self.variables = frozenset().union(
            *(meta.find_undeclared_variables(self._sandbox.parse(s)) for s in templates.values())
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, in OpenAI's form; `kwargs` are further template variables.

        Content that is a list of text parts is joined by newlines; tool call arguments, which
        OpenAI sends as a JSON string, reach the template as objects; fields that are null are
        left out. With `continue_final_message` the prompt ends with the last message's content.
        Raises RequestError for other parts and for whatever the template objects to.
        """
        _refuse_reserved(kwargs)
        template = self._choose(tools)
        context = {"documents": None, **self._tokens, **kwargs}
        context["messages"] = [_plain_message(i, m) for i, m in enumerate(messages)]
        context |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            with self._sandbox.limited(self._max_s):
                text = self._bounded(template, context)
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error
        return _without_end(text, context["messages"]) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(f"this model has no default chat template, only {names}", "messages")
        return self._templates["default"]

    def _bounded(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        size_chars = 0
        for piece in template.generate(context):
            size_chars += len(piece)
            if size_chars > self._max_chars:
                raise RequestError(
                    f"the rendered chat is longer than {self._max_chars} characters", "messages"
                )
            pieces.append(piece)
        return "".join(pieces)


def _without_end(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message's content, which templates may have trimmed."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str) and content.strip():
        for form in (content, content.rstrip(), content.strip()):
            place = text.rfind(form)
            if place >= 0:
                return text[: place + len(form)]
    raise RequestError(
        "'continue_final_message' needs a last message with text that the model's chat template "
        "shows as it is",
        "continue_final_message",
    )


def _refuse_reserved(kwargs: Mapping[str, Any]) -> None:
    reserved = sorted(RESERVED_VARIABLES & kwargs.keys())
    if reserved:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs"
        )


# --------------------------------------------------------------------------------- messages


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    # Templates ask whether a field is there; most print a null as "None".
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(_part_text(index, part) for part in plain["content"])
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(index, call) for call in plain["tool_calls"]]
    return plain


def _part_text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"messages[{index}].content has a part of type {kind!r}; this server reads only 'text'",
            "messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"messages[{index}].content has a text part without a text", "messages")
    return text


def _plain_call(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parse_arguments(index, function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(index: int, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"messages[{index}].tool_calls has arguments that are not a JSON object", "messages"
        )
    return arguments


# ---------------------------------------------------------------------------------- dialect


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> TimedSandbox:
    environment = TimedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the model's chat template {name!r} does not compile: line {error.lineno}: {error}"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escapes, and characters stay as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
