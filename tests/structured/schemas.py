"""JSON schemas of all kinds, written for these tests; each is refused with a reason or enforced."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Any) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))
SHORT: Schema = {"type": "string", "maxLength": 8}

ENFORCED: dict[str, Schema] = {
    # types
    "string": SHORT,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": BOOLEAN,
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null", "integer"]},
    "any object": {"type": "object"},
    "anything": {},
    "true": {"type": "object", "properties": {"a": True}, "required": ["a"]},
    # values
    "enum": {"enum": ["red", "green", 7, None, True, ["x", {"y": 1}]]},
    "const": {"const": {"a": [1, "two", None]}},
    "const in a record": record(kind={"const": "dog"}, legs={"const": 4}),
    "unicode enum": record(
        v={"enum": ["café", "你好", "😀", 'a"b', "c\\d", "\n", "", "\u0000\u001f"]}
    ),
    "unicode keys": record(**{"naïve": BOOLEAN, "鍵": BOOLEAN, 'q"uote': BOOLEAN, "": BOOLEAN}),
    "enum of one type": {"type": "string", "enum": ["a", "b", 3]},
    # strings
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "length in characters": {"type": "string", "minLength": 2, "maxLength": 2},
    "pattern of wide characters": {"type": "string", "pattern": "^[😀é]+$", "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
    "pattern inside": {"type": "string", "pattern": "x[0-9]y", "maxLength": 10},
    "pattern and length": {"type": "string", "pattern": "^[A-F]+$", "maxLength": 4},
    "pattern without type": record(c={"pattern": "^[A-F]+$", "maxLength": 4}),
    "pattern with classes": {"type": "string", "pattern": "^\\d{3}\\w\\s\\S$"},
    "pattern that alternates": {"type": "string", "pattern": "^(cat|dog)s?$"},
    "pattern that explodes": {"type": "string", "pattern": "^(a|b)*a(a|b){28}$"},
    "escapes in a pattern": {"type": "string", "pattern": '^["\\\\\\n]{1,3}$'},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "hostname": {"type": "string", "format": "hostname"},
    # numbers
    "bounds": {"type": "integer", "minimum": -5, "maximum": 12},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "bounds of numbers": {"type": "number", "minimum": -0.5, "maximum": 0.25},
    "exclusive bounds of numbers": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "one bound": {"type": "integer", "minimum": 1000000},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "multiple of a number": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "open bound at zero": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "open bounds elsewhere": {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 0.7},
    "integers between fractions": {"type": "integer", "minimum": 0.5, "maximum": 1.5},
    # arrays
    "array": {"type": "array", "items": BOOLEAN, "maxItems": 4},
    "array bounds": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [BOOLEAN, INTEGER], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [BOOLEAN], "items": INTEGER, "maxItems": 3},
    "array of records": {"type": "array", "items": record(a=BOOLEAN), "minItems": 1, "maxItems": 3},
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": BOOLEAN, "maxItems": 2},
        "minItems": 1,
        "maxItems": 3,
    },
    # objects
    "record": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 130}),
    "nested": record(a=record(b=record(c=BOOLEAN)), d=record(e={"type": "null"})),
    "optional properties": {
        "type": "object",
        "properties": {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required and not described": {"type": "object", "required": ["z"], "maxProperties": 1},
    "map": {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 3},
    "map of at least one": {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 1},
    "properties and a map": {
        "type": "object",
        "properties": {"id": INTEGER},
        "required": ["id"],
        "additionalProperties": BOOLEAN,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_": INTEGER, "^b_": BOOLEAN},
        "additionalProperties": False,
    },
    "properties and patterns": {
        "type": "object",
        "properties": {"mark": INTEGER},
        "required": ["mark"],
        "patternProperties": {"^x": BOOLEAN},
        "additionalProperties": False,
    },
    "no properties": {"type": "object", "additionalProperties": False},
    "nothing optional": record(),
    "required that a pattern describes": {
        "type": "object",
        "required": ["x1"],
        "patternProperties": {"^x": INTEGER},
        "additionalProperties": False,
    },
    "property that cannot be": {"type": "object", "properties": {"a": False, "b": BOOLEAN}},
    "names of keywords": record(**{"$ref": BOOLEAN, "not": BOOLEAN, "title": SHORT}),
    # combinations
    "anyOf": {"anyOf": [BOOLEAN, {"type": "integer", "minimum": 10}, record(a=BOOLEAN)]},
    "oneOf of types": {"oneOf": [BOOLEAN, INTEGER, {"type": "null"}]},
    "tagged union": {
        "oneOf": [
            record(kind={"const": "cat"}, lives={"type": "integer", "maximum": 9, "minimum": 1}),
            record(kind={"const": "dog"}, good=BOOLEAN),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
        ],
    },
    "keywords beside anyOf": {"type": "integer", "anyOf": [{"minimum": 100}, {"maximum": -100}]},
    "optional value": record(a={"anyOf": [SHORT, {"type": "null"}]}),
    # references
    "ref": {
        "$defs": {"point": record(x={"type": "integer"}, y={"type": "integer"})},
        **record(**{"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "ref and more": {"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 6},
    "old definitions": {"definitions": {"b": BOOLEAN}, **record(a={"$ref": "#/definitions/b"})},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "leaf": BOOLEAN,
                    "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "list in itself": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    "escaped pointer": {"$defs": {"a/b~c": BOOLEAN}, **record(v={"$ref": "#/$defs/a~1b~0c"})},
    # what says nothing about values
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "x",
        "title": "T",
        "description": 'Never "none" or {x}\n你',
        "default": 5,
        "examples": [1],
        "deprecated": True,
        **record(a={"type": "boolean", "readOnly": True, "description": ""}),
    },
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", **record(a=BOOLEAN)},
}

REFUSED: dict[str, tuple[Schema, str]] = {  # the message names this
    "unknown type": (record(x=record(y={"type": "zigzag"})), "/properties/x/properties/y: "),
    "required is no list": ({"type": "object", "required": 5}, "required"),
    "list of items": ({"type": "array", "items": [STRING]}, "prefixItems"),
    "no such ref": ({"$ref": "#/$defs/none"}, "none"),
    "remote ref": (record(a={"$ref": "https://example.com/x"}), "example.com"),
    "bad pattern": (record(a={"type": "string", "pattern": "(["}), "/properties/a"),
    "look-around": (record(a={"type": "string", "pattern": "(?=x)y"}), "look-around"),
    "back-reference": ({"type": "string", "pattern": "(a)\\1"}, "backreference"),
    "empty enum": ({"enum": []}, "empty"),
    "no value left": ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    "lengths cross": ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    "not": (record(a={"not": {"type": "string"}}), "/properties/a: 'not'"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "'if'"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "contains": ({"type": "array", "contains": INTEGER}, "'contains'"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    "unevaluated": ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    "dynamic ref": ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
    "misspelt": ({"type": "string", "maxlength": 3}, "'maxlength'"),
    "options of a library": ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
    "unknown format": ({"type": "string", "format": "zip"}, "zip"),
    "unknown dialect": ({"$schema": "https://example.com/mine"}, "example.com"),
    "oneOf that overlaps": ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
    "minProperties": ({"type": "object", "minProperties": 3}, "'minProperties'"),
    "declared and matched": (
        {**record(mark=INTEGER), "patternProperties": {"^mark$": INTEGER}},
        "matches 'mark'",
    ),
    "declared and matched in two parts": (
        {"allOf": [record(mark=INTEGER), {"patternProperties": {"ar": INTEGER}}]},
        "matches 'mark'",
    ),
    "open bound at zero": (
        record(p={"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
        "/properties/p: 'exclusiveMinimum' 0",
    ),
    "open bound below zero": (
        {"type": "number", "exclusiveMaximum": 0, "minimum": -0.01},
        "'exclusiveMaximum' 0",
    ),
    "open bound in two parts": (
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        "'exclusiveMinimum' 0",
    ),
    "boolean bound": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "a number"),
    "required of nothing": (
        {"type": "object", "required": ["z"], "additionalProperties": False},
        "'z'",
    ),
    "a number as schema": (record(a=5), "/properties/a"),
    "endless": ({"$ref": "#"}, "nothing can match"),
    "deep": ({"items": {"items": {"not": {}}}}, "/items/items"),
    "inside a definition": ({"$defs": {"d": {"type": "zig"}}, "$ref": "#/$defs/d"}, "zig"),
}
