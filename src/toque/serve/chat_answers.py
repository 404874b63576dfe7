"""The shapes of chat completions, whole and in chunks.

Owns: the ids of an answer's calls. Knows: OpenAI's dialect to the last key, parts.
Does not know: HTTP, SSE, the engine.
"""

from __future__ import annotations

import secrets
import string
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from toque.serve.choice import Choice, Delta
from toque.serve.logprobs import ChatLogprobs, chat_logprobs
from toque.serve.prepare import Job
from toque.serve.service import TextTokenizer
from toque.serve.tools.parts import Kind, Part, merged, said

Ids = list[int] | UnsetType
_ALPHABET = string.ascii_letters + string.digits


class Function(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    function: Function
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Message(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: Ids = UNSET
    warnings: list[str] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Ids = UNSET
    warnings: list[str] | UnsetType = UNSET


def call_id(short: bool) -> str:
    """A new one. `short`: Mistral's templates take nine letters and digits, and nothing else."""
    size = 9 if short else 24
    letters = "".join(secrets.choice(_ALPHABET) for _ in range(size))
    return letters if short else f"call_{letters}"


class ChatDialect:
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._with_logprobs = job.sampling.logprobs is not None
        self._short_ids = job.form.tools == "mistral"
        self._has_parts = job.form.tools is not None or job.form.reasoning is not None

    def whole(self, choice: Choice, delta: Delta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=self._message(delta.parts),
            logprobs=self._logprobs(delta),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._ids(delta),
            warnings=[p.text for p in delta.parts if p.kind is Kind.WARNING] or UNSET,
        )

    def _message(self, parts: list[Part]) -> Message:
        found = said(parts)
        calls = [
            ToolCall(Function(call.arguments, call.name), call_id(self._short_ids), "function")
            for call in found.calls
        ]
        # Null where there is something else instead of a text; an empty text is one.
        empty = not found.text and bool(calls or found.reasoning)
        message = Message(None if empty else found.text, tool_calls=calls or UNSET)
        if found.reasoning and self._job.show.reasoning:
            message.reasoning_content = message.reasoning = found.reasoning
        return message

    def opening(self, choice: Choice) -> DeltaChoice:
        # Null where calls or reasoning may come instead: then a client that adds up keeps null.
        begin = ChatDelta(role="assistant", content=None if self._has_parts else "")
        return DeltaChoice(choice.index, begin, None, None)

    def chunks(self, choice: Choice, delta: Delta) -> list[Any]:
        """One for each part; the tokens' logprobs and ids go with the first of them."""
        out = [made for part in merged(delta.parts) for made in self._chunk(choice, part)]
        if delta.ids and (self._with_logprobs or self._job.show.return_token_ids):
            if not out:  # all of their text is held back
                nothing = ChatDelta() if self._has_parts else ChatDelta(content="")
                out.append(DeltaChoice(choice.index, nothing, None, None))
            out[0].logprobs, out[0].token_ids = self._logprobs(delta), self._ids(delta)
        if choice.finish_reason is not None:
            end = DeltaChoice(choice.index, ChatDelta(), None, choice.finish_reason)
            end.stop_reason = choice.stop_reason
            out.append(end)
        return list(out)

    def _chunk(self, choice: Choice, part: Part) -> list[DeltaChoice]:
        warnings: list[str] | UnsetType = UNSET
        match part.kind:
            case Kind.TEXT:
                delta = ChatDelta(content=part.text)
            case Kind.REASONING if self._job.show.reasoning:
                delta = ChatDelta(reasoning_content=part.text, reasoning=part.text)
            case Kind.CALL:
                call = ToolCall(Function("", part.text), call_id(self._short_ids), "function")
                call.index = part.call
                delta = ChatDelta(tool_calls=[call])
            case Kind.ARGUMENTS:
                delta = ChatDelta(tool_calls=[ToolCall(Function(part.text), index=part.call)])
            case Kind.WARNING:
                delta, warnings = ChatDelta(), [part.text]
            case _:
                return []  # the end of a call, and reasoning that is not shown
        return [DeltaChoice(choice.index, delta, None, None, warnings=warnings)]

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs, self._job.show.tokens_as_ids)

    def _ids(self, delta: Delta) -> Ids:
        return delta.ids if self._job.show.return_token_ids else UNSET
