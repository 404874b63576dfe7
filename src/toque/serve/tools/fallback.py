"""Tools for models whose chat template knows none: told and written in the Hermes form, as text.

Owns: nothing. Knows: that form. Does not know: templates, parsers.

A history with calls can always be shown so. Offering tools this way is the operator's decision
(`--tool-call-parser hermes`), because no such model was taught it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can use tools. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>
To use a tool, write its name and its arguments as JSON between tags, and wait for the result:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation in messages of system, user and assistant that hold text only."""
    plain = [_message(message) for message in messages]
    if tools:
        lines = "\n".join(_json(tool) for tool in tools)
        text = _INTRODUCTION.format(tools=lines)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key in ("role", "content", "name")}
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = [
        _json({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        for call in message.get("tool_calls", ())
    ]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    if text:
        kept["content"] = "\n".join(filter(None, (message["content"], text)))
    return kept


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
