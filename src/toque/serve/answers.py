"""The shapes of OpenAI's answers, whole and in chunks, encoded by msgspec.

Owns: nothing that outlives an answer. Knows: both dialects to the last key.
Does not know: HTTP, SSE, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from toque.serve.chat_answers import ChatDialect
from toque.serve.choice import Choice, Delta
from toque.serve.failures import Failure
from toque.serve.logprobs import (
    CompletionLogprobs,
    CompletionWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from toque.serve.prepare import Job
from toque.serve.service import TextTokenizer

FinishWord = str | None
Ids = Sequence[int] | UnsetType


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None
    token_ids: Ids = UNSET
    prompt_token_ids: Ids = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Answer(msgspec.Struct):
    """Whole answers and chunks of both routes differ in `object` and in their choices only."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    seed: int | UnsetType = UNSET  # ours: with the fingerprint, what repeats the answer
    prompt_token_ids: Ids = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of a chat


class Dialect(Protocol):
    """How one route writes its choices."""

    object_whole: str
    object_chunk: str

    def whole(self, choice: Choice, delta: Delta) -> Any:
        """A finished choice; `delta` is all of it."""

    def opening(self, choice: Choice) -> Any | None:
        """What a stream says of a choice before its first token."""

    def chunks(self, choice: Choice, delta: Delta) -> list[Any]:
        """What a choice gained, and its end where it has come."""


class CompletionDialect:
    object_whole = object_chunk = "text_completion"

    def __init__(self, job: Job, tokenizer: TextTokenizer) -> None:
        self._job = job
        self._with_logprobs = job.sampling.logprobs is not None
        self._tokenizer = tokenizer
        skip, as_ids = job.show.skip_special_tokens, job.show.tokens_as_ids
        self._writers = [CompletionWriter(tokenizer, skip, as_ids) for _ in job.requests]

    def whole(self, choice: Choice, delta: Delta) -> TextChoice:
        return self._choice(choice, delta, choice.prompt.echo, first=True)

    def opening(self, choice: Choice) -> TextChoice | None:
        if not (choice.prompt.echo or self._job.show.return_token_ids):
            return None
        return self._choice(choice, Delta(), choice.prompt.echo, first=True, last=False)

    def chunks(self, choice: Choice, delta: Delta) -> list[Any]:
        return [self._choice(choice, delta)]

    def _choice(
        self, choice: Choice, delta: Delta, echo: str = "", first: bool = False, last: bool = True
    ) -> TextChoice:
        ids = self._job.show.return_token_ids
        return TextChoice(
            index=choice.index,
            text=echo + delta.text,
            logprobs=self._logprobs(choice, delta, first) if self._with_logprobs else None,
            finish_reason=choice.finish_reason if last else None,
            stop_reason=choice.stop_reason if last else None,
            token_ids=delta.ids if ids else UNSET,
            prompt_token_ids=choice.prompt.tokens if ids and first else UNSET,
            prompt_logprobs=_prompt_logprobs(self._job, self._tokenizer, choice),
        )

    def _logprobs(self, choice: Choice, delta: Delta, first: bool) -> CompletionLogprobs:
        writer, num_top = self._writers[choice.index], self._job.show.echo_logprobs
        if not first or num_top is None:
            return writer.write(delta.logprobs)
        prompt = choice.prompt
        head = writer.prompt(prompt.tokens, choice.scores, num_top, prompt.echo)
        rest = writer.write(delta.logprobs)
        return CompletionLogprobs(
            head.tokens + rest.tokens,
            head.token_logprobs + rest.token_logprobs,
            head.top_logprobs + rest.top_logprobs,
            head.text_offset + rest.text_offset,
        )


class Writing(Protocol):
    """How the answer to one job is written; a stream is opening, chunks, usage, done."""

    done: bytes

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer to a call that does not stream: JSON."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The first events of a stream."""

    def chunks(self, choice: Choice) -> bytes:
        """What a choice gained since last time, as events; may be empty."""

    def usage(self, choices: Sequence[Choice]) -> bytes:
        """The last event of a stream that asked for usage."""

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that could not go on."""


class Writer:
    """Encodes the answer to one job: the frame around its choices, and usage."""

    done = b"data: [DONE]\n\n"

    def __init__(self, job: Job, tokenizer: TextTokenizer, fingerprint: str) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._chat = job.kind == "chatcmpl"
        self._dialect: Dialect = (ChatDialect if self._chat else CompletionDialect)(job, tokenizer)
        self._encoder = msgspec.json.Encoder()

    def whole(self, choices: Sequence[Choice]) -> bytes:
        bodies = [self._dialect.whole(choice, choice.drain()) for choice in choices]
        answer = self._frame(self._dialect.object_whole, bodies, usage_of(self._job, choices))
        if self._chat:
            if self._job.show.return_token_ids:
                answer.prompt_token_ids = self._job.prompts[0].tokens
            answer.prompt_logprobs = _prompt_logprobs(self._job, self._tokenizer, choices[0])
        return self._encoder.encode(answer)

    def opening(self, choices: Sequence[Choice]) -> bytes:
        out = bytearray()
        for choice in choices:
            body = self._dialect.opening(choice)
            if body is not None:
                answer = self._frame(self._dialect.object_chunk, [body], self._running(choice))
                if self._chat and self._job.show.return_token_ids:
                    answer.prompt_token_ids = choice.prompt.tokens
                out += self._event(answer)
        return bytes(out)

    def chunks(self, choice: Choice) -> bytes:
        delta = choice.drain()
        shown = delta.parts or delta.logprobs or (delta.ids and self._job.show.return_token_ids)
        if not shown and choice.finish_reason is None:
            return b""  # held back: part of a character or of a stop string
        bodies = self._dialect.chunks(choice, delta if shown else Delta())
        name, usage = self._dialect.object_chunk, self._running(choice)
        return b"".join([self._event(self._frame(name, [body], usage)) for body in bodies])

    def usage(self, choices: Sequence[Choice]) -> bytes:
        total = usage_of(self._job, choices)
        return self._event(self._frame(self._dialect.object_chunk, [], total))

    def failed(self, failure: Failure) -> bytes:
        return b"data: " + failure.body() + b"\n\n"

    def _running(self, choice: Choice) -> UsageBody | UnsetType | None:
        """`usage` of a chunk with choices: so far, null, or no such key."""
        if self._job.options.continuous_usage_stats:
            prompt, done = len(choice.prompt.tokens), choice.completion_tokens
            return UsageBody(prompt, done, prompt + done)
        return None if self._job.options.include_usage else UNSET

    def _frame(self, name: str, choices: list[Any], usage: UsageBody | UnsetType | None) -> Answer:
        job = self._job
        return Answer(
            job.id,
            name,
            job.created_unix_s,
            job.model,
            choices,
            usage,
            self._fingerprint,
            UNSET if job.sampling.seed is None else job.sampling.seed,
        )

    def _event(self, answer: Answer) -> bytes:
        return b"data: " + self._encoder.encode(answer) + b"\n\n"


def _prompt_logprobs(
    job: Job, tokenizer: TextTokenizer, choice: Choice
) -> PromptLogprobs | UnsetType:
    num_top = job.show.prompt_logprobs
    if num_top is None:
        return UNSET
    return prompt_logprobs(tokenizer, choice.prompt.tokens, choice.scores, num_top)


def usage_of(job: Job, choices: Sequence[Choice]) -> UsageBody:
    """Tokens of a whole call: each prompt counts once, however many choices it has."""
    prompt = sum(len(p.tokens) for p in job.prompts)
    done = sum(choice.completion_tokens for choice in choices)
    firsts = choices[:: job.n]  # the further choices share the first one's pages
    cached = sum(choice.usage.cached_tokens for choice in firsts if choice.usage)
    usage = UsageBody(prompt, done, prompt + done, PromptDetails(cached))
    if job.form.reasoning is not None:
        thought = sum(choice.num_reasoning for choice in choices)
        usage.completion_tokens_details = CompletionDetails(thought)
    return usage
