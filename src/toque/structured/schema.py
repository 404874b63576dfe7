"""What of JSON Schema is enforced, and that nothing else gets in.

Owns: the table of keywords. Knows: JSON Schema 2020-12. Does not know: llguidance, requests.

A keyword is enforced, says nothing about values, or is refused: a schema with a misspelt
`maxlength` would otherwise be accepted and not enforced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toque.errors import RequestError

MAX_DEPTH = 64  # of the schema's JSON
MAX_SUBSCHEMAS = 20_000

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
ENFORCED = frozenset(
    {
        *(*_MAPS, *_LISTS, *_SINGLES, "type", "enum", "const", "$ref"),
        *("required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
SILENT = frozenset(
    {
        *("$schema", "$id", "$comment", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding"),
        "discriminator",  # OpenAPI's hint beside a oneOf; pydantic writes it
    }
)
_DIALECTS = ("2020-12/schema", "2019-09/schema", "draft-07/schema", "draft-06/schema")


class SchemaError(RequestError):
    """The schema cannot be enforced. The message names the place, as a JSON pointer."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"at {place or 'the top'}: {reason}")
        self.place = place


def check_schema(schema: Any) -> None:
    """Raises SchemaError for the first thing that would not be enforced."""
    _check_depth(schema)
    for count, (place, node) in enumerate(subschemas(schema)):
        if count >= MAX_SUBSCHEMAS:
            raise SchemaError("", f"the schema has more than {MAX_SUBSCHEMAS} parts")
        if not isinstance(node, bool):
            _check_node(place, node)
    _check_open_bounds(schema)


def subschemas(schema: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every schema inside a schema, itself first, with its JSON pointer."""
    yield place, schema
    if not isinstance(schema, dict):
        return
    for where, child in children(schema):
        yield from subschemas(child, place + where)


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside, with the rest of their JSON pointer."""
    for keyword in _MAPS:
        found = schema.get(keyword)
        for name, child in found.items() if isinstance(found, dict) else ():
            yield f"/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", child
    for keyword in _LISTS:
        found = schema.get(keyword)
        for number, child in enumerate(found) if isinstance(found, list) else ():
            yield f"/{keyword}/{number}", child
    for keyword in _SINGLES:
        if keyword in schema:
            yield f"/{keyword}", schema[keyword]


def moved(schema: Any, place: str) -> Any:
    """The same schema for a place inside another one (`#/…`): its references go with it."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        out["$ref"] = place + target[1:]
    for keyword in _MAPS:
        if isinstance(found := schema.get(keyword), dict):
            out[keyword] = {name: moved(child, place) for name, child in found.items()}
    for keyword in _LISTS:
        if isinstance(found := schema.get(keyword), list):
            out[keyword] = [moved(child, place) for child in found]
    for keyword in _SINGLES:
        if keyword in schema:
            out[keyword] = moved(schema[keyword], place)
    return out


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = (
            [
                inner
                for outer in level
                for inner in (outer.values() if isinstance(outer, dict) else outer)
                if isinstance(inner, dict | list)
            ]
            if any(isinstance(outer, dict | list) for outer in level)
            else []
        )
        if not level:
            return
    raise SchemaError("", f"the schema is nested more than {MAX_DEPTH} deep")


def _check_node(place: str, node: Any) -> None:
    if not isinstance(node, dict):
        hint = "; for a list of schemas use 'prefixItems'" if isinstance(node, list) else ""
        raise SchemaError(place, f"a schema must be an object{hint}")
    for keyword in node:
        if keyword not in ENFORCED and keyword not in SILENT:
            raise SchemaError(place, f"'{keyword[:64]}' is not supported")
    for keyword, kind in (*((k, dict) for k in _MAPS), *((k, list) for k in _LISTS)):
        if not isinstance(node.get(keyword, kind()), kind):
            shape = "an object" if kind is dict else "a list"
            raise SchemaError(place, f"'{keyword}' must be {shape}")
    if place and "$id" in node:
        raise SchemaError(place, "'$id' inside a schema is not supported")
    dialect = node.get("$schema")
    if dialect is not None and not str(dialect).rstrip("#").endswith(_DIALECTS):
        raise SchemaError(place, f"the dialect {str(dialect)[:64]!r} is not supported")
    _check_counts(place, node)


def _check_counts(place: str, node: dict[str, Any]) -> None:
    # The same additional key may come twice, and counts once when it is read.
    required = node.get("required", [])
    named = len(required) if isinstance(required, list) else 0
    least = node.get("minProperties", 0)
    if isinstance(least, int | float) and least > max(1, named):
        raise SchemaError(place, "'minProperties' beyond 1 and 'required' is not supported")
    for keyword in _OPEN:
        if isinstance(node.get(keyword), bool):
            raise SchemaError(place, f"'{keyword}' must be a number")


_OPEN = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}  # and on which side of it values lie
_BOUNDS = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")


def merges(schema: Any) -> bool:
    """Whether keywords of different parts may come to bear on one value."""
    spoken = ENFORCED - {*_MERGING, "$defs", "definitions"}
    return any(
        "allOf" in node or (spoken & node.keys() and any(key in node for key in _MERGING))
        for _, node in subschemas(schema)
        if isinstance(node, dict)
    )


def _check_open_bounds(schema: Any) -> None:
    """llguidance lets 0 pass an open bound of 0 where the other bound is nearer than 1."""
    merged = merges(schema)
    nodes = [(place, node) for place, node in subschemas(schema) if isinstance(node, dict)]
    for keyword, side in _OPEN.items():
        near = [
            any(0 < side * node[other] < 1 for other in _BOUNDS[keyword] if _number(node, other))
            for _, node in nodes
        ]
        for (place, node), own in zip(nodes, near, strict=True):
            if _number(node, keyword) and node[keyword] == 0 and (own or (merged and any(near))):
                raise SchemaError(place, f"'{keyword}' 0 with the other bound within 1 of it "
                                  "is not supported")  # fmt: skip


def _number(node: dict[str, Any], keyword: str) -> bool:
    return isinstance(node.get(keyword), int | float)
