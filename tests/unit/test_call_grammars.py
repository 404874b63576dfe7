"""Calls under constraint: whatever is drawn from the grammar is read back as calls that the tools'
schemas accept (the `jsonschema` package is the oracle), in every format."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from toque.errors import RequestError
from toque.serve.call_grammars import (
    call_beginnings,
    calls_instead,
    grammar_of_calls,
    is_constrained,
    without_calls,
)
from toque.serve.formats import Formats
from toque.serve.offer import Offer, Tool
from toque.serve.tools.output import Calls, Format, OutputParser
from toque.serve.tools.parts import Said, said
from toque.structured.grammar import Compiler
from toque.types import Grammar, GrammarKind, Spellings

END, MARK, CLOSE, ARGS = 256, 257, 258, 259
TEXTS = {MARK: b"<tool_call>", CLOSE: b"</tool_call>", ARGS: b"[ARGS]", 260: b"[TOOL_CALLS]"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F°"], "description": 'Never "none" or {x}\n'},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "exact": {"type": "boolean"},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["a", "b"]}},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", None, SCHEMA, True), Tool("now", "The time.", EMPTY, False))
FORMATS = [
    Formats(tools="hermes"),
    Formats(tools="qwen3_coder"),
    Formats(tools="llama3_json"),
    Formats(tools="mistral"),
    Formats(tools="mistral", named_arguments=True),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    """Bytes are tokens, and the formats' marks are too."""
    tokens = (*(bytes([i]) for i in range(256)), b"</s>", *TEXTS.values())
    return Compiler(Spellings(tokens=tokens, markers=(END, *TEXTS), end_token_ids=(END,)))


def drawn(compiler: Compiler, grammar: Grammar, seed: int, text: bytes = b"") -> tuple[str, bool]:
    """`text`, then tokens chosen among the allowed ones, an end as soon as there may be one half
    of the time; the whole text, and whether it came to an end."""
    draw = random.Random(seed)
    matcher = compiler.matcher(grammar)
    for byte in text:
        assert matcher.consume_token(byte)
    for _ in range(400):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(mask)]
        assert allowed, text
        printable = [i for i in allowed if 32 < i < 127 or i > 256] or allowed
        token = END if END in allowed and draw.random() < 0.5 else draw.choice(printable)
        if token == END:
            return text.decode(errors="replace"), True
        assert matcher.consume_token(token)
        text += TEXTS.get(token, bytes([token % 256]))
        if matcher.is_stopped():
            return text.decode(errors="replace"), True
    return text.decode(errors="replace"), False


def read(
    text: str,
    formats: Formats,
    offer: Offer,
    reasoning: str | None = None,
    calls: Calls = "anywhere",
) -> Said:
    """The same in two pieces, wherever it is cut."""
    form = Format(tools=formats.tools, schemas=offer.schemas, parallel=offer.parallel, calls=calls,
                  reasoning=reasoning, in_reasoning=reasoning is not None)  # fmt: skip

    def pushed(*pieces: str) -> Said:
        parser = OutputParser(form)
        return said([*(p for piece in pieces for p in parser.push(piece)), *parser.finish()])

    found = pushed(text)
    for cut in range(1, min(len(text), 200)):
        assert pushed(text[:cut], text[cut:]) == found, cut
    return found


def check(found: Said, strict_only: bool = False) -> None:
    schemas = {tool.name: tool for tool in TOOLS}
    for call in found.calls:
        assert call.complete
        tool = schemas[call.name]
        if tool.strict or not strict_only:
            jsonschema.validate(json.loads(call.arguments), dict(tool.parameters))


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_made_and_valid(
    compiler: Compiler, formats: Formats, parallel: bool
) -> None:
    offer = Offer(TOOLS, "required", None, parallel)
    grammar = grammar_of_calls(offer, formats, "", compiler.markers)
    ended = 0
    for seed in range(10):
        text, over = drawn(compiler, grammar, seed)
        ended += over
        if over:
            found = read(text, formats, offer)
            assert found.calls and not found.text and not found.warnings, text
            assert len(found.calls) == 1 or parallel
            check(found)
    assert ended >= 5


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_a_named_tool_and_no_other(compiler: Compiler, formats: Formats) -> None:
    for name in ("weather", "now"):
        offer = Offer(TOOLS, "named", name)
        grammar = grammar_of_calls(offer, formats, "", compiler.markers)
        for seed in range(5):
            text, over = drawn(compiler, grammar, seed)
            found = read(text, formats, offer)
            assert [call.name for call in found.calls] == [name] or not over
            check(found) if over else None


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_a_strict_tool_binds_only_calls(compiler: Compiler, formats: Formats) -> None:
    """The text is free; a call that is begun fits its schema."""
    offer = Offer(TOOLS, "auto")
    assert is_constrained(offer) and not is_constrained(Offer(TOOLS[1:], "auto"))
    grammar = grammar_of_calls(offer, formats, "", compiler.markers)
    matcher = compiler.matcher(grammar)
    for byte in b"any text, <tool, [x] and so on":
        assert matcher.consume_token(byte)
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert mask[END]
    begin = {"llama3_json": b"{", "mistral": b"a [TOOL_CALLS]"}.get(
        formats.tools or "", b"a <tool_call>"
    )
    made = 0
    for seed in range(10):
        text, over = drawn(compiler, grammar, seed, begin)
        if over:
            made += 1
            found = read(text, formats, offer)
            assert found.calls and not found.warnings, text
            check(found, strict_only=True)
    assert made


def test_calls_come_after_the_reasoning(compiler: Compiler) -> None:
    offer = Offer(TOOLS, "required", None, False)
    grammar = grammar_of_calls(offer, FORMATS[0], "</think>", compiler.markers)
    matcher = compiler.matcher(grammar)
    thought = b"hm <tool_call> </think>\n\n"
    for byte in thought:
        assert matcher.consume_token(byte)
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = set(map(int, np.flatnonzero(mask)))
    assert allowed <= {ord("<"), MARK, ord("\n")}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    found = read(thought.decode() + call, FORMATS[0], offer, "qwen3")
    assert found.reasoning == "hm <tool_call>" and len(found.calls) == 1 and not found.text


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_what_cannot_be_enforced_names_the_tool(compiler: Compiler, formats: Formats) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "string", "bogus": 1}}}
    offer = Offer((TOOLS[1], Tool("f", None, wrong, False)), "required")
    with pytest.raises(RequestError) as refused:
        grammar_of_calls(offer, formats, "", compiler.markers)
    assert refused.value.param == "tools[1]" and "bogus" in str(refused.value)


def test_free_text_in_tags_ends_at_its_tag(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    offer = Offer((Tool("f", None, schema, True),), "named", "f")
    grammar = grammar_of_calls(offer, FORMATS[1], "", compiler.markers)
    text = b"<tool_call>\n<function=f>\n<parameter=s>\na <b> {\n</parameter>\n"
    text += b"</function>\n</tool_call>"
    matcher = compiler.matcher(grammar)
    for byte in text:
        assert matcher.consume_token(byte)
    assert json.loads(read(text.decode(), FORMATS[1], offer).calls[0].arguments) == {"s": "a <b> {"}


# --------------------------------------------------------------- a format, or calls instead

ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def json_grammar(schema: Any, calls: str = "", after: str = "") -> Grammar:
    text = json.dumps(schema, ensure_ascii=False)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text, calls=calls, after=after)


def first_call(formats: Formats) -> bytes:
    return {"llama3_json": b'{"name": "weather", "p', "mistral": b"[TOOL_CALLS]"}.get(
        formats.tools or "", b"<tool_call>"
    )


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_an_answer_is_of_its_form_or_calls(
    compiler: Compiler, formats: Formats, parallel: bool, thinks: bool
) -> None:
    offer = Offer(TOOLS, "auto", None, parallel)
    calls = calls_instead(offer, formats, compiler.markers)
    grammar = json_grammar(ANSWER, calls, "</think>" if thinks else "")
    thought = b"so <tool_call> {</think>\n\n" if thinks else b""
    seen = set()
    for seed in range(8):
        for begin in (b"", b"{", first_call(formats), first_call(formats)):
            text, over = drawn(compiler, grammar, seed, thought + begin)
            if not over:
                continue
            found = read(text, formats, offer, "qwen3" if thinks else None, "first")
            assert bool(found.calls) != bool(found.text) and not found.warnings, text
            if found.calls:
                assert len(found.calls) == 1 or parallel
                check(found, strict_only=True)
            else:
                jsonschema.validate(json.loads(found.text), ANSWER)
            seen.add(bool(found.calls))
    assert seen == {True, False}


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "<function=now></function>", "ok": true}',
        '{"name": "[TOOL_CALLS]now[ARGS]{}", "ok": true}',
        '{"name": "<tool_call>{", "ok": true}',
        '{"name": "<|python_tag|>{", "ok": true}',
        '{"name": "weather", "ok": false}',
        '{"name":"now","ok":false}',
    ],
)
def test_marks_inside_an_answer_are_its_text(
    compiler: Compiler, formats: Formats, text: str
) -> None:
    offer = Offer(TOOLS, "auto")
    grammar = json_grammar(ANSWER, calls_instead(offer, formats, compiler.markers))
    matcher = compiler.matcher(grammar)
    assert matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
    assert read(text, formats, offer, None, "first") == Said(text=text)
    assert read(text, formats, offer, None, "never") == Said(text=text)


def begins_like_a_call(compiler: Compiler, answer: Grammar, formats: Formats) -> bool:
    beginnings = call_beginnings(Offer(TOOLS, "auto"), formats)
    return any(compiler.may_begin(answer, text) for text in beginnings)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_which_answers_could_be_taken_for_calls(compiler: Compiler, formats: Formats) -> None:
    """In tags no JSON; of bare calls any object, unless its keys say that it is none."""
    bare = formats.tools == "llama3_json"
    both = {"properties": {"name": {}, "parameters": {}}}
    named = {"properties": {"name": {"enum": ["x", "y"]}, "parameters": {}}, "required": ["name"]}
    for schema, like in (
        ({"type": "object"}, True), ({}, True), (both, True), (named, False), (ANSWER, False),
        ({"type": "array"}, False),
    ):  # fmt: skip
        assert begins_like_a_call(compiler, json_grammar(schema), formats) is (bare and like), (
            schema
        )


def test_objects_without_the_key_of_a_bare_call(compiler: Compiler) -> None:
    bare = FORMATS[2]
    for schema in ({"type": "object"}, {}, {"properties": {"name": {"type": "string"}}}):
        narrow = without_calls(json_grammar(schema))
        assert narrow is not None and not begins_like_a_call(compiler, narrow, bare)
        text = '{"name": "weather", "parameter": {"unit": 7}}'
        matcher = compiler.matcher(narrow)
        assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    for schema in ({"properties": {"parameters": {}}}, {"required": ["parameters"]}, True):
        assert without_calls(json_grammar(schema)) is None
    assert without_calls(Grammar(kind=GrammarKind.REGEX, text="a")) is None


def test_a_bare_call_is_held_to_its_schema_whatever_its_spacing(compiler: Compiler) -> None:
    """Its references still point to its own definitions."""
    offer, bare = Offer(TOOLS, "auto"), FORMATS[2]
    narrow = without_calls(json_grammar({"type": "object"}))
    assert narrow is not None
    grammar = json_grammar(json.loads(narrow.text), calls_instead(offer, bare, compiler.markers))
    good = '{"unit": "C", "days": 3, "near": ["b"]}'
    for arguments, right in (
        (good, True),
        ('{"unit": "K"}', False),
        (good.replace("b", "c"), False),
    ):
        for text in (
            f'{{"name": "weather", "parameters": {arguments}}}',
            f'{{"name":"weather","parameters":{arguments}}}',
            f'\n\t{{\n "name" : "weather",\n "parameters" : {arguments}\n}}',
        ):
            read_all = compiler.matcher(grammar).try_consume_tokens(list(text.encode())) == len(
                text
            )
            assert read_all is right, text
            assert [c.name for c in read(text, bare, offer, None, "first").calls] == ["weather"]


def test_a_tool_in_tags_that_is_not_strict_takes_its_parameters(compiler: Compiler) -> None:
    """Beside a strict one, whatever their values are."""
    loose = Tool("f", None, {"type": "object", "properties": {"n": {"type": "integer"}}}, False)
    offer = Offer((TOOLS[0], loose), "auto")
    grammar = grammar_of_calls(offer, FORMATS[1], "", compiler.markers)
    text = "<tool_call>\n<function=f>\n<parameter=n>\nmany\n</parameter>\n</function>\n</tool_call>"
    assert compiler.matcher(grammar).try_consume_tokens(list(text.encode())) == len(text)
    assert json.loads(read(text, FORMATS[1], offer).calls[0].arguments) == {"n": "many"}
