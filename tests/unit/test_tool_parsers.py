"""Parsers of what models write: the same parts however the text is cut, and nothing lost.

The oracle is written here, for whole texts, with regular expressions and `json`: it knows nothing
of characters that arrive one by one.
"""

# ruff: noqa: E501 (transcripts have long lines)

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.serve.tools.output import Calls, Format, OutputParser
from toque.serve.tools.parts import Kind, Part, Said, merged, said

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"type": "array", "items": {"type": "string"}},
            "unit": {"enum": ["C", "F"]},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "free": {},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}


def parse(pieces: list[str], form: Format) -> list[Part]:
    parser = OutputParser(form)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged([*parts, *parser.finish()])


def parse_slowly(text: str, form: Format) -> list[Part]:
    """Every character by the reader, none past it."""
    parser = OutputParser(form)
    parser._sink.skip = lambda text, place: place  # type: ignore[method-assign]
    return merged([*parser.push(text), *parser.finish()])


def read(text: str, tools: str | None, **extra: Any) -> Said:
    """Whole, and one character at a time: the same."""
    form = Format(tools=tools, schemas=TOOLS, **extra)
    whole = parse([text], form)
    assert parse(list(text), form) == whole == parse_slowly(text, form)
    return said(whole)


# ------------------------------------------------------------------------- the whole-text oracle

Made = list[tuple[str, Any]]


def _between(pattern: str, text: str) -> tuple[str, list[str]]:
    """The text without the matches and the blanks before them, and the matches' first groups."""
    found = re.findall(pattern, text, re.S)
    rest = re.sub(r"\s*" + pattern, "\0", text, flags=re.S)
    rest = re.sub(r"\0\s*(?=\0|$)", "\0", rest).replace("\0", "")
    return rest, found


def _objects(text: str) -> Made:
    value = json.loads(text)
    calls = value if isinstance(value, list) else [value]
    return [(c["name"], c.get("arguments", c.get("parameters", {}))) for c in calls]


def oracle_hermes(text: str) -> tuple[str, Made]:
    rest, found = _between(r"<tool_call>(.*?)</tool_call>", text)
    return rest, [call for body in found for call in _objects(body)]


def oracle_xml(text: str) -> tuple[str, Made]:
    rest, found = _between(
        r"(?:<tool_call>)?\s*(<function=.*?</function>)\s*(?:</tool_call>)?", text
    )
    calls: Made = []
    for body in found:
        name = re.search(r"<function=(.*?)>", body)
        assert name
        pairs = re.findall(r"<parameter=(.*?)>\n?(.*?)\n?</parameter>", body, re.S)
        calls.append((name[1], {key: _typed(name[1], key, value) for key, value in pairs}))
    return rest, calls


def _typed(tool: str, key: str, value: str) -> Any:
    return value if key in ("city", "unit", "free", "a") else json.loads(value)


def oracle_llama(text: str) -> tuple[str, Made]:
    bodies = text.removeprefix("<|python_tag|>").split(";")
    return "", [call for body in bodies for call in _objects(body)]


def oracle_mistral(text: str) -> tuple[str, Made]:
    before, _, after = text.partition("[TOOL_CALLS]")
    if after.lstrip().startswith("["):
        return before.rstrip(), _objects(after)
    calls = []
    for body in re.split(r"\[TOOL_CALLS\](?!\")", after):
        head, _, arguments = body.partition("[ARGS]")
        calls.append((head.partition("[CALL_ID]")[0], json.loads(arguments)))
    return before.rstrip(), calls


ORACLES = {"hermes": oracle_hermes, "qwen3_coder": oracle_xml,
           "llama3_json": oracle_llama, "mistral": oracle_mistral}  # fmt: skip

# Well-formed answers of every format, with what usually breaks a parser.
GOOD = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        'Let me look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"near": ["a", "b {"], "limit": -1.5e-3}}\n</tool_call>',
        '<tool_call>{"arguments": {"city": "\\u00d8rje \\"x\\" } ] {"}, "name": "get_weather"}</tool_call>',
        'a < b <tool <tool_call>{"name": "now"}</tool_call>\nand after <',
        '<tool_call>\n{"name": "get_weather", "arguments": {"place": {"a": {"b": [[], {}, [null, true]]}},'
        ' "city": "😀 你"}}\n</tool_call>',
        "no call at all, a <tool_cal and some\n trailing blanks \n",
        'ok\n<tool_call>\n{"name": "now", "arguments": {"a": "}"}}\n</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "I look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\nif (a < b) { "x" }\n\nline 2 </param\n</parameter>\n<parameter=near>\n["q", "</p"]\n'
        "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=get_weather><parameter=unit>C</parameter><parameter=limit>null</parameter>"
        '<parameter=place>{"a": {}}</parameter><parameter=free>12</parameter></function></tool_call> done',
        "plain <b>text</b> and <function",
        "<function=now><parameter=a>\n<\n\n</parameter></function>",
    ],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}',
        '{"type": "function", "name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"exact": false}}',
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "a\\nb"}}',
        '{"name": "now"};{"parameters": {"a": 1}, "name": "now"}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
        'Yes. [TOOL_CALLS][{"arguments": {"near": ["]", "["]}, "name": "get_weather", "id": "abc123456"}]',
        'a [TOOL_CALLS]now[ARGS]{"a": "[TOOL_CALLS]"}',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}',
    ],
}  # fmt: skip
# What is no call, or stops being one; said with a warning and lost nowhere.
BAD = {
    "hermes": [
        "<tool_call>\nnot json\n</tool_call> and text",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "cut off',
        '<tool_call>{"name": "no',
        '<tool_call><tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": tru, "b": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\nhello\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo",
        "<tool_call>\n<function=get_weather>\nstray <parameter=city>Oslo</parameter></function></tool_call>",
        "<tool_call>\n<function=nobody>\n</function></tool_call>",
        "<function=now <x>",
    ],
    "llama3_json": [
        '{"name": "nobody", "parameters": {}}',
        '{"name": "get_weather", "parameters": {"city": "Os',
        "<|python_tag|>print(1)",
        '{"name": "now", "parameters": {}}; {"name": 5}',
    ],
    "mistral": [
        "[TOOL_CALLS] hello",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name"',
        "[TOOL_CALLS]nobody[ARGS]{}",
        '[TOOL_CALLS]now[ARGX]{"a": 1}',
    ],
}
ALL = [(name, text) for table in (GOOD, BAD) for name, texts in table.items() for text in texts]


def cuts(text: str, pairs: bool = True) -> list[list[str]]:
    """One cut at each place; two at each pair of places."""
    places = range(len(text) + 1)
    if not pairs:
        return [[text[:a], text[a:]] for a in places]
    return [[text[:a], text[a:b], text[b:]] for a, b in itertools.combinations(places, 2)]


@pytest.mark.parametrize(("tools", "text"), ALL)
def test_every_cut_gives_the_same_parts(tools: str, text: str) -> None:
    form = Format(tools=tools, schemas=TOOLS)
    whole = parse([text], form)
    assert parse(list(text), form) == whole
    for cut in cuts(text, pairs=len(text) < 60):
        assert parse(cut, form) == whole, cut


@pytest.mark.long
@pytest.mark.parametrize(("tools", "text"), [case for case in ALL if len(case[1]) >= 60])
def test_every_pair_of_cuts_gives_the_same_parts(tools: str, text: str) -> None:
    form = Format(tools=tools, schemas=TOOLS)
    whole = parse([text], form)
    for cut in cuts(text):
        assert parse(cut, form) == whole, cut


@pytest.mark.parametrize(
    ("tools", "text"), [(name, text) for name, texts in GOOD.items() for text in texts]
)
def test_a_well_formed_answer_is_what_the_oracle_reads(tools: str, text: str) -> None:
    found = read(text, tools)
    rest, calls = ORACLES[tools](text) if "call" in text or tools != "hermes" else (text, [])
    assert found.text == rest
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert all(call.complete for call in found.calls) and not found.warnings


@pytest.mark.parametrize(
    ("tools", "text"), [(name, text) for name, texts in BAD.items() for text in texts]
)
def test_what_is_no_call_is_text_with_a_warning(tools: str, text: str) -> None:
    found = read(text, tools)
    bare_json = tools == "llama3_json" and text.startswith("{") and not found.calls
    assert len(found.warnings) == (0 if bare_json else 1), found
    if not found.calls:
        assert found.text == text
    else:  # what was told of it and what was not are everything
        letters = re.sub(r"\W", "", found.text + "".join(c.arguments for c in found.calls))
        assert all(word in text for word in re.findall(r"\w+", found.text))
        assert letters


def test_arguments_arrive_while_they_are_written() -> None:
    parser = OutputParser(Format(tools="hermes", schemas=TOOLS))
    parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "a')
    for char in "bcd":
        assert parser.push(char) == [Part(Kind.ARGUMENTS, char, 0)]
    parser = OutputParser(Format(tools="qwen3_coder", schemas=TOOLS))
    parser.push("<tool_call><function=get_weather><parameter=city>a")
    assert parser.push('b"') == [Part(Kind.ARGUMENTS, 'b\\"', 0)]


def test_the_name_is_told_whole_and_before_any_argument() -> None:
    form = Format(tools="hermes", schemas=TOOLS)
    parts = parse(list(GOOD["hermes"][1]), form)
    kinds = [part.kind for part in parts]
    assert kinds == [Kind.TEXT, Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END,
                     Kind.CALL, Kind.ARGUMENTS, Kind.CALL_END]  # fmt: skip
    assert [part.text for part in parts if part.kind is Kind.CALL] == ["now", "get_weather"]


@pytest.mark.parametrize("pieces", [1, 2, 1000])
def test_one_call_is_all_where_calls_are_not_parallel(pieces: int) -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call> x'
    form = Format(tools="hermes", schemas=TOOLS, parallel=False)
    size = max(1, len(text) // pieces)
    found = said(parse([text[i : i + size] for i in range(0, len(text), size)], form))
    assert len(found.calls) == 1 and found.text == ""


def test_a_call_that_may_not_be_made_is_left_out_and_it_is_said() -> None:
    found = read('a <tool_call>{"name": "now"}</tool_call> b', "hermes", may_call=False)
    assert found.text == "a b" and not found.calls and "now" in found.warnings[0]


# -------------------------------------------------------------------------------------- reasoning

THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes", False, "hm", "Yes"),
    ("hm </thin\n</think>Yes ", True, "hm </thin", "Yes "),
    ("<think>again</think>", True, "again", ""),
    ("\n\n<think>a</think> b <think>c</think>", False, "a", "b <think>c</think>"),
    ("<thin is text", False, "", "<thin is text"),
    (" no thoughts ", False, "", " no thoughts "),
    ("cut off in the middle ", True, "cut off in the middle", ""),
    ("</think>\nat once", True, "", "at once"),
]


@pytest.mark.parametrize(("text", "begun", "reasoning", "content"), THOUGHTS)
@pytest.mark.parametrize("tools", [None, "hermes", "llama3_json"])
def test_reasoning_comes_first(
    text: str, begun: bool, reasoning: str, content: str, tools: str | None
) -> None:
    form = Format(tools=tools, schemas=TOOLS, reasoning="qwen3", in_reasoning=begun)
    whole = parse([text], form)
    assert (said(whole).reasoning, said(whole).text) == (reasoning, content)
    for cut in cuts(text):
        assert parse(cut, form) == whole


def test_calls_after_reasoning_and_none_inside_it() -> None:
    text = '<think>I <tool_call>{"name": "now"}</tool_call></think>\n<tool_call>{"name": "now"}</tool_call>'
    form = Format(tools="hermes", schemas=TOOLS, reasoning="qwen3")
    whole = parse([text], form)
    assert len(said(whole).calls) == 1 and "<tool_call>" in said(whole).reasoning
    assert all(parse(cut, form) == whole for cut in cuts(text))


def test_a_call_at_the_start_of_an_answer_that_might_have_been_a_thought() -> None:
    """`<t` begins both `<think>` and `<tool_call>`."""
    text = '<tool_call>{"name": "now"}</tool_call>'
    form = Format(tools="hermes", schemas=TOOLS, reasoning="qwen3")
    whole = parse([text], form)
    assert len(said(whole).calls) == 1 and said(whole).text == ""
    assert all(parse(cut, form) == whole for cut in cuts(text))


# ------------------------------------------------------------------------------------- drawn texts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12) | st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '{"name"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text("ab <t{[\n", max_size=8).filter(lambda t: t == t.strip())


def write_hermes(text: str, calls: Made, ascii_only: bool) -> str:
    dumped = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    return text + "".join(f"\n<tool_call>\n{body}\n</tool_call>" for body in dumped)


def write_llama(text: str, calls: Made, ascii_only: bool) -> str:
    dumped = [json.dumps({"name": n, "parameters": a}, ensure_ascii=ascii_only) for n, a in calls]
    return (text + "<|python_tag|>" if text else "") + "; ".join(dumped)


def write_mistral(text: str, calls: Made, ascii_only: bool) -> str:
    objects = [{"name": n, "arguments": a} for n, a in calls]
    return f"{text}[TOOL_CALLS] {json.dumps(objects, ensure_ascii=ascii_only)}"


WRITERS = {"hermes": write_hermes, "llama3_json": write_llama, "mistral": write_mistral}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), WORDS, CALLS, st.booleans(), st.data())
def test_what_is_written_is_read_back_however_it_is_cut(
    tools: str, text: str, calls: Made, ascii_only: bool, data: st.DataObject
) -> None:
    written = WRITERS[tools](text, calls, ascii_only)
    places = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in itertools.pairwise([0, *places, len(written)])]
    found = said(parse(pieces, Format(tools=tools, schemas=TOOLS)))
    assert [(c.name, json.loads(c.arguments)) for c in found.calls] == calls
    assert found.text == text and not found.warnings


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([*sorted(GOOD), None]),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": {', "}", "}}", '"',
             "<function=now>", "<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]", "now",
             "[ARGS]", "<|python_tag|>", "<think>", "</think>", "\n", " ", "x", "[", "]", ";", ",", "{}",
             '"a": 1', "\\", "\\u00", "1e", "tru", ', "parameters": {']
        ), max_size=14),
    st.booleans(), st.booleans(), st.sampled_from(["anywhere", "first", "never"]), st.data(),
)  # fmt: skip
def test_fragments_of_formats_in_any_order_cut_anywhere(
    tools: str | None,
    fragments: list[str],
    think: bool,
    parallel: bool,
    place: Calls,
    data: st.DataObject,
) -> None:
    text = "".join(fragments)
    reasoning = "qwen3" if think else None
    form = Format(tools=tools, schemas=TOOLS, reasoning=reasoning, parallel=parallel, calls=place)
    whole = parse([text], form)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert parse(pieces, form) == whole == parse_slowly(text, form)
    for call in said(whole).calls:
        assert call.name in TOOLS
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


# ------------------------------------------------------------------- calls or an answer of some form

ANSWERS = [
    '{"a": "<tool_call>{}</tool_call>", "b": "<function=now></function>"}',
    '["[TOOL_CALLS]now[ARGS]{}", "<|python_tag|>{"]',
    '{"name": "now", "ok": true}',
    '{"name": "nobody", "parameters": {}}',
    '{"name": "now", "parameter',
    "<tool_cal",
    " <tool_call>",
    "[TOOL_CALLS",
    '\n\n\n{"name": "now", "parameters": {}}',
    "",
]
BEGINNINGS = {
    "hermes": r"\n{0,2}<tool_call>",
    "qwen3_coder": r"\n{0,2}<tool_call>",
    "llama3_json": r'[ \t\r\n]*\{\s*"name"\s*:\s*"(get_weather|now)"\s*,\s*"parameters"\s*:',
    "mistral": r"\n{0,2}\[TOOL_CALLS\]",
}


@pytest.mark.parametrize("tools", sorted(GOOD))
@pytest.mark.parametrize("text", [*(text for _, text in ALL), *ANSWERS])
def test_the_beginning_tells_calls_from_an_answer(tools: str, text: str) -> None:
    """Calls are read as ever; of an answer no letter is taken for anything."""
    found = read(text, tools, calls="first")
    if re.match(BEGINNINGS[tools], text):
        assert found == read(text, tools)
    else:
        assert found == Said(text=text)
    assert read(text, tools, calls="never") == Said(text=text)
    for cut in cuts(text, pairs=len(text) < 40):
        assert said(parse(cut, Format(tools=tools, schemas=TOOLS, calls="first"))) == found, cut


def test_an_answer_is_held_up_no_longer_than_it_could_be_a_call() -> None:
    parser = OutputParser(Format(tools="llama3_json", schemas=TOOLS, calls="first"))
    assert parser.push('{"name": "n') == []
    assert parser.push("i") == [Part(Kind.TEXT, '{"name": "ni')]
    assert parser.push("l") == [Part(Kind.TEXT, "l")]


@pytest.mark.parametrize("tools", sorted(GOOD))
def test_nothing_goes_past_the_end_of_the_only_call(tools: str) -> None:
    for text in (
        '<tool_call>{"name": "now", "arguments": {}}x and more',
        "<function=now></function>x and more",
        "[TOOL_CALLS]now[ARGS]{}x and more [TOOL_CALLS]now[ARGS]{}",
        '{"name": "now", "parameters": {}}x and more',
    ):
        read(text, tools, parallel=False)
