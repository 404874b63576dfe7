"""Items of the Responses API as messages: what was said, thought, called and answered.

Owns: nothing. Knows: the input items of OpenAI's Responses API. Does not know: templates, answers.

Items that an assistant made one after another, its reasoning, a text, calls, are one message of it:
that is how templates know a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short
from toque.serve.fields import NoOp, Refused
from toque.serve.messages import call_arguments

Item = Mapping[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")
# What an item brings along that came out of a response, or that openai-python made of it.
_MADE: fields.Rules = {"id": NoOp(str), "status": NoOp(str), "phase": NoOp(str)}
_PART_RULES: fields.Rules = {
    "annotations": NoOp(list),
    "logprobs": NoOp(list),
    "parsed": NoOp(object),
}
_REASONING_RULES: fields.Rules = {**_MADE, "summary": NoOp(list), "encrypted_content": Refused()}
_CALL_RULES: fields.Rules = {
    **_MADE,
    "namespace": Refused(),
    "async": Refused(),
    "parsed_arguments": NoOp(object),
    "caller": Refused(),
}


def as_items(given: str | Sequence[Any]) -> list[Any]:
    """A plain text is what a user says."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given)


def messages_of(items: Sequence[Any], first_new: int, lenient: bool) -> list[dict[str, Any]]:
    """`first_new`: which item is the first of this call's input, for what is said about it; those
    before it come from the store. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        path = f"input[{place - first_new}]"
        if not isinstance(item, dict):
            raise RequestError(f"'{path}' must be an object", path)
        message = _message(item, path, lenient)
        last = messages[-1] if messages else None
        if last is not None and message["role"] == "assistant" == last["role"]:
            _join(last, message)
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any], path: str, lenient: bool) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            return _said(item, path, lenient)
        case "function_call":
            return _called(item, path, lenient)
        case "function_call_output":
            return _answered(item, path, lenient)
        case "reasoning":
            return _thought(item, path, lenient)
        case other:
            kind = short(str(other), 24)
            raise RequestError(f"'{path}.type' '{kind}' is not supported", f"{path}.type")


def _join(last: dict[str, Any], message: dict[str, Any]) -> None:
    """A turn of the assistant goes on."""
    last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
    if "tool_calls" in message:
        last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
    if "reasoning_content" in message:
        before = last.get("reasoning_content")
        last["reasoning_content"] = "\n".join(filter(None, (before, message["reasoning_content"])))


def _said(item: dict[str, Any], path: str, lenient: bool) -> dict[str, Any]:
    kept = fields.screen(item, ("type", "role", "content"), _MADE, path + ".", lenient)
    role = kept.get("role")
    if role not in _ROLES:
        raise RequestError(f"'{path}.role' must be one of {', '.join(_ROLES)}", f"{path}.role")
    content = _text(kept.get("content"), f"{path}.content", lenient)
    return {"role": "system" if role == "developer" else role, "content": content}


def _called(item: dict[str, Any], path: str, lenient: bool) -> dict[str, Any]:
    known = ("type", "call_id", "name", "arguments")
    kept = fields.screen(item, known, _CALL_RULES, path + ".", lenient)
    call_id, name = (_required(kept, key, path) for key in ("call_id", "name"))
    arguments = call_arguments(kept.get("arguments"), f"{path}.arguments")
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answered(item: dict[str, Any], path: str, lenient: bool) -> dict[str, Any]:
    kept = fields.screen(item, ("type", "call_id", "output"), _MADE, path + ".", lenient)
    call_id = _required(kept, "call_id", path)
    output = _text(kept.get("output"), f"{path}.output", lenient)
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _thought(item: dict[str, Any], path: str, lenient: bool) -> dict[str, Any]:
    kept = fields.screen(item, ("type", "content"), _REASONING_RULES, path + ".", lenient)
    content = kept.get("content")
    text = _text(content, f"{path}.content", lenient) if content else ""
    return {"role": "assistant", "content": "", "reasoning_content": text}


def _required(item: Item, key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= 256:
        where = f"{path}.{key}"
        raise RequestError(f"'{where}' must be a string of 1 to 256 characters", where)
    return value


def _text(content: Any, path: str, lenient: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"'{path}' must be a string or a list of text parts", path)
    return "\n".join(_part(part, f"{path}[{i}]", lenient) for i, part in enumerate(content))


def _part(part: Any, path: str, lenient: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in _TEXTS:
        shown = short(str(kind), 24)
        raise RequestError(f"'{path}': parts of type '{shown}' are not supported", path)
    kept = fields.screen(part, ("type", "text"), _PART_RULES, path + ".", lenient)
    if not isinstance(kept.get("text"), str):
        raise RequestError(f"'{path}.text' must be a string", f"{path}.text")
    return str(kept["text"])
