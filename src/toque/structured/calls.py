"""The grammar of answers that may hold tool calls.

Owns: nothing. Knows: Lark as llguidance takes it. Does not know: models, tools' names, parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toque.structured.grammar import inline_schema, literal, quoted, until
from toque.types import Grammar, GrammarKind, TokenId

_PLAIN = r"/\s*[^\s{](?s:.*)/"


def call_grammar(
    *,
    trigger: str,
    opening: str = "",
    body: Mapping[str, Any] | str,
    closing: str = "",
    separator: str | None = None,
    required: bool = False,
    many: bool = True,
    after: str = "",
    markers: Mapping[str, TokenId] | None = None,
) -> Grammar:
    """Free text until `trigger` appears; then `opening`, `body`, `closing` must follow, and the
    text is free again. With `required` it begins with a call, and nothing else comes but calls.

    Args:
        trigger: what begins a block of calls, as a marker token or in letters (`<tool_call>`).
            None (""): an answer that begins with a brace is a call, and any other is text.
        opening, closing: what stands around the body, literally (`\\n` and `\\n</tool_call>`).
        body: a JSON schema, or Lark rules of which `body` is the first.
        separator: between the calls of one block (`", "`); None = a block holds one call.
        many: several calls are allowed.
        after: a reasoning part comes first and ends with this text.
        markers: ids of the vocabulary's marker tokens by text (`Compiler.markers`): those of
            trigger, opening and closing may come as such.

    Example: `call_grammar(trigger="<tool_call>", opening="\\n", body={"anyOf": [{"type": "object",
    "properties": {"name": {"const": "f"}, "arguments": …}, "required": ["name", "arguments"],
    "additionalProperties": False}, …]}, closing="\\n</tool_call>", markers=…)`.

    Raises SchemaError for a schema that cannot be enforced.
    """
    known = markers or {}
    begin = literal(trigger, known)
    rules = body if isinstance(body, str) else f"body: {inline_schema(body)}"
    bodies = "body" if separator is None or not many else f"body ({quoted(separator)} body)*"
    call = " ".join(filter(None, (literal(opening, known), bodies, literal(closing, known))))
    several = many and separator is None
    if required:
        start = f"{begin} call" + (f" (NEWLINES {begin} call)*" if several else "")
    elif trigger:
        start = "(free call)* TEXT" if several else "free call | TEXT"
    else:
        start = "call | PLAIN"
    lark = ["%llguidance {}", f"start: {start}", f"call: {call}", rules]
    if trigger and not required:
        lark.append(f"free: {until('triggered', trigger, known)}")
        lark.append(f"triggered[lazy]: TEXT {quoted(trigger)}")
    lark += ["TEXT: /(?s:.*)/", "NEWLINES: /\\n{0,2}/", f"PLAIN: {_PLAIN}"]
    return Grammar(kind=GrammarKind.LARK, text="\n".join(lark), after=after)
