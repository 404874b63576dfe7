"""The tools that a call offers, and which of them the model may or must call.

Owns: nothing. Knows: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.
Does not know: how a model is shown tools, how it writes calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

_OWN = ("name", "description", "parameters", "strict")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    parameters: Mapping[str, Any]  # a JSON Schema of an object
    strict: bool

    def shown(self) -> dict[str, Any]:
        """As chat templates expect a tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Offer:
    """With the mode "named" the tool `name` must be called."""

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model is told of: with "none" it is as if there were none."""
        return () if self.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(t for t in self.shown if self.name in (None, t.name))

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool.name: tool.parameters for tool in self.tools}


NO_OFFER = Offer()


def offer(
    tools: Sequence[Any] | None,
    choice: Any,
    parallel: bool | None,
    lenient: bool,
    flat: bool = False,
) -> Offer:
    """`flat`: a tool's fields stand beside its type (the Responses API). Raises RequestError."""
    read = tuple(_tool(tool, f"tools[{i}]", lenient, flat) for i, tool in enumerate(tools or ()))
    if len(read) > MAX_TOOLS:
        raise RequestError(f"'tools' has {len(read)} tools; at most {MAX_TOOLS}", "tools")
    names = [tool.name for tool in read]
    for place, name in enumerate(names):
        if name in names[:place]:
            path = f"tools[{place}].name" if flat else f"tools[{place}].function.name"
            raise RequestError(f"'{path}': there are two tools named {name}", path)
    mode, chosen = _choice(choice, names, lenient, flat)
    return Offer(read, mode, chosen, parallel is not False)


def _choice(choice: Any, names: list[str], lenient: bool, flat: bool) -> tuple[Mode, str | None]:
    path = "tool_choice"
    if choice is None:
        return ("auto" if names else "none"), None
    if choice in ("none", "auto", "required") and isinstance(choice, str):
        if choice == "required" and not names:
            raise RequestError("'tool_choice' is 'required' and there are no tools", path)
        return (choice if names else "none"), None  # type: ignore[return-value]
    if not isinstance(choice, dict):
        raise RequestError(
            "'tool_choice' must be 'none', 'auto', 'required' or name a function", path
        )
    kind = choice.get("type")
    if kind != "function":
        shown = short(str(kind), 24)
        raise RequestError(f"'tool_choice.type' '{shown}' is not supported", "tool_choice.type")
    name = _chosen_name(choice, lenient, flat)
    if not isinstance(name, str) or name not in names:
        shown = short(str(name))
        raise RequestError(f"'tool_choice' names '{shown}', which is not among the tools", path)
    return "named", name


def _chosen_name(choice: dict[str, Any], lenient: bool, flat: bool) -> Any:
    if flat:
        return fields.screen(choice, ("type", "name"), {}, "tool_choice.", lenient).get("name")
    kept = fields.screen(choice, ("type", "function"), {}, "tool_choice.", lenient)
    function = kept.get("function")
    if not isinstance(function, dict):
        path = "tool_choice.function"
        raise RequestError(f"'{path}' must be an object with the function's name", path)
    known = fields.screen(function, ("name",), {}, "tool_choice.function.", lenient)
    return known.get("name")


# ------------------------------------------------------------------------------------- one tool


def _tool(tool: Any, path: str, lenient: bool, flat: bool) -> Tool:
    if not isinstance(tool, dict):
        raise RequestError(f"'{path}' must be an object", path)
    if tool.get("type") != "function":
        kind = short(str(tool.get("type")), 24)
        raise RequestError(
            f"'{path}.type' '{kind}' is not supported; only 'function' is", f"{path}.type"
        )
    if flat:
        return _function(fields.screen(tool, ("type", *_OWN), {}, path + ".", lenient), path)
    kept = fields.screen(tool, ("type", "function"), {}, path + ".", lenient)
    body, where = kept.get("function"), f"{path}.function"
    if not isinstance(body, dict):
        raise RequestError(f"'{where}' must be an object", where)
    return _function(fields.screen(body, _OWN, {}, where + ".", lenient), where)


def _function(body: Mapping[str, Any], path: str) -> Tool:
    name, description = body.get("name"), body.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"'{path}.name' must be 1 to 128 letters, digits or any of _.:/-", f"{path}.name"
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"'{path}.description' must be a string", f"{path}.description")
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        raise RequestError(
            f"'{path}.description' has more than {MAX_DESCRIPTION_CHARS} characters",
            f"{path}.description",
        )
    strict = body.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"'{path}.strict' must be a boolean", f"{path}.strict")
    parameters = body.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    check_parameters(parameters, f"{path}.parameters")
    return Tool(name, description, parameters, bool(strict))


def check_parameters(schema: Any, path: str) -> None:
    """Raises RequestError for what is no JSON Schema of an object, as far as a model that is only
    shown it needs it to be one; a constraint is checked to the last keyword by the grammar."""
    if not isinstance(schema, dict):
        raise RequestError(f"'{path}' must be a JSON Schema, an object", path)
    if schema.get("type", "object") != "object":
        raise RequestError(f"'{path}.type' must be 'object'", f"{path}.type")
    _check_schema(schema, path)


def _check_schema(schema: Any, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"'{short(path)}' must be a JSON Schema", path)
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            shown = short(str(kind), 24)
            raise RequestError(f"'{short(path)}.type' has '{shown}', which is no type", path)
    pattern = schema.get("pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError(f"'{short(path)}.pattern' must be a string", path)
    for name in ("properties", "$defs", "definitions", "patternProperties"):
        for key, inner in _mapping(schema, name, path).items():
            _check_schema(inner, f"{path}.{name}.{key}")
    for name in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(name), dict):
            _check_schema(schema[name], f"{path}.{name}")
    for name in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(name, [])
        if not isinstance(inner, list):
            raise RequestError(f"'{short(path)}.{name}' must be a list", path)
        for place, part in enumerate(inner):
            _check_schema(part, f"{path}.{name}[{place}]")


def _mapping(schema: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    found = schema.get(name, {})
    if not isinstance(found, dict):
        raise RequestError(f"'{short(path)}.{name}' must be an object", path)
    return found
