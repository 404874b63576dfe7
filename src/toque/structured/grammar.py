"""Grammars compiled against a vocabulary, within budgets. A layer over llguidance, which is
imported with the first grammar and not before.

Owns: the vocabulary's trie, the compiled grammars of late. Knows: llguidance's formats and limits.
Does not know: requests, rows, HTTP. One instance may be used from several threads.

Nothing is lenient: a keyword of a schema that is not enforced is refused (schema.py), `oneOf` only
passes where its branches exclude each other. llguidance counts what a grammar costs to build and to
step (its "fuel"), so neither takes longer than the limits allow, whatever the grammar.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toque.errors import RequestError
from toque.structured.schema import SchemaError, check_schema, children, merges, subschemas
from toque.types import Grammar, GrammarKind, Spellings, TokenId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 1 << 19
MAX_LEXER_STATES = 20_000  # a kilobyte or two each, per sequence
PLACE_S = 0.5  # for finding out what of a schema is wrong
MAX_PATTERN_TRIALS = 4096  # patterns of keys x declared keys
MAX_CHOICES = 4096
CACHED_CHARS = 4 << 20  # of grammar text; a compiled one takes some fifty times as much
# Between two tokens of JSON. The bound keeps a weak model from writing blanks for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# Tokens that are free text of some length get their part of a mask at once, made with the index.
# None for blanks: theirs only helps where they are not bounded.
SLICES = tuple(rf'[^"\\\x00-\x1F\x7F]{length}' for length in ("{1,10}", "{1,30}", "+"))
# No \uXXXX: in other letters an additional key could be a declared one, and a string could hold
# half a surrogate pair. Every character but some control ones can be written as itself.
_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrbtf\\"',
}
# Attributes of rules that would change the sampler, or take tokens back.
_FOREIGN_ATTRIBUTE = re.compile(r"\[[^\]]*\b(temperature|max_tokens|stop|stop_capture)\s*=")
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')


class GrammarError(RequestError):
    """The grammar cannot be used; the message says why and where."""


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """What llguidance asks of a tokenizer."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[TokenId]
    eos_token_id: TokenId
    bos_token_id: TokenId | None = None

    def __call__(self, text: bytes) -> list[TokenId]:
        return []  # only asked for forced tokens, which are not used here


class Compiler:
    """From grammars to matchers, for one vocabulary."""

    def __init__(self, spellings: Spellings) -> None:
        """Raises GrammarError where no output could ever end."""
        import llguidance

        ends = [i for i in spellings.end_token_ids if i < len(spellings.tokens)]
        if not ends:
            raise GrammarError("this model has no token that ends an output")
        wrapped = llguidance.TokenizerWrapper(
            _Tokenizer(spellings.tokens, spellings.markers, eos_token_id=ends[0])
        )
        # In two parts, because each holds the interpreter's lock to its end.
        trie = llguidance.LLTokenizer(wrapped, eos_token=ends, slices=[])
        self._tokenizer: LLTokenizer = trie.with_slices(list(SLICES))
        self.markers = markers_of(spellings)
        self._shown = spellings.shown
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._cached_chars = 0

    @property
    def num_words(self) -> int:
        """Of 32 bits, in a mask."""
        return -(-int(self._tokenizer.vocab_size) // 32)

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        with self._lock:
            return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh matcher, at the beginning. Raises GrammarError."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        made = self._compile(grammar)
        with self._lock:
            if self._compiled.setdefault(grammar, made) is made:
                self._cached_chars += grammar.num_chars
            while self._cached_chars > CACHED_CHARS and len(self._compiled) > 1:
                old, _ = self._compiled.popitem(last=False)
                self._cached_chars -= old.num_chars
        return made.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if grammar.num_chars > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"it has more than {MAX_GRAMMAR_CHARS} characters")
        matcher = self._built(grammar)
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            if grammar.kind == GrammarKind.JSON_SCHEMA:
                raise SchemaError(self._place(json.loads(grammar.text), reason), reason)
            raise GrammarError(reason)
        if grammar.kind == GrammarKind.JSON_SCHEMA:
            self._check_patterns(json.loads(grammar.text))
        return matcher

    def _check_patterns(self, schema: Any) -> None:
        """A pattern of keys that also matches a declared key is a dead end for llguidance."""
        nodes = [(place, node) for place, node in subschemas(schema) if isinstance(node, dict)]
        everywhere = {name for _, node in nodes for name in node.get("properties", ())}
        merged = merges(schema)
        for place, node in nodes:
            names = everywhere if merged else node.get("properties", ())
            if len(names) * len(node.get("patternProperties", ())) > MAX_PATTERN_TRIALS:
                raise SchemaError(place, "'patternProperties' has too many patterns")
            for pattern in node.get("patternProperties", ()) if names else ():
                keys = {"type": "string", "pattern": pattern}
                key = self._built(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(keys)))
                for name in names:
                    if self._reads(key.deep_copy(), json.dumps(name, ensure_ascii=False)):
                        message = f"a pattern of 'patternProperties' matches {name[:64]!r}"
                        raise SchemaError(place, f"{message}, which is declared: not supported")

    def may_begin(self, grammar: Grammar, text: str) -> bool:
        """Whether an output may: with these letters, or with the marker token of that text.
        Raises GrammarError."""
        marker = self.markers.get(text)
        spelled = [self._tokenizer.greedy_tokenize(text), [] if marker is None else [marker]]
        return any(
            bool(ids) and self.matcher(grammar).try_consume_tokens(ids) == len(ids)
            for ids in spelled
        )

    def _reads(self, matcher: LLMatcher, text: str) -> bool:
        tokens = self._tokenizer.greedy_tokenize(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def _built(self, grammar: Grammar) -> LLMatcher:
        """Perhaps in its state of error."""
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        source = _source(grammar, self.markers, self._shown)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that can never begin fails here
        return matcher

    def _place(self, schema: Any, reason: str) -> str:
        """The innermost part of a schema that fails for the same reason alone, as a JSON pointer:
        llguidance does not say where it was."""
        deadline_s = time.monotonic() + PLACE_S
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        place, node, go_on = "", schema, True
        while go_on:
            go_on = False
            for where, child in children(node):
                if time.monotonic() > deadline_s:
                    return place
                if not isinstance(child, dict):
                    continue
                alone = json.dumps({**definitions, **child})
                found = self._built(Grammar(kind=GrammarKind.JSON_SCHEMA, text=alone))
                if found.is_error() and _reason(found.get_error()) == reason:
                    place, node, go_on = place + where, child, True
                    break
        return place


def markers_of(spellings: Spellings) -> dict[str, TokenId]:
    """Marker tokens by their text."""
    return {spellings.tokens[i].decode(errors="replace"): i for i in spellings.markers}


# --------------------------------------------------------------- as llguidance reads a grammar


def _source(grammar: Grammar, markers: Mapping[str, TokenId], shown: Collection[TokenId]) -> str:
    """Raises GrammarError, SchemaError.

    The outer grammar also switches llguidance's forcing off: where only one text can follow, it
    would allow one spelling of it alone, which it asks of an encoder that is not here.
    """
    grammars = [{"name": "inner", **_INNER[grammar.kind](grammar.text)}]
    wanted = "@inner"
    if grammar.calls:
        grammars.append({"name": "calls", "lark_grammar": grammar.calls})
        wanted = "(@inner | @calls)"
    after = _after(grammar.after, wanted, markers, shown)
    outer = after if grammar.after else f"start: {wanted}"
    plain = '%llguidance {"no_forcing": true}\n'
    return json.dumps({"grammars": [{"lark_grammar": plain + outer}, *grammars]})


def _after(
    boundary: str, wanted: str, markers: Mapping[str, TokenId], shown: Collection[TokenId]
) -> str:
    others = ",".join(str(i) for i in shown if i != markers.get(boundary))
    before = f"(TEXT <[{others}]>)* " if others else ""
    return f"""start: {before}free NEWLINES {wanted}
free: {until("boundary", boundary, markers)}
boundary[lazy]: TEXT {quoted(boundary)}
TEXT: /(?s:.*)/
NEWLINES: /\\n{{0,2}}/
"""


def until(rule: str, text: str, markers: Mapping[str, TokenId]) -> str:
    """Lark: free text up to and including `text`, whether it comes as one token or in letters.
    `rule` is the lazy rule for the latter; TEXT matches anything."""
    return rule if text not in markers else f"{rule} | TEXT <[{markers[text]}]>"


def literal(text: str, markers: Mapping[str, TokenId]) -> str:
    """Lark: exactly `text`; markers in it come as their tokens or in letters."""
    names = sorted(filter(None, markers), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(
        f"(<[{markers[piece]}]> | {quoted(piece)})" if place % 2 else quoted(piece)
        for place, piece in enumerate(pieces)
        if piece
    )


def inline_schema(schema: Mapping[str, Any]) -> str:
    """Lark: JSON that a schema describes. Raises SchemaError."""
    check_schema(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _OPTIONS}, ensure_ascii=False)}"


def check_lark(text: str) -> None:
    """A client's own grammar may not ask for what would not be done.

    Raises GrammarError, SchemaError.
    """
    foreign = _FOREIGN_ATTRIBUTE.search(_LITERAL.sub("", text))
    if foreign is not None:
        raise GrammarError(f"the attribute '{foreign[1]}' of a rule is not supported")
    for inline in re.finditer(r"%json\s*", text):
        with suppress(ValueError, RecursionError):  # not JSON: llguidance says where
            check_schema(json.JSONDecoder().raw_decode(text, inline.end())[0])


def quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _json_schema(text: str) -> dict[str, Any]:
    schema = _decoded(text)
    check_schema(schema)
    if isinstance(schema, bool):
        if not schema:
            raise GrammarError("the schema false allows no value")
        schema = {}
    return {"json_schema": {**schema, "x-guidance": _OPTIONS}}


def _regex(text: str) -> dict[str, Any]:
    import llguidance

    # \d, \w and \s are those of ASCII: who asks for digits means 0 to 9.
    return {"lark_grammar": f"start: /{llguidance.regex_to_lark(text, 'dws')}/"}


def _choice(text: str) -> dict[str, Any]:
    choices = _decoded(text)
    if not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        raise GrammarError("the choices must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices and are {len(choices)}")
    # One terminal: as rules, thousands of them would be thousands of items of the parser's row.
    options = " | ".join(quoted(choice) for choice in choices)
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {options}"}


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


_INNER: Mapping[GrammarKind, Callable[[str], dict[str, Any]]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.LARK: _lark,
}


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from None


_STATES = {  # llguidance's words for how a parser stopped before its first token
    "NoExtension": "nothing can match it",
    "NoExtensionBias": "nothing can match it",
    "ParserTooComplex": "it is too complex: too many ways to read what it matches",
    "LexerTooComplex": "it is too complex: a pattern has too many states",
}


def _reason(error: str) -> str:
    """llguidance's sentence, without the state of its parser that may follow."""
    words = error.replace("<non-verbose/>", "").split("<state>")[0].split()
    return _STATES.get(words[0], " ".join(words)) if words else "it cannot be compiled"
