"""Log-probabilities in OpenAI's two dialects.

Owns: the place in the text of the next token. Knows: token bytes. Does not know: choices, HTTP.

A token that is no whole text on its own (part of a character) is spelled by its bytes, as OpenAI
does: `\\xf0\\x9f` in chat, `bytes:\\xf0\\x9f` in completions.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from toque.serve.service import TextTokenizer
from toque.types import Logprob, TokenId

LOWEST = -9999.0  # JSON has no minus infinity

Entries = Sequence[tuple[TokenId, Logprob]]


class ChatTop(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTop]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(tokenizer: TextTokenizer, entries: Entries) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(tokenizer, token_id, lp) for token_id, lp in entries])


def _chat_token(tokenizer: TextTokenizer, token_id: TokenId, logprob: Logprob) -> ChatToken:
    data = tokenizer.token_bytes(token_id)
    top = [_chat_top(tokenizer.token_bytes(i), value) for i, value in logprob.top]
    return ChatToken(_spelled(data, ""), max(logprob.chosen, LOWEST), list(data), top)


def _chat_top(data: bytes, value: float) -> ChatTop:
    return ChatTop(_spelled(data, ""), max(value, LOWEST), list(data))


class CompletionWriter:
    """Logprobs of one choice of /v1/completions; keeps count of characters for `text_offset`."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset_chars = 0

    def write(self, entries: Entries) -> CompletionLogprobs:
        out = CompletionLogprobs([], [], [], [])
        for token_id, logprob in entries:
            out.tokens.append(self._text(token_id))
            out.token_logprobs.append(max(logprob.chosen, LOWEST))
            out.top_logprobs.append(self._top(token_id, logprob))
            out.text_offset.append(self._offset_chars)
            self._advance(token_id)
        return out

    def _top(self, token_id: TokenId, logprob: Logprob) -> dict[str, float]:
        """The best ones and the chosen one; of equal texts the likelier token is shown."""
        values: dict[str, float] = {}
        for i, value in (*logprob.top, (token_id, logprob.chosen)):
            values.setdefault(self._text(i), max(value, LOWEST))
        return values

    def _advance(self, token_id: TokenId) -> None:
        if not (self._skip_special and self._tokenizer.is_special(token_id)):
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self._offset_chars += len(text)

    def _text(self, token_id: TokenId) -> str:
        return _spelled(self._tokenizer.token_bytes(token_id), "bytes:")


def _spelled(data: bytes, prefix: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
