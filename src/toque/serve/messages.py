"""Chat messages from the body, as templates expect them.

Owns: nothing. Knows: OpenAI's message fields. Does not know: templates, tokens.
"""

from __future__ import annotations

from typing import Any

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short

ROLES = ("system", "developer", "user", "assistant")


def plain_messages(messages: list[dict[str, Any]], lenient: bool) -> list[dict[str, Any]]:
    """Each with role, content as one text, and a name where given. Raises RequestError."""
    return [_message(message, f"messages[{i}].", lenient) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, lenient: bool) -> dict[str, Any]:
    known = ("role", "content", "name")
    kept = fields.screen(message, known, fields.MESSAGE_RULES, where, lenient)
    role, name = kept.get("role"), kept.get("name")
    if role not in ROLES:
        shown = short(str(role), 24)
        raise RequestError(
            f"'{where}role' must be one of {', '.join(ROLES)}; it is {shown}", where + "role"
        )
    if name is not None and not isinstance(name, str):
        raise RequestError(f"'{where}name' must be a string", where + "name")
    plain = {
        "role": "system" if role == "developer" else role,  # the newer name of the same role
        "content": _content(kept.get("content"), where + "content", lenient),
    }
    return plain if name is None else {**plain, "name": name}


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
