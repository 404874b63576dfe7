"""The text of one choice: never half a character, never a part of a stop string, never late."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import RequestError
from toque.serve.stream import TextStream

SPECIAL = 0


class Spelled:
    """A tokenizer of which the test says how each token is spelled; token 0 is special."""

    def __init__(self, spellings: list[bytes]) -> None:
        self.spellings = [b"<end>", *spellings]

    def token_bytes(self, token_id: int) -> bytes:
        return self.spellings[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str, str | None]:
    """What each push showed, what the flush showed, and what stopped it."""
    stream = TextStream(Spelled(pieces), stop)
    shown = [stream.push(token_id) for token_id in range(1, len(pieces) + 1)]
    return shown, stream.flush(), stream.stopped


def cut_by_hand(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule itself: the match that ends first; of those, the one that begins first."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_by_hand(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that could still become a stop string."""
    sizes = range(1, len(text) + 1)
    return max((n for n in sizes if any(s.startswith(text[-n:]) for s in stops)), default=0)


def whole_characters(data: bytes) -> str:
    """What is certain of a text of which only these bytes are known."""
    tails = [size for size in (1, 2, 3) if may_become_a_character(data[len(data) - size :])]
    return data[: len(data) - max(tails, default=0)].decode("utf-8", errors="replace")


def may_become_a_character(tail: bytes) -> bool:
    return any(is_a_character(tail + last * n) for last in (b"\x80", b"\xbf") for n in (1, 2, 3))


def is_a_character(data: bytes) -> bool:
    return len(data.decode("utf-8", errors="ignore")) == 1 == len(data.decode("utf-8", "replace"))


stop_strings = st.lists(st.text("abé🚀\ufffd", min_size=1, max_size=5), max_size=4).map(tuple)
any_bytes = st.lists(st.binary(max_size=4), max_size=12)
likely_bytes = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", b"\xc3", b"\xa9", "é🚀".encode(), b"\xf0\x9f", b"\x9a\x80"]
    ),
    max_size=16,
)


@settings(deadline=None)
@given(pieces=st.one_of(any_bytes, likely_bytes), stop=stop_strings)
def test_text_is_what_the_bytes_decode_to_cut_by_the_rule(
    pieces: list[bytes], stop: tuple[str, ...]
) -> None:
    shown, rest, stopped = run(pieces, stop)
    text = b"".join(pieces).decode("utf-8", errors="replace")
    assert ("".join(shown) + rest, stopped) == cut_by_hand(text, stop)


@settings(deadline=None)
@given(pieces=st.one_of(any_bytes, likely_bytes), stop=stop_strings)
def test_nothing_is_held_longer_than_it_must(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """After every push, exactly what could still change is missing."""
    shown, _, _ = run(pieces, stop)
    for count in range(1, len(pieces) + 1):
        text = whole_characters(b"".join(pieces[:count]))
        known, stopped = cut_by_hand(text, stop)
        if stopped is None:
            known = text[: len(text) - held_by_hand(text, stop)]
        assert "".join(shown[:count]) == known


def test_every_stop_string_at_every_cut() -> None:
    """All ways to cut ten bytes into tokens, with each part of the text as a stop string."""
    text = "aébab🚀"
    data = text.encode()
    stops = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for mask in range(1 << (len(data) - 1)):
        inner = [place for place in range(1, len(data)) if mask >> (place - 1) & 1]
        pieces = [data[i:j] for i, j in pairwise([0, *inner, len(data)])]
        for stop in stops:
            shown, rest, stopped = run(pieces, (stop,))
            assert stopped == stop
            assert "".join(shown) + rest == text[: text.index(stop)]


def test_stop_strings_that_overlap_themselves_and_each_other() -> None:
    """Every text of eight letters a and b, every stop string up to five, every pair up to three."""
    words = ["".join(w) for n in range(1, 6) for w in product("ab", repeat=n)]
    short = [word for word in words if len(word) <= 3]
    stops = [(word,) for word in words] + list(combinations(short, 2))
    for letters in product("ab", repeat=8):
        pieces = [letter.encode() for letter in letters]
        for stop in stops:
            shown, rest, stopped = run(pieces, stop)
            assert ("".join(shown) + rest, stopped) == cut_by_hand("".join(letters), stop)


def test_the_match_that_ends_first_wins_then_the_longest() -> None:
    assert run([b"xabcd"], ("abcd", "bc"))[::2] == (["xa"], "bc")
    assert run([b"xabc", b"d"], ("bc", "abc", "c"))[::2] == (["x", ""], "abc")


def test_an_unfinished_stop_string_is_released_by_the_flush() -> None:
    shown, rest, stopped = run([b"one ", b"ST", b"O"], ("STOP",))
    assert (shown, rest, stopped) == (["one ", "", ""], "STO", None)


def test_only_the_possible_beginning_is_held_of_a_long_stop_string() -> None:
    shown, _, _ = run([b"1", b" Z", b"Z", b"2"], ("Z" * 200,))
    assert shown == ["1", " ", "", "ZZ2"]


def test_a_character_waits_for_its_last_byte_and_a_missing_one_becomes_a_replacement() -> None:
    rocket = "🚀".encode()
    assert run([rocket[:1], rocket[1:3], rocket[3:]]) == (["", "", "🚀"], "", None)
    assert run([b"a", rocket[:3]]) == (["a", ""], "\ufffd", None)
    assert run([b"\xe4\xbd", b" b"]) == (["", "\ufffd b"], "", None)


def test_a_stop_string_may_be_the_replacement_that_the_flush_makes() -> None:
    assert run([b"a", b"\xf0"], ("\ufffd",)) == (["a", ""], "", "\ufffd")


def test_nothing_comes_after_a_match() -> None:
    stream = TextStream(Spelled([b"a", b"."]), (".",))
    assert [stream.push(token_id) for token_id in (1, 2, 1, 2, 1)] == ["a", "", "", "", ""]
    assert stream.flush() == ""
    assert stream.stopped == "."


def test_special_tokens_are_hidden_and_do_not_break_a_character() -> None:
    pieces = [b"\xc3", b"\xa9"]
    hidden = TextStream(Spelled(pieces))
    assert [hidden.push(i) for i in (1, SPECIAL, 2)] == ["", "", "é"]
    visible = TextStream(Spelled(pieces), skip_special_tokens=False)
    assert [visible.push(i) for i in (1, SPECIAL, 2)] == ["", "\ufffd<end>", "\ufffd"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        TextStream(Spelled([]), ("a", ""))
    assert caught.value.param == "stop"


def test_the_match_itself_may_be_shown() -> None:
    for split in ([b"one END two"], [b"one E", b"ND t"], [b"o", b"ne ", b"END"]):
        stream = TextStream(Spelled(split), ("END",), include_stop=True)
        text = "".join(stream.push(i + 1) for i in range(len(split))) + stream.flush()
        assert (text, stream.stopped) == ("one END", "END")


def test_tokens_that_may_not_stop_neither_end_nor_begin_a_match() -> None:
    stream = TextStream(Spelled([b"a.", b".", b"b."]), ("..", "b."))
    assert stream.push(1, False) == "a."
    assert stream.push(2) == ""  # not the second half of a match that began too early
    assert stream.push(3) == "."
    assert stream.stopped == "b."
