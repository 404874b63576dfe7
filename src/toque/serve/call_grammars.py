"""The grammar that makes an answer hold calls of the offered tools, in the model's own format.

Owns: nothing. Knows: how each format writes a call. Does not know: how grammars are compiled.

A call that must be made is always constrained, to the tool's schema. One that may be made is, where
a tool is `strict`; the text around it stays free. Where the text is held to a format, an answer is
either that or calls, and its beginning tells which: so no answer may begin like a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from toque.errors import RequestError
from toque.serve.failures import short
from toque.serve.formats import Formats
from toque.serve.offer import Offer, Tool
from toque.serve.tools.xml_calls import types_of
from toque.structured.calls import call_grammar
from toque.structured.grammar import inline_schema, literal, quoted
from toque.structured.schema import SchemaError, check_schema, moved
from toque.types import Grammar, GrammarKind, TokenId

Markers = Mapping[str, TokenId]
Rules = Callable[[str, Tool, Mapping[str, Any], Markers], list[str]]
_ANY_OBJECT = {"type": "object"}
_FREE_TEXT_KEYS = frozenset({"type", "description", "title", "default", "examples"})
_XML_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$defs",
     "definitions", "$schema"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a format writes a block of calls; `rules`: one tool's rules, the first is named."""

    trigger: str
    opening: str
    closing: str
    rules: Rules
    separator: str | None = None
    loose: Callable[[Tool], Mapping[str, Any]] = lambda tool: _ANY_OBJECT  # if it is not strict


def is_constrained(offer: Offer) -> bool:
    if offer.mode == "auto":
        return any(tool.strict for tool in offer.tools)
    return offer.mode in ("required", "named")


def grammar_of_calls(offer: Offer, formats: Formats, after: str, markers: Markers) -> Grammar:
    """`after`: the end of the reasoning that comes first. Raises RequestError, naming the tool."""
    return _calls(offer, _shape(formats), offer.mode != "auto", after, markers)


def calls_instead(offer: Offer, formats: Formats, markers: Markers) -> str:
    """Grammar.calls: calls and nothing else. Raises RequestError, naming the tool."""
    shape = _shape(formats)
    if not shape.trigger:
        shape = replace(shape, rules=_json_rules)
    return _calls(offer, shape, True, "", markers).text


def call_beginnings(offer: Offer, formats: Formats) -> list[str]:
    """What an answer in JSON may not begin with, where calls may come instead of it."""
    shape = _shape(formats)
    return [shape.trigger] if shape.trigger else [_bare_head(tool.name) for tool in offer.callable]


def without_calls(answer: Grammar) -> Grammar | None:
    """Of the answers, those that cannot begin like a bare call: objects without its key
    `parameters`. None: there are none, or nobody can tell."""
    schema = json.loads(answer.text) if answer.kind is GrammarKind.JSON_SCHEMA else None
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        return None
    declared = schema.get("properties", {})
    if "parameters" in declared or "parameters" in schema.get("required", ()):
        return None
    narrow = {**schema, "properties": {**declared, "parameters": False}}
    return structs.replace(answer, text=json.dumps(narrow, ensure_ascii=False))


def _calls(offer: Offer, shape: _Shape, required: bool, after: str, markers: Markers) -> Grammar:
    rules: list[str] = []
    for place, tool in enumerate(offer.tools):
        if tool not in offer.callable:
            continue
        held = offer.mode != "auto" or tool.strict
        schema = tool.parameters if held else shape.loose(tool)
        path = f"tools[{place}]"
        try:
            rules += shape.rules(f"call{place}", tool, schema, markers)
        except SchemaError as error:
            raise RequestError(
                f"the parameters of '{path}' cannot be enforced: {short(str(error), 400)}", path
            ) from None
        except _Unwritable as error:
            raise RequestError(f"'{path}' cannot be enforced: {error}", path) from None
    names = [f"call{place}" for place, tool in enumerate(offer.tools) if tool in offer.callable]
    return call_grammar(
        trigger=shape.trigger,
        opening=shape.opening,
        body="\n".join([f"body: {' | '.join(names)}", *rules]),
        closing=shape.closing,
        separator=shape.separator,
        required=required,
        many=offer.parallel and offer.mode != "named",
        after=after,
        markers=markers,
    )


def _shape(formats: Formats) -> _Shape:
    if formats.tools == "llama3_json":
        return _Shape("", "", "", _object_rules("parameters"), "; ")
    if formats.tools == "mistral" and formats.named_arguments:
        return _Shape("[TOOL_CALLS]", "", "", _named_rules)
    if formats.tools == "mistral":
        return _Shape("[TOOL_CALLS]", " [", "]", _object_rules("arguments"), ", ")
    if formats.tools == "qwen3_coder":
        ends = "</function>\n</tool_call>"
        return _Shape("<tool_call>", "\n<function=", ends, _xml_rules, loose=_any_texts)
    return _Shape("<tool_call>", "\n", "\n</tool_call>", _object_rules("arguments"))


def _object_rules(key: str) -> Callable[[str, Tool, Mapping[str, Any], Markers], list[str]]:
    def rules(rule: str, tool: Tool, schema: Mapping[str, Any], markers: Markers) -> list[str]:
        head = quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        return [f'{rule}: {head} {rule}a "}}"', f"{rule}a: {inline_schema(schema)}"]

    return rules


def _json_rules(rule: str, tool: Tool, schema: Mapping[str, Any], markers: Markers) -> list[str]:
    """A bare call token for token as JSON answers are written: beside one llguidance reads both,
    while of a longer literal and a shorter beginning it would only follow the longer one."""
    parameters = moved(dict(schema), "#/properties/parameters")
    whole = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    check_schema(schema)  # first, so that places are those of the tool's own schema
    return [f"{rule}: {inline_schema(whole)}"]


def _bare_head(name: str) -> str:
    return f'{{"name":{json.dumps(name)},"parameters":'


def _named_rules(rule: str, tool: Tool, schema: Mapping[str, Any], markers: Markers) -> list[str]:
    head = literal(f"{tool.name}[ARGS]", markers)
    return [f"{rule}: {head} {rule}a", f"{rule}a: {inline_schema(schema)}"]


# ---------------------------------------------------------------------------------- Qwen's tags


class _Unwritable(Exception):
    """The format has no way to write it so that it can be enforced."""


def _xml_rules(rule: str, tool: Tool, schema: Mapping[str, Any], markers: Markers) -> list[str]:
    """Parameters in the schema's order. A text runs to its closing tag; other values are JSON."""
    strange = sorted(schema.keys() - _XML_KEYS)
    if strange:
        raise _Unwritable(f"this model's form of calls has no way to write {strange[0]!a}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    unknown = sorted(set(required) - properties.keys())
    if unknown:
        raise _Unwritable(f"the required {unknown[0]!a} is not among the properties")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts, rules = [], []
    for place, (key, inner) in enumerate(properties.items()):
        name = f"{rule}p{place}"
        value, own = _xml_value(name, key, inner, schema, shared)
        rules += [f"{name}: {quoted(f'<parameter={key}>' + chr(10))} {value}", *own]
        parts.append(name if key in required else f"{name}?")
    head = quoted(f"{tool.name}>\n")
    return [f"{rule}: {head} {' '.join(parts)}", *rules]


def _any_texts(tool: Tool) -> dict[str, Any]:
    names = tool.parameters.get("properties") or ()
    return {"type": "object", "properties": {name: {} for name in names}}


def _xml_value(
    name: str, key: str, inner: Any, schema: Mapping[str, Any], shared: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """What stands for a value and its closing tag, and the rules for it."""
    end = "\n</parameter>\n"
    if "string" not in types_of(schema, key):
        body = {**shared, **inner}
        return f"{name}v {quoted(end)}", [f"{name}v: {inline_schema(body)}"]
    texts = inner.get("enum", [inner["const"]] if "const" in inner else None)
    if texts is not None and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(map(quoted, texts))}) {quoted(end)}", []
    if inner.keys() <= _FREE_TEXT_KEYS and inner.get("type", "string") == "string":
        return f"{name}v", [f"{name}v[lazy]: TEXT {quoted(end)}"]
    strange = sorted(inner.keys() - _FREE_TEXT_KEYS) or ["type"]
    raise _Unwritable(f"this model's form of calls has no way to hold {key!a} to {strange[0]!a}")
