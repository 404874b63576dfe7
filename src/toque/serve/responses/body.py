"""What stands inside the fields of `/v1/responses`: formats, reasoning, labels.

Owns: nothing. Knows: OpenAI's Responses API. Does not know: items, tokens.
"""

from __future__ import annotations

from typing import get_args

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.constraints import ANY_OBJECT, named_schema
from toque.serve.failures import short
from toque.serve.fields import NoOp, Refused
from toque.serve.schema import Effort, ResponsesBody
from toque.types import Grammar, GrammarKind

MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_EFFORTS: tuple[str, ...] = get_args(Effort)


_TEXT_RULES: fields.Rules = {"verbosity": Refused((None, "medium"))}
_REASONING_RULES: fields.Rules = {
    "summary": NoOp(str, ("auto",)),  # the reasoning itself is in the answer
    "generate_summary": NoOp(str, ("auto",)),
    "encrypted_content": Refused(),
}


def effort_of(body: ResponsesBody, lenient: bool) -> str | None:
    """Raises RequestError."""
    kept = fields.screen(body.reasoning or {}, ("effort",), _REASONING_RULES, "reasoning.", lenient)
    effort = kept.get("effort")
    if effort is not None and effort not in _EFFORTS:
        path = "reasoning.effort"
        raise RequestError(f"'{path}' must be one of {', '.join(_EFFORTS)}", path)
    found: str | None = effort
    return found


def format_of(body: ResponsesBody, lenient: bool) -> tuple[Grammar, str] | None:
    """What `text.format` asks for, and where it stands. Raises RequestError."""
    kept = fields.screen(body.text or {}, ("format",), _TEXT_RULES, "text.", lenient)
    asked, path = kept.get("format"), "text.format"
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise RequestError(f"'{path}' must be an object", path)
    rest = {name: value for name, value in asked.items() if name != "type"}
    match asked.get("type"):
        case "json_schema":
            return named_schema(rest, path)
        case "text" | "json_object" as kind:
            fields.screen(rest, (), {}, f"{path}.", lenient)
            schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text=ANY_OBJECT)
            return None if kind == "text" else (schema, path)
        case other:
            kind = short(str(other), 24)
            raise RequestError(f"'{path}.type' '{kind}' is not supported", f"{path}.type")


def check_labels(body: ResponsesBody, lenient: bool) -> None:
    """`metadata` comes back with the response; `stream_options` ask for nothing. Raises
    RequestError."""
    rules = fields.STREAM_OPTION_RULES
    fields.screen(body.stream_options or {}, (), rules, "stream_options.", lenient)
    labels = body.metadata or {}
    if len(labels) > MAX_METADATA:
        raise RequestError(
            f"'metadata' has {len(labels)} labels; at most {MAX_METADATA}", "metadata"
        )
    for key, value in labels.items():
        if not isinstance(value, str) or max(len(key), len(value)) > MAX_METADATA_CHARS:
            raise RequestError(
                f"'metadata' must hold texts of up to {MAX_METADATA_CHARS} characters", "metadata"
            )
