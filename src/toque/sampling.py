"""What a request asks of its output: how tokens are chosen, what they must spell, or a vector.

Owns: nothing. Knows: names and neutral values. Does not know: how any of it is done.

These stand beside the values of `types.py`, which exports them too: import them from there.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from toque.telemetry import Wire

TokenId = int


class Pooling(StrEnum):
    """How the states of a prompt's tokens become one vector."""

    LAST = "last"  # that of the last token, which has seen all the others
    MEAN = "mean"  # the mean over all of them


class SamplingParams(Wire, frozen=True, kw_only=True):
    """How to choose the next token. Names, meanings and neutral values are vLLM's.

    Order of application: penalties, logit_bias, bans (allowed_token_ids, bad_words, min_tokens),
    temperature, top_k, top_p, min_p. Logprobs are of the model's own distribution, before these.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None = the front end draws one; a Request always carries a number
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[TokenId, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[TokenId, ...] = ()  # nothing else may be chosen; empty = all may
    bad_words: tuple[tuple[TokenId, ...], ...] = ()  # spellings that the output may not contain
    logprobs: int | None = None  # None = off; k = the chosen token's and the k best ones'
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    max_tokens: int | None = None  # None = until the context is full; 0 = only read the prompt
    min_tokens: int = 0  # no end or stop token before this many
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # matched by the text side, never by the engine
    stop_token_ids: tuple[TokenId, ...] = ()
    n: int = 1  # expanded into n Requests before the engine sees it


class GrammarKind(StrEnum):
    """What `Grammar.text` is. The output as a whole must match it, from its first token on."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    REGEX = "regex"  # a regular expression in Rust's dialect, without look-around
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    LARK = "lark"  # a grammar in the Lark dialect of llguidance


class Grammar(Wire, frozen=True, kw_only=True):
    """What an output must look like.

    With `after`, it begins once that text has appeared in the output (reasoning: `</think>`, as
    its own token or spelled in letters); until then the text is free and may not end.
    With `calls`, a Lark grammar, the output may match that instead: it is calls of tools.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    calls: str = ""

    @property
    def num_chars(self) -> int:
        return len(self.text) + len(self.calls)


class ThinkingBudget(Wire, frozen=True, kw_only=True):
    """An output's reasoning ends after `num_tokens` tokens: then `closing_ids` follow.

    The marks themselves are not counted. Whoever asks has told the engine the Spellings before.
    """

    num_tokens: int
    opening: str  # `<think>`
    closing: str
    closing_ids: tuple[TokenId, ...]  # how `closing` is written when it is forced
    is_open: bool  # the output begins inside; else with the opening mark or without reasoning
