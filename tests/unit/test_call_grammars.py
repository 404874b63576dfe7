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
from toque.serve.call_grammars import grammar_of_calls, is_constrained
from toque.serve.formats import Formats
from toque.serve.offer import Offer, Tool
from toque.serve.tools.output import Format, OutputParser
from toque.serve.tools.parts import Said, said
from toque.structured.grammar import Compiler
from toque.types import Grammar, Spellings

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
        printable = [i for i in allowed if 32 <= i < 127 or i > 256] or allowed
        token = END if END in allowed and draw.random() < 0.5 else draw.choice(printable)
        if token == END:
            return text.decode(errors="replace"), True
        assert matcher.consume_token(token)
        text += TEXTS.get(token, bytes([token % 256]))
        if matcher.is_stopped():
            return text.decode(errors="replace"), True
    return text.decode(errors="replace"), False


def read(text: str, formats: Formats, offer: Offer, reasoning: str | None = None) -> Said:
    form = Format(tools=formats.tools, schemas=offer.schemas, parallel=offer.parallel,
                  reasoning=reasoning, in_reasoning=reasoning is not None)  # fmt: skip
    parser = OutputParser(form)
    return said([*parser.push(text), *parser.finish()])


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
