"""`response_format` and `structured_outputs`: from a body's fields to a Grammar.

Owns: nothing. Knows: OpenAI's and vLLM's shapes. Does not know: how grammars are compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short
from toque.serve.schema import Sampling
from toque.structured.grammar import check_lark
from toque.types import Grammar, GrammarKind

ANY_OBJECT = '{"type":"object"}'

_FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
}
_OUTPUT_RULES: fields.Rules = {
    "structural_tag": fields.Refused(),
    "disable_any_whitespace": fields.Refused((None, False)),
    "disable_additional_properties": fields.Refused((None, False)),
    "whitespace_pattern": fields.Refused(),
}


def constraint(body: Sampling) -> tuple[Grammar, str] | None:
    """The grammar that a body asks for and the field that it stands in; None = free text.

    Raises RequestError.
    """
    found = [asked for asked in (_response_format(body), _structured_outputs(body)) if asked]
    if len(found) > 1:
        raise RequestError(
            "'response_format' and 'structured_outputs' exclude each other", "structured_outputs"
        )
    if found and body.ignore_eos:
        raise RequestError(
            f"'ignore_eos' with '{found[0][1]}' is not supported: its output ends", "ignore_eos"
        )
    return found[0] if found else None


def _response_format(body: Sampling) -> tuple[Grammar, str] | None:
    value = body.response_format
    if value is None:
        return None
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise RequestError(
            f"'response_format.type' must be one of {', '.join(_FORMAT_FIELDS)}",
            "response_format.type",
        )
    fields.screen(value, _FORMAT_FIELDS[kind], {}, "response_format.")
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(ANY_OBJECT), "response_format"
    return named_schema(value.get("json_schema"), "response_format.json_schema")


def named_schema(value: Any, path: str) -> tuple[Grammar, str]:
    """OpenAI's {name, schema, strict, description}. Strict or not, the schema is enforced."""
    if not isinstance(value, dict):
        raise RequestError(f"'{path}' must be an object with 'name' and 'schema'", path)
    kept = fields.screen(value, ("name", "schema", "strict", "description"), {}, f"{path}.")
    for name, kind in (("strict", bool), ("description", str)):
        if not isinstance(kept.get(name), kind | None):
            raise RequestError(f"'{path}.{name}' must be a {_NAMES[kind]}", f"{path}.{name}")
    if not isinstance(kept.get("name"), str) or not kept["name"]:
        raise RequestError(f"'{path}.name' is required and must be a string", f"{path}.name")
    if not isinstance(kept.get("schema"), dict):
        raise RequestError(f"'{path}.schema' is required and must be an object", f"{path}.schema")
    return _schema(_text(kept["schema"])), f"{path}.schema"


_NAMES = {bool: "boolean", str: "string"}


def _structured_outputs(body: Sampling) -> tuple[Grammar, str] | None:
    value = body.structured_outputs
    if value is None:
        return None
    where = "structured_outputs"
    kept = fields.screen(value, _MAKERS, _OUTPUT_RULES, f"{where}.")
    asked = [name for name, given in kept.items() if given is not None and given is not False]
    if len(asked) != 1:
        raise RequestError(f"'{where}' needs exactly one of {', '.join(_MAKERS)}", where)
    path = f"{where}.{asked[0]}"
    return _MAKERS[asked[0]](kept[asked[0]], path), path


def _json(value: Any, path: str) -> Grammar:
    if not isinstance(value, str | dict):
        raise RequestError(f"'{path}' must be a JSON schema, as an object or as a string", path)
    return _schema(value if isinstance(value, str) else _text(value))


def _json_object(value: Any, path: str) -> Grammar:
    if value is not True:
        raise RequestError(f"'{path}' must be true", path)
    return _schema(ANY_OBJECT)


def _regex(value: Any, path: str) -> Grammar:
    if not isinstance(value, str):
        raise RequestError(f"'{path}' must be a string", path)
    return Grammar(kind=GrammarKind.REGEX, text=value)


def _choice(value: Any, path: str) -> Grammar:
    if not isinstance(value, list):
        raise RequestError(f"'{path}' must be a list of strings", path)
    for number, choice in enumerate(value):
        if not isinstance(choice, str):
            raise RequestError(f"'{path}[{number}]' must be a string", f"{path}[{number}]")
    return Grammar(kind=GrammarKind.CHOICE, text=_text(value))


def _grammar(value: Any, path: str) -> Grammar:
    if not isinstance(value, str):
        raise RequestError(f"'{path}' must be a grammar, as a string", path)
    try:
        check_lark(value)
    except RequestError as error:
        raise RequestError(f"'{path}' cannot be used: {short(str(error), 400)}", path) from None
    return Grammar(kind=GrammarKind.LARK, text=value)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def _schema(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
