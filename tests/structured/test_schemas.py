"""Each schema is refused with a reason and a place, or every output that the masks allow is valid.

The oracle is the package jsonschema, which shares nothing with what makes the masks."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.structured.schemas import ENFORCED, REFUSED
from tests.structured.walk import SPELLINGS, reads, walk
from toque.errors import RequestError
from toque.structured.grammar import Compiler
from toque.types import Grammar, GrammarKind

SEEDS = 8


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(SPELLINGS)


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def check(schema: dict[str, Any], value: Any) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator, format_checker=checker)


@pytest.mark.parametrize("name", ENFORCED)
def test_every_output_is_valid(compiler: Compiler, name: str) -> None:
    walk_and_check(compiler, name, SEEDS)


@pytest.mark.long
@pytest.mark.parametrize("name", ENFORCED)
def test_every_output_is_valid_however_often(compiler: Compiler, name: str) -> None:
    walk_and_check(compiler, name, 200)


def walk_and_check(compiler: Compiler, name: str, seeds: int) -> None:
    schema = ENFORCED[name]
    ended = 0
    for seed in range(seeds):
        text = walk(compiler, grammar_of(schema), seed)
        if text is not None:
            ended += 1
            check(schema, json.loads(text))
    assert ended >= seeds // 4, f"only {ended} outputs came to their end"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(compiler: Compiler, name: str) -> None:
    schema, named = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        compiler.matcher(grammar_of(schema))
    assert named.lower() in str(caught.value).lower()
    assert len(str(caught.value)) < 600 and "state>" not in str(caught.value)


def test_what_is_valid_can_be_written(compiler: Compiler) -> None:
    """The masks allow the values themselves, in the schema's order, compact or indented."""
    values = {
        "record": {"name": "Ada", "age": 36},
        "unicode enum": {"v": "😀"},
        "tagged union": {"kind": "dog", "good": True},
        "tree": {"leaf": True, "below": [{"leaf": False}, {"leaf": True, "below": []}]},
        "list in itself": {"next": {"next": {"next": None}}},
        "bounds of numbers": -0.25,
        "properties and a map": {"id": 1, "x": True, "y": False},
        "any object": {"a": [1.5e3, {"b": None}], "c": "d"},
    }
    for name, value in values.items():
        check(ENFORCED[name], value)
        for layout in ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}):
            text = json.dumps(value, ensure_ascii=False, **layout)  # type: ignore[arg-type]
            assert reads(compiler, grammar_of(ENFORCED[name]), text), (name, text)


def test_what_is_not_valid_cannot(compiler: Compiler) -> None:
    wrong = {
        "record": ['{"name":"Ada"}', '{"name":"Ada","age":131}', '{"name":5,"age":3}', "[]"],
        "pattern and length": ['"ABCDE"', '"a"', '""'],
        "enum": ['"blue"', "8"],
        "no properties": ['{"a":1}'],
        "multiple": ["8"],
        "uuid": ['"not-a-uuid"'],
    }
    for name, texts in wrong.items():
        for text in texts:
            assert not reads(compiler, grammar_of(ENFORCED[name]), text), (name, text)


def test_no_escape_hides_a_key_or_half_a_character(compiler: Compiler) -> None:
    """An additional property may not be a declared one in another spelling, and a string no
    surrogate."""
    schema = ENFORCED["properties and a map"]
    assert not reads(compiler, grammar_of(schema), '{"id":1,"\\u0069d":true}')
    assert not reads(compiler, grammar_of({"type": "string"}), '"\\ud83d"')
