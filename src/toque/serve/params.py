"""From the body's sampling fields to SamplingParams: what needs the vocabulary to be checked.

Owns: nothing. Knows: limits, the vocabulary's size. Does not know: prompts, the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toque.errors import RequestError
from toque.options import ServeOptions
from toque.serve.failures import short
from toque.serve.schema import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    Sampling,
)
from toque.serve.service import TextTokenizer, check_ids
from toque.types import Hello, SamplingParams


def sampling_params(
    body: Sampling,
    hello: Hello,
    limits: ServeOptions,
    max_tokens: int | None,
    logprobs: int | None,
    seed: int,
) -> SamplingParams:
    """`max_tokens` is as asked, None = the rest of the context. Raises RequestError."""
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' is more than the {max_tokens} of max_tokens", "min_tokens"
        )
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=min(max(0, body.top_k or 0), hello.vocab_size),
        top_p=_or(body.top_p, 1.0),
        min_p=body.min_p or 0.0,
        seed=seed,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, hello.vocab_size, limits.max_logit_bias),
        allowed_token_ids=_allowed_ids(body.allowed_token_ids, hello.vocab_size),
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop=_stops(body.stop, limits.max_stop_strings),
        stop_token_ids=_stop_ids(body.stop_token_ids or [], hello.vocab_size),
        n=body.n or 1,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > most:
        raise RequestError(
            f"'stop' has {len(stops)} strings; at most {most} (--max-stop-strings)", "stop"
        )
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise RequestError(
            f"each string of 'stop' must have 1 to {MAX_STOP_CHARS} characters", "stop"
        )
    return tuple(stops)


def _stop_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        message = f"'stop_token_ids' has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS}"
        raise RequestError(message, "stop_token_ids")
    check_ids(ids, vocab_size, "stop_token_ids")
    return tuple(ids)


def _allowed_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    name = "allowed_token_ids"
    if len(ids) > vocab_size:
        raise RequestError(f"'{name}' has more ids than the {vocab_size} of the vocabulary", name)
    check_ids(ids, vocab_size, name)
    return tuple(dict.fromkeys(ids))


def check_choice_left(params: SamplingParams, end_ids: Iterable[int]) -> None:
    """Raises RequestError where the bans leave nothing of what is allowed."""
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= {*end_ids, *params.stop_token_ids}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise RequestError(
            "'allowed_token_ids' leaves no token that 'bad_words' and 'min_tokens' allow",
            "allowed_token_ids",
        )


def bad_words(words: list[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The spellings of each word, at the beginning of a text and after a space.

    Raises RequestError. Other spellings of the same text, by other tokens, stay possible: a ban
    is of tokens, as in vLLM.
    """
    name = "bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"'{name}' has {len(words)} texts; at most {MAX_BAD_WORDS}", name)
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        if not 1 <= len(word) <= MAX_STOP_CHARS or not word.strip():
            raise RequestError(
                f"each text of '{name}' must have 1 to {MAX_STOP_CHARS} characters, not all blank",
                name,
            )
        for text in (word, " " + word.lstrip(" ")):
            spelled[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(spelled)


def _logit_bias(bias: dict[str, Any], vocab_size: int, most: int) -> dict[int, float]:
    name = "logit_bias"
    if len(bias) > most:
        message = f"'{name}' has {len(bias)} entries; at most {most} (--max-logit-bias)"
        raise RequestError(message, name)
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(f"'{name}' has the key '{short(key, 24)}'; keys are token ids", name)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 100:
            raise RequestError(f"'{name}' of token {key} must be a number from -100 to 100", name)
        checked[int(key)] = float(value)
    check_ids(list(checked), vocab_size, name)
    return checked
