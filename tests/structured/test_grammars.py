"""Regular expressions, choices and Lark grammars, with Python's `re` and plain lists as oracles;
what begins late; what calls tools; what is hostile."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.structured.walk import MARK, SPELLINGS, begins, ids_of, reads, walk
from toque.errors import RequestError
from toque.structured.calls import call_grammar
from toque.structured.grammar import CACHED_CHARS, Compiler, check_lark
from toque.types import Grammar, GrammarKind

REGEX, CHOICE, LARK, SCHEMA = (
    GrammarKind.REGEX,
    GrammarKind.CHOICE,
    GrammarKind.LARK,
    GrammarKind.JSON_SCHEMA,
)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(SPELLINGS)


def grammar(kind: GrammarKind, text: str, after: str = "") -> Grammar:
    return Grammar(kind=kind, text=text, after=after)


EXPRESSIONS = [
    "abc",
    "[a-c]{2,4}",
    "(yes|no)( indeed)?",
    "\\d{3}-\\d{4}",
    "\\w+@\\w+\\.(com|org)",
    "a/b/c",
    "^anchored$",
    "x*y+z?",
    "[^a-z]{3}",
    "(a|b)*a(a|b){28}",
    'quote"and\\\\slash',
    "é+ü|你好|😀",
    "[\\x41-\\x43]\\t\\n",
    "(?i)case",
    ".{2}",
    "",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_outputs_match_the_expression_as_a_whole(compiler: Compiler, expression: str) -> None:
    ended = 0
    for seed in range(20):
        text = walk(compiler, grammar(REGEX, expression), seed)
        if text is not None:
            ended += 1
            assert re.fullmatch(expression, text), text
    assert ended >= 5


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["a", "ab", "abc"],  # one is the beginning of another: the end decides
        ["café", "你好", "😀", 'a"b', "c\\d", "\n", "", "{x}", "/y/"],
        [f"item-{i}" for i in range(3000)],
        ["<s>"],  # letters, not the control token
    ],
    ids=lambda choices: f"{len(choices)} from {choices[0]}",
)
def test_outputs_are_one_of_the_choices(compiler: Compiler, choices: list[str]) -> None:
    chosen = grammar(CHOICE, json.dumps(choices))
    drawn = {walk(compiler, chosen, seed) for seed in range(40)}
    assert drawn <= set(choices) and (len(drawn) > 1 or len(choices) == 1)
    for choice in choices[:10]:
        assert reads(compiler, chosen, choice)
        assert not reads(compiler, chosen, choice + "!")


def test_lark_grammars(compiler: Compiler) -> None:
    sums = grammar(LARK, 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"')
    for seed in range(20):
        text = walk(compiler, sums, seed)
        assert text is None or re.fullmatch(r"[0-9+()]+", text)
        assert text is None or isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)
    assert reads(compiler, sums, "1+(2+33)") and not reads(compiler, sums, "1+")


@pytest.mark.parametrize(
    "kind,text,named",
    [
        (REGEX, "([", "unclosed"),
        (REGEX, "(?=a)b", "look-around"),
        (REGEX, "\\bword", "lookaround"),
        (REGEX, "(a)\\1", "backreferences"),
        (CHOICE, "[]", "1 to"),
        (CHOICE, '["a", 5]', "list of strings"),
        (CHOICE, json.dumps(["x"] * 5000), "5000"),
        (LARK, 'root :== "a"', "1(7)"),
        (LARK, 'start: "a"\n  b', "2("),
        (LARK, "start: <nope>", "nope"),
        (LARK, 'foo: "a"', "start"),
        (LARK, "start: start", "nothing can match"),
        (LARK, 'start: %json {"type": "object", "not": {}}', "not"),
        (SCHEMA, "{", "JSON"),
        (SCHEMA, "false", "no value"),
        (SCHEMA, "[" * 5000, "JSON"),
        (SCHEMA, json.dumps({"enum": ["x" * (1 << 20)]}), "characters"),
    ],
)
def test_what_is_wrong_is_said(
    compiler: Compiler, kind: GrammarKind, text: str, named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.matcher(grammar(kind, text))
    assert named in str(caught.value)
    assert "state>" not in str(caught.value) and "non-verbose" not in str(caught.value)


@pytest.mark.parametrize("attribute", ["temperature=0.5", "max_tokens=3", 'stop="x"'])
def test_rules_may_not_steer_the_sampler(attribute: str) -> None:
    with pytest.raises(RequestError, match=attribute.split("=")[0]):
        check_lark(f"start: a\na[{attribute}]: /x*/")
    check_lark('start: a "[temperature=1]"\na[lazy]: /x*/ "]"')


def test_schemas_inside_a_grammar_are_checked_too() -> None:
    with pytest.raises(RequestError, match="maxlength"):
        check_lark('start: "a" obj\nobj: %json {"items": {"maxlength": 3}} "b"')
    with pytest.raises(RequestError, match="x-guidance"):
        check_lark('start: %json {"x-guidance": {"lenient": true}}')
    check_lark('start: %json {"items": {"maxLength": 3}} "b"')


# ------------------------------------------------------------------------------- what begins late


@pytest.mark.parametrize("boundary", ["<call>", "</think>"])
def test_the_grammar_begins_after_a_boundary(compiler: Compiler, boundary: str) -> None:
    """A marker token or letters; free before it, without an end; then bound."""
    for kind, text, good, bad in (
        (SCHEMA, '{"type": "object", "maxProperties": 0}', "{}", "{x"),
        (REGEX, "[0-9]{2}", "42", "x"),
        (CHOICE, '["yes", "no"]', "no", "maybe"),
        (LARK, 'start: "a"', "a", "b"),
    ):
        late = grammar(kind, text, boundary)
        thought = 'so {"x": 1} <s> or\n\n42?'
        assert reads(compiler, late, f"{thought}{boundary}{good}")
        assert reads(compiler, late, f"{thought}{boundary}\n\n{good}")
        assert reads(compiler, late, f"{boundary}{good}")
        whole = f"{thought}{boundary}{bad}"
        assert begins(compiler, late, whole) < len(ids_of(whole))
        assert not reads(compiler, late, thought) and not reads(compiler, late, good)


def test_free_text_may_hold_markers_that_are_text(compiler: Compiler) -> None:
    late = grammar(REGEX, "[0-9]{2}", "</think>")
    assert reads(compiler, late, "<call>so <call> or <call></think>42")
    control = [1, *ids_of("x</think>42")]  # <s> as a token
    assert compiler.matcher(late).try_consume_tokens(control) == 0
    assert not reads(compiler, grammar(REGEX, "[0-9]{2}", "<call>"), "x<call><call>42")


# -------------------------------------------------------------------------------------- tool calls

ADD = {
    "type": "object",
    "properties": {
        "name": {"const": "add"},
        "arguments": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
GOOD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
BAD = '{"name": "add", "arguments": {"a": 1}}'


def tagged(**more: Any) -> Grammar:
    return call_grammar(
        trigger="<call>",
        opening="\n",
        body=ADD,
        closing="\n</call>",
        markers={"<call>": MARK},
        **more,
    )


def spelled(text: str) -> list[int]:
    """`<call>` in letters."""
    return [i + 4 for i in text.encode()]


def call(body: str) -> str:
    return f"<call>\n{body}\n</call>"


def test_a_call_is_bound_once_it_begins(compiler: Compiler) -> None:
    free = tagged()
    for text in (
        "Just text, with < and {.",
        call(GOOD),
        f"Let me add. {call(GOOD)}\n{call(GOOD)} Done.",
        "a call",
    ):
        assert reads(compiler, free, text), text
    for text in (call(BAD), f"x {call(GOOD)}{call(BAD)}", "<call>add"):
        assert begins(compiler, free, text) < len(ids_of(text)), text


def test_a_call_that_is_spelled_in_letters_is_bound_too(compiler: Compiler) -> None:
    for text, whole in ((f"x {call(GOOD)}", True), (f"x {call(BAD)}", False)):
        ids = spelled(text)
        assert (compiler.matcher(tagged()).try_consume_tokens(ids) == len(ids)) is whole


def test_required_calls(compiler: Compiler) -> None:
    must = tagged(required=True)
    assert reads(compiler, must, call(GOOD))
    assert reads(compiler, must, f"{call(GOOD)}\n{call(GOOD)}")
    for text in ("text", f"text {call(GOOD)}", f"{call(GOOD)} text"):
        assert not reads(compiler, must, text), text
    assert not reads(compiler, must, "")
    for seed in range(20):
        text = walk(compiler, must, seed)
        for made in re.findall(r"<call>\n(.*?)\n</call>", text or "", re.DOTALL):
            assert set(json.loads(made)["arguments"]) == {"a", "b"}


def test_one_call_at_most(compiler: Compiler) -> None:
    for must in (True, False):
        one = tagged(required=must, many=False)
        assert reads(compiler, one, call(GOOD))
        assert not reads(compiler, one, call(GOOD) + call(GOOD))
        assert reads(compiler, one, "text") is not must


def test_calls_in_a_list(compiler: Compiler) -> None:
    listed = call_grammar(
        trigger="<call>", opening="[", body=ADD, closing="]", separator=", ",
        markers={"<call>": MARK},
    )  # fmt: skip
    for text in ("text", f"<call>[{GOOD}]", f"well: <call>[{GOOD}, {GOOD}]"):
        assert reads(compiler, listed, text), text
    for text in (f"<call>[{GOOD}, {BAD}]", f"<call>[{GOOD}] more"):
        assert not reads(compiler, listed, text), text


def test_calls_without_a_trigger(compiler: Compiler) -> None:
    bare = call_grammar(trigger="", body=ADD)
    assert reads(compiler, bare, GOOD) and reads(compiler, bare, "Hello {there}")
    assert not reads(compiler, bare, BAD) and not reads(compiler, bare, " {no")
    must = call_grammar(trigger="", body=ADD, required=True)
    assert reads(compiler, must, GOOD) and not reads(compiler, must, "Hello")


def test_calls_after_thinking(compiler: Compiler) -> None:
    late = tagged(after="</think>", required=True)
    assert reads(compiler, late, f"hm, a call?</think>\n\n{call(GOOD)}")
    assert not reads(compiler, late, call(GOOD))


def test_a_body_in_lark(compiler: Compiler) -> None:
    """As for calls that are not JSON."""
    body = 'body: "<f>" VALUE "</f>"\nVALUE: /[0-9]+/'
    made = call_grammar(trigger="<call>", body=body, closing="</call>", required=True)
    assert reads(compiler, made, "<call><f>12</f></call>".replace("<call>", "<call>")) is False
    ids = spelled("<call><f>12</f></call>")
    assert compiler.matcher(made).try_consume_tokens(ids) == len(ids)


# ------------------------------------------------------------------------------------------ budgets


def wide(choice: str, depth: int, width: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        inner = {
            choice: [
                {
                    "type": "object",
                    "properties": {f"k{level}_{i}": inner},
                    "required": [f"k{level}_{i}"],
                }
                for i in range(width)
            ]
        }
    return inner


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"items": inner}
    return inner


HOSTILE: dict[str, tuple[GrammarKind, str]] = {
    "exponential regex": (REGEX, "(a|b)*a(a|b){28}c"),
    "nested repetition": (REGEX, "(((a{1,99}){1,99}){1,99}){1,99}b"),
    "catastrophic for backtracking": (REGEX, "(a*)*(a*)*(a*)*b" * 20),
    "large classes": (REGEX, "[\\w\\d\\s\\S]{1,200}" * 20),
    "wide oneOf": (SCHEMA, json.dumps(wide("oneOf", 6, 3))),
    "wide anyOf": (SCHEMA, json.dumps(wide("anyOf", 7, 3))),
    "deep": (SCHEMA, json.dumps(deep(300))),
    "all of everything": (
        SCHEMA,
        json.dumps(
            {"allOf": [{"properties": {f"a{i}": {"pattern": f"x{i}"}}} for i in range(800)]}
        ),
    ),
    "many patterns": (
        SCHEMA,
        json.dumps({"patternProperties": {f"^a{i}.*b{i}$": {} for i in range(60)}}),
    ),
    "a long count": (SCHEMA, json.dumps({"type": "string", "maxLength": 10**9})),
    "long counts of long counts": (
        SCHEMA,
        json.dumps({"type": "array", "maxItems": 10**6, "items": {"maxItems": 10**6}}),
    ),
    "many values": (SCHEMA, json.dumps({"enum": [f"v{i}" for i in range(20000)]})),
    "ambiguous": (LARK, "start: a\na: a a | /x/ | /x*/ | "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_are_refused_or_stay_within_their_limits(compiler: Compiler, name: str) -> None:
    """Compiled or refused, stepped or stopped: what matters is that this comes to its end, and
    that what may follow is still decided by masks."""
    try:
        matcher = compiler.matcher(grammar(*HOSTILE[name]))
    except RequestError:
        return
    for _ in range(40):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            return
        token = next(i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1)
        matcher.consume_token(token)
        if matcher.is_stopped():
            return


def test_the_cache_is_bounded(compiler: Compiler) -> None:
    small = Compiler(SPELLINGS)
    filler = "x" * 100_000
    for number in range(CACHED_CHARS // 100_000 + 20):
        small.matcher(grammar(LARK, f'start: "a{number}" // {filler}'))
    assert small._cached_chars <= CACHED_CHARS
    assert sum(len(kept.text) for kept in small._compiled) == small._cached_chars
    assert small.knows(grammar(LARK, f'start: "a{number}" // {filler}'))
    assert not small.knows(grammar(LARK, f'start: "a0" // {filler}'))


def test_copies_do_not_disturb_each_other(compiler: Compiler) -> None:
    two = grammar(CHOICE, '["ab", "cd"]')
    first, second = compiler.matcher(two), compiler.matcher(two)
    assert first.consume_tokens(ids_of("a")) and second.consume_tokens(ids_of("c"))
    assert not first.validate_tokens(ids_of("d")) and second.validate_tokens(ids_of("d"))
    assert compiler.matcher(two).validate_tokens(ids_of("a"))
