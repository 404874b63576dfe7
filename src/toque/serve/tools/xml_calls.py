"""Calls in Qwen3-Coder's and Qwen3.5's tags; their values become JSON by the tool's schema.

Owns: nothing. Knows: that format, which types a schema gives a parameter. Does not know: cuts.

    <tool_call><function=name><parameter=city>
    Oslo
    </parameter></function></tool_call>

The format is that of these models' chat templates. A value that is text is said as it comes; others
are said when they are whole. A value that is not of its type is said as text: nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from toque.serve.tools.json_calls import closing, marked
from toque.serve.tools.machine import END, Malformed, Reader, Sink, Steps, blanks, literal, until

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME_CHARS = 256
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by tool


def qwen_xml(schemas: Schemas) -> Reader:
    """The reader for these tools. Answers without `<tool_call>` begin with `<function=`."""

    def read(sink: Sink, c: str) -> Steps[None]:
        yield from marked(sink, c, {_OPEN: body, _FUNCTION: function})

    def body(sink: Sink, c: str) -> Steps[str]:
        c = yield from literal((yield from blanks(c)), _FUNCTION)
        return (yield from function(sink, c))

    def function(sink: Sink, c: str) -> Steps[str]:
        name, c = yield from _name(c)
        sink.open(name)
        c = yield from _parameters(sink, c, schemas.get(name, {}))
        sink.close()
        return (yield from closing(sink, c, _CLOSE))

    return read


def _name(c: str) -> Steps[tuple[str, str]]:
    """Reads up to and including `>`."""
    name = ""
    while c != ">":
        if c in ("<", "\n", END) or len(name) >= _MAX_NAME_CHARS:
            raise Malformed("a tag does not end")
        name += c
        c = yield
    return name.strip(), (yield)


def _parameters(sink: Sink, c: str, schema: Mapping[str, Any]) -> Steps[str]:
    """Reads them all, and the end of the function; a call's own end will do too."""
    before = "{"
    seen: set[str] = set()
    while True:
        tag, c = yield from _tag(c)
        if tag != _PARAMETER:
            sink.arguments("{}" if before == "{" else "}")
            return c
        key, c = yield from _name(c)
        if key in seen:
            raise Malformed(f"it has the parameter {key[:64]!a} twice")
        seen.add(key)
        sink.arguments(f"{before}{_json(key)}: ")
        before = ", "
        c = yield from _value(sink, c, types_of(schema, key))


def _tag(c: str) -> Steps[tuple[str, str]]:
    c = yield from blanks(c)
    found = ""
    tags = (_PARAMETER, _FUNCTION_END, _CLOSE)
    while found not in tags:
        found += c
        if not any(tag.startswith(found) for tag in tags):
            raise Malformed("a call has something beside its parameters")
        c = yield
    return found, c


def _value(sink: Sink, c: str, types: frozenset[str]) -> Steps[str]:
    """Reads up to the end of the parameter. One line break at either side belongs to the tags."""
    if c == "\n":
        c = yield
    if types == {"string"}:
        sink.arguments('"')
        c = yield from _to_end(sink, c, lambda char: sink.arguments(_json(char)[1:-1]))
        sink.arguments('"')
        return c
    raw: list[str] = []
    c = yield from _to_end(sink, c, raw.append)
    sink.arguments(_json(typed("".join(raw), types)))
    return c


def _to_end(sink: Sink, c: str, say: Callable[[str], None]) -> Steps[str]:
    marker, c = yield from until(sink, c, ("\n" + _PARAMETER_END, _PARAMETER_END), say)
    if marker is None:
        raise Malformed("a parameter does not end")
    return c


# -------------------------------------------------------------------------------------- values


def typed(text: str, types: frozenset[str]) -> Any:
    """`text` as a value of one of these types; as text where it is none of them."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = _WORDS.get(text.strip().lower(), text)
    return value if any(_is_a(value, kind) for kind in types) else text


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """What a tool's schema lets a parameter be; "string" alone where it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(found, schema, 0)) or frozenset({"string"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {name for v in values for name in ("string", *_TYPES) if _is_named(v, name)}
    parts = [p for name in ("anyOf", "oneOf", "allOf") for p in _listed(schema.get(name))]
    return {
        kind for part in [*parts, _referred(schema, root)] for kind in _types(part, root, depth + 1)
    }


def _is_named(value: Any, kind: str) -> bool:
    return isinstance(value, str) if kind == "string" else _is_a(value, kind)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    target = schema.get("$ref")
    if not isinstance(target, str) or not target.startswith("#/"):
        return None
    place: Any = root
    for step in target[2:].split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
