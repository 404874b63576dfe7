"""A request and its answer as they were saved, and where another answer parts from it.

Owns: nothing. Knows: the shapes of answers, whole and streamed, and of a fingerprint.
Does not know: how an answer is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from toque.errors import ConfigError

Json = dict[str, Any]

ROUTES = {"text_completion": "/v1/completions", "chat.completion": "/v1/chat/completions"}
NAMES_ONLY = ("model", "request_id", "priority", "slo", "cache_salt", "user")  # decide no token
HOW_SENT = ("stream", "stream_options")
FINGERPRINT = ("program", "version", "model hash", "quantization", "kernel set", "KV dtype")
SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Saved:
    request: Json  # the body that was sent
    choices: list[Json]  # as in an answer that was not streamed; of a stream, what it holds of it
    route: str
    model: str | None  # as the answer names it
    fingerprint: str
    seed: int | None
    streamed: bool

    def replay_body(self) -> Json:
        """What to send to get the same answer, whole, with its token ids."""
        left_out = (*NAMES_ONLY, *HOW_SENT)
        body = {key: value for key, value in self.request.items() if key not in left_out}
        if self.seed is not None:
            body["seed"] = self.seed
        return body | {"return_token_ids": True}


def read_saved(request_path: Path, response_path: Path | None) -> Saved:
    """`{"request": …, "response": …}` in one file, or two files with one of them each. A response
    is JSON, or the events of a stream as text. Raises ConfigError for what is neither."""
    whole = _object(request_path, _text(request_path))
    if response_path is not None:
        request, response = whole, _response(response_path, _text(response_path))
    elif "request" in whole and "response" in whole:
        request, response = whole["request"], whole["response"]
        if isinstance(response, str):
            response = _response(request_path, response)
    else:
        raise ConfigError(
            f'{request_path}: neither {{"request": …, "response": …}} nor given with a second file '
            "that holds the response"
        )
    if not isinstance(request, dict):
        raise ConfigError(f"{request_path}: the request is not a JSON object")
    return _saved(request, response if isinstance(response, list) else [response])


def _saved(request: Json, parts: list[Any]) -> Saved:
    """`parts`: one whole answer, or the chunks of a stream."""
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError("the response is neither a JSON object nor the events of a stream")
    if failed := next((part["error"] for part in parts if "error" in part), None):
        raise ConfigError(f"the response is an error, not an answer: {_short(failed)}")
    first = parts[0]
    kind = str(first.get("object"))
    route = ROUTES.get(kind.removesuffix(".chunk"))
    if route is None:
        raise ConfigError(
            f"a response of the kind {kind!r} cannot be verified; those of "
            f"{' and '.join(ROUTES.values())} can"
        )
    fingerprint = first.get("system_fingerprint")
    if not isinstance(fingerprint, str):
        raise ConfigError("the response has no system_fingerprint: it is not one of toque's")
    streamed = kind.endswith(".chunk") or bool(request.get("stream"))
    choices = _folded(parts) if streamed else first.get("choices", [])
    seed = first.get("seed", request.get("seed"))
    if seed is None and request.get("temperature") != 0:
        raise ConfigError("the response carries no seed, and the request is not greedy")
    return Saved(request, choices, route, first.get("model"), fingerprint, seed, streamed)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _object(path: Path, text: str) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return found


def _response(path: Path, text: str) -> Json | list[Json]:
    if not text.lstrip().startswith("data:"):
        return _object(path, text)
    lines = (line[5:].strip() for line in text.splitlines() if line.startswith("data:"))
    return [_object(path, line) for line in lines if line != "[DONE]"]


# ----------------------------------------------------------------------------------- streams


def _folded(chunks: list[Json]) -> list[Json]:
    """The choices of a stream, as far as its chunks hold what a whole answer has."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk.get("choices", ()):
            choice = choices.setdefault(int(part.get("index", 0)), {})
            for key, value in part.items():
                _add(choice, "message" if key == "delta" else key, value)
    return [choices[index] for index in sorted(choices)]


def _add(into: Json, key: str, value: Any) -> None:
    """What a chunk says of one key: text and lists grow, entries with an index are merged into
    their own, all else is said once."""
    old = into.get(key)
    if value is None:
        into.setdefault(key, None)
    elif isinstance(value, dict):
        inner = into[key] = old if isinstance(old, dict) else {}
        for name, part in value.items():
            _add(inner, name, part)
    elif isinstance(value, list) and key == "tool_calls":
        calls = into[key] = old if isinstance(old, list) else []
        for part in value:
            while len(calls) <= part["index"]:
                calls.append({})
            for name, inner_value in part.items():
                if name != "index":
                    _add(calls[part["index"]], name, inner_value)
    elif isinstance(value, list):
        into[key] = [*(old or ()), *value]
    elif isinstance(value, str) and key in GROWS and isinstance(old, str):
        into[key] = old + value
    else:
        into[key] = value


GROWS = ("text", "content", "arguments", "reasoning", "reasoning_content", "refusal")

# ------------------------------------------------------------------------------- comparisons


def fingerprint_difference(saved: str, now: str) -> str | None:
    """Which parts of a fingerprint differ, as a sentence; None if none does."""
    if saved == now:
        return None
    old, new = _parts(saved), _parts(now)
    if old is None or new is None:
        return f"the fingerprint {saved!r} cannot be read; this engine's is {now!r}"
    named = zip(FINGERPRINT, old, new, strict=True)
    found = [f"{n}: {a or 'none'} then, {b or 'none'} now" for n, a, b in named if a != b]
    return "; ".join(found)


def _parts(fingerprint: str) -> list[str] | None:
    parts = fingerprint.split("-")
    if len(parts) == len(FINGERPRINT) - 1:
        parts.insert(3, "")
    return parts if len(parts) == len(FINGERPRINT) else None


def differences(saved: Saved, now: list[Json]) -> Iterator[str]:
    """Where each choice of another answer parts from the saved one; nothing if all are equal."""
    if len(saved.choices) != len(now):
        yield f"{len(saved.choices)} choices were saved, there are {len(now)} now"
        return
    for old, new in zip(saved.choices, now, strict=True):
        found = _choice_difference(old, new)
        if found is not None:
            yield f"choice {old.get('index', 0)} {found}"


def _choice_difference(old: Json, new: Json) -> str | None:
    for key in ("prompt_token_ids", "token_ids"):
        ids, others = old.get(key), new.get(key)
        if ids is not None and others is not None and ids != others:
            at = next(i for i, (a, b) in enumerate(zip_longest(ids, others)) if a != b)
            what = "prompt token" if key == "prompt_token_ids" else "token"
            return f"parts at {what} {at}: {_at(ids, at)} was saved, {_at(others, at)} now"
    return _difference(old, new, "")


def _difference(old: Any, new: Any, where: str) -> str | None:
    """The first place where what was saved is not what is there now. Keys that were not saved are
    not compared: the replay asks for token ids, and a stream leaves out what is null; nor are the
    ids of calls, which are drawn for each answer."""
    if isinstance(old, dict) and isinstance(new, Mapping):
        inner = (
            _difference(value, new.get(key), f"{where}.{key}" if where else key)
            for key, value in old.items()
            if key != "id"
        )
        return next((found for found in inner if found is not None), None)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        entries = enumerate(zip(old, new, strict=True))
        found_in = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in entries)
        return next((found for found in found_in if found is not None), None)
    if isinstance(old, str) and isinstance(new, str) and old != new:
        at = next(i for i, (a, b) in enumerate(zip_longest(old, new)) if a != b)
        was, is_now = old[at : at + SHOWN_CHARS], new[at : at + SHOWN_CHARS]
        return f"parts at character {at} of {where}: {was!r} was saved, {is_now!r} now"
    if old == new or (old in ("", None) and new in ("", None)):
        return None
    return f"differs in {where}: {_short(old)} was saved, {_short(new)} now"


def _at(ids: list[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "the end"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 2 * SHOWN_CHARS else f"{text[: 2 * SHOWN_CHARS]}…"
