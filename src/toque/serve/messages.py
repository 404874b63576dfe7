"""Chat messages from the body, as templates expect them.

Owns: nothing. Knows: OpenAI's message fields. Does not know: templates, tokens.
"""

from __future__ import annotations

import json
from typing import Any

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short

ROLES = ("system", "developer", "user", "assistant", "tool")
_KNOWN = {
    "assistant": ("role", "content", "name", "tool_calls", "reasoning", "reasoning_content"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
MAX_CALL_ID_CHARS = 256


def plain_messages(messages: list[dict[str, Any]], lenient: bool) -> list[dict[str, Any]]:
    """Each with role, content as one text, and what else was given of name, tool_calls (arguments
    as objects), tool_call_id and reasoning_content. Raises RequestError."""
    return [_message(message, f"messages[{i}].", lenient) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, lenient: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = short(str(role), 24)
        raise RequestError(
            f"'{where}role' must be one of {', '.join(ROLES)}; it is {shown}", where + "role"
        )
    known = _KNOWN.get(role, ("role", "content", "name"))
    kept = fields.screen(message, known, fields.MESSAGE_RULES, where, lenient)
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,  # the newer name of the same role
    }
    calls = kept.get("tool_calls")
    if calls is None or calls == []:
        plain["content"] = _content(kept.get("content"), where + "content", lenient)
    else:  # then a text is no must
        content = kept.get("content")
        plain["content"] = (
            "" if content in (None, []) else _content(content, where + "content", lenient)
        )
        plain["tool_calls"] = _calls(calls, where + "tool_calls", lenient)
    if role == "tool":
        plain["tool_call_id"] = _call_id(kept.get("tool_call_id"), where + "tool_call_id")
    for name, target in (("name", "name"), ("reasoning", "reasoning_content"),
                         ("reasoning_content", "reasoning_content")):  # fmt: skip
        value = kept.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"'{where}{name}' must be a string", where + name)
        if value is not None:
            plain[target] = value
    return plain


def _content(content: Any, path: str, lenient: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{path}' must be a string or a list of text parts", path)
    return "\n".join(_part(part, f"{path}[{i}]", lenient) for i, part in enumerate(content))


def _part(part: Any, path: str, lenient: bool) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{path}' must be an object with type 'text'", path)
    if part.get("type") != "text":
        kind = short(str(part.get("type")), 24)
        raise RequestError(f"'{path}': parts of type '{kind}' are not supported", path)
    kept = fields.screen(part, ("type", "text"), {}, path + ".", lenient)
    if not isinstance(kept.get("text"), str):
        raise RequestError(f"'{path}.text' must be a string", path + ".text")
    return str(kept["text"])


# ----------------------------------------------------------------------------------------- calls


def _calls(calls: Any, path: str, lenient: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"'{path}' must be a list", path)
    return [_call(call, f"{path}[{i}]", lenient) for i, call in enumerate(calls)]


def _call(call: Any, path: str, lenient: bool) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RequestError(f"'{path}' must be an object", path)
    if call.get("type", "function") != "function":
        raise RequestError(f"'{path}.type' must be 'function'", f"{path}.type")
    kept = fields.screen(call, ("id", "type", "function"), fields.CALL_RULES, path + ".", lenient)
    function, where = kept.get("function"), f"{path}.function"
    if not isinstance(function, dict):
        raise RequestError(f"'{where}' must be an object", where)
    body = fields.screen(
        function, ("name", "arguments"), fields.CALL_FUNCTION_RULES, where + ".", lenient
    )
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"'{where}.name' must be a string", f"{where}.name")
    return {
        "id": _call_id(kept.get("id"), f"{path}.id"),
        "type": "function",
        "function": {
            "name": name,
            "arguments": call_arguments(body.get("arguments"), f"{where}.arguments"),
        },
    }


def _call_id(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CALL_ID_CHARS:
        raise RequestError(f"'{path}' must be a string of 1 to {MAX_CALL_ID_CHARS} letters", path)
    return value


def call_arguments(text: Any, path: str) -> dict[str, Any]:
    """An object from its JSON; null and "" are {}. Raises RequestError."""
    if text is None or text == "":
        return {}
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"'{path}' must be a JSON object, written as a string", path)
    return arguments
