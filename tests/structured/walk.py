"""A vocabulary of bytes and some longer tokens, and outputs drawn from nothing but the masks."""

from __future__ import annotations

import random

import numpy as np

from toque.structured.grammar import Compiler
from toque.types import Grammar, Spellings

END = 2
MARK = 3  # the marker <call>
MORE = ['"', '":', '": ', '", "', "{}", "[]", "true", "false", "null", " 1", "12", "\n", "}]", '"}']
TOKENS = (b"", b"<s>", b"</s>", b"<call>", *(bytes([i]) for i in range(256)))
SPELLINGS = Spellings(
    tokens=(*TOKENS, *(text.encode() for text in MORE)),
    markers=(1, 2, 3),
    end_token_ids=(END,),
    shown=(3,),
)


def ids_of(text: str) -> list[int]:
    """Byte by byte; <call> is the marker."""
    pieces = text.split("<call>")
    ids = [i + 4 for i in pieces[0].encode()]
    for piece in pieces[1:]:
        ids += [MARK, *(i + 4 for i in piece.encode())]
    return ids


def text_of(ids: list[int]) -> str:
    return b"".join(SPELLINGS.tokens[i] for i in ids).decode()


def walk(compiler: Compiler, grammar: Grammar, seed: int, most: int = 600) -> str | None:
    """An output that the masks allow, drawn at random; None if it did not end in time.

    Closing characters and the end are drawn more often, or most walks would be lost in strings.
    """
    drawn = random.Random(seed)
    matcher = compiler.matcher(grammar)
    ids: list[int] = []
    while len(ids) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed and not matcher.is_error()
        closing = [i for i in allowed if i == END or SPELLINGS.tokens[i] in (b'"', b"}", b"]")]
        text = [i for i in allowed if SPELLINGS.tokens[i].strip()]  # not white space alone
        pick = closing if closing and drawn.random() < 0.4 else text or allowed
        token = drawn.choice(pick)
        if token == END:
            return text_of(ids)
        ids.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            return text_of(ids)
    return None


def reads(compiler: Compiler, grammar: Grammar, text: str) -> bool:
    """Whether a whole output may be this, byte by byte."""
    matcher = compiler.matcher(grammar)
    ids = ids_of(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def begins(compiler: Compiler, grammar: Grammar, text: str) -> int:
    """How many tokens of this an output may begin with."""
    return int(compiler.matcher(grammar).try_consume_tokens(ids_of(text)))
