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
    """`token_logprobs` and `top_logprobs` are null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(
    tokenizer: TextTokenizer, tokens: Sequence[TokenId], scores: Sequence[Logprob], num_top: int
) -> PromptLogprobs:
    """vLLM's form: per token of the prompt its logprob and the best ones', by token id."""
    out: PromptLogprobs = [None]
    for token_id, score in zip(tokens[1:], scores, strict=True):
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(score.top[:num_top], 1)]
        own = (token_id, score.chosen, score.rank)
        out.append(
            {
                str(i): PromptLogprob(max(value, LOWEST), rank, _decoded(tokenizer, i))
                for i, value, rank in (*ranked, own)
            }
        )
    return out


def _decoded(tokenizer: TextTokenizer, token_id: TokenId) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def chat_logprobs(tokenizer: TextTokenizer, entries: Entries, as_ids: bool = False) -> ChatLogprobs:
    """`as_ids` spells tokens as `token_id:7`, which no two of them share."""

    def spell(token_id: TokenId, data: bytes) -> str:
        return f"token_id:{token_id}" if as_ids else _spelled(data, "")

    def token(token_id: TokenId, logprob: Logprob) -> ChatToken:
        data = tokenizer.token_bytes(token_id)
        top = [best(i, value) for i, value in logprob.top]
        return ChatToken(spell(token_id, data), max(logprob.chosen, LOWEST), list(data), top)

    def best(token_id: TokenId, value: float) -> ChatTop:
        data = tokenizer.token_bytes(token_id)
        return ChatTop(spell(token_id, data), max(value, LOWEST), list(data))

    return ChatLogprobs([token(token_id, logprob) for token_id, logprob in entries])


class CompletionWriter:
    """Logprobs of one choice of /v1/completions; keeps count of characters for `text_offset`."""

    def __init__(
        self, tokenizer: TextTokenizer, skip_special_tokens: bool, as_ids: bool = False
    ) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset_chars = 0

    def prompt(
        self, tokens: Sequence[TokenId], scores: Sequence[Logprob], num_top: int, echo: str
    ) -> CompletionLogprobs:
        """The echoed prompt's tokens; call it before `write`, whose offsets go on from here."""
        out = CompletionLogprobs([], [], [], [])
        for token_id, score in zip(tokens, (None, *scores), strict=True):
            out.tokens.append(self._text(token_id))
            out.text_offset.append(self._offset_chars)
            literal = self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            # A control token is in the text if the client wrote it there, not if we put it first.
            self._advance(token_id, written=echo.startswith(literal, self._offset_chars))
            if score is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            best = Logprob(chosen=score.chosen, top=score.top[:num_top])
            out.token_logprobs.append(max(score.chosen, LOWEST))
            out.top_logprobs.append(self._top(token_id, best))
        return out

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

    def _advance(self, token_id: TokenId, written: bool = False) -> None:
        hidden = self._skip_special and self._tokenizer.is_special(token_id)
        if written or not hidden:
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self._offset_chars += len(text)

    def _text(self, token_id: TokenId) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return _spelled(self._tokenizer.token_bytes(token_id), "bytes:")


def _spelled(data: bytes, prefix: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
