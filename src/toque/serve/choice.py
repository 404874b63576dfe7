"""One choice of an answer while its events arrive.

Owns: the text stream, what has not been sent yet, why it ended. Knows: events, end tokens.
Does not know: JSON shapes, SSE, the engine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from toque.errors import EngineError
from toque.serve.failures import FailedCall, from_refusal, shutting_down
from toque.serve.prepare import Job
from toque.serve.prompts import Prompt
from toque.serve.service import TextTokenizer
from toque.serve.stream import TextStream
from toque.serve.tools.output import OutputParser
from toque.serve.tools.parts import Kind, Part
from toque.types import (
    Event,
    Finished,
    FinishReason,
    Logprob,
    PromptScores,
    Refused,
    TokenId,
    Tokens,
    Usage,
)


@dataclass(slots=True)
class Delta:
    """What a choice has gained since it was last drained."""

    parts: list[Part] = field(default_factory=list)
    ids: list[TokenId] = field(default_factory=list)
    logprobs: list[tuple[TokenId, Logprob]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.parts)

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if part.kind is Kind.TEXT])


class Choice:
    """Feeds on the events of one request; text comes out by `drain`."""

    def __init__(self, index: int, job: Job, tokenizer: TextTokenizer) -> None:
        request = job.requests[index]
        self.index = index
        self.id = request.id
        self.prompt: Prompt = job.prompts[index // job.n]
        self.finish_reason: str | None = None  # stop, length or tool_calls: OpenAI's words
        self.stop_reason: str | int | None = None  # the client's stop string or id that matched
        self.usage: Usage | None = None  # the engine's; None until it has finished
        self.num_tokens = 0
        self.num_reasoning = 0  # of them, without the marks
        self.begun = False  # its first token has come, or its end
        self.scores: list[Logprob] = []  # of the prompt's tokens from the second on
        self._job = job
        self._min_tokens = request.sampling.min_tokens
        # A text held back for a stop string may come together with the mark after it.
        self._most_reasoning = request.thinking.num_tokens if request.thinking else sys.maxsize
        self._delta = Delta()
        self._told = 0  # tokens whose text the parser has
        self._unthought = 0  # tokens before the reasoning
        self._parser = OutputParser(job.form_of(self.prompt))
        self._stream = TextStream(
            tokenizer,
            request.sampling.stop,
            job.show.skip_special_tokens,
            job.show.include_stop,
            job.marker_ids,
        )

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the end of the text, an end token included, a stop string's surplus not."""
        return self.num_tokens

    def feed(self, event: Event) -> bool:
        """Take an event in; true when a stop string has just matched and the engine may stop.

        Raises:
            EngineError: this request failed. FailedCall: it was refused, or aborted by shutdown.
        """
        match event:
            case Tokens():
                self.begun = True
                return self._feed_tokens(event)
            case PromptScores():
                self.scores += event.logprobs
            case Finished():
                self.begun = True
                self._feed_finished(event)
            case Refused():
                raise FailedCall(from_refusal(event))
        return False

    def drain(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _feed_tokens(self, event: Tokens) -> bool:
        if self.finish_reason is not None:
            return False  # surplus: computed before the engine heard of the stop string
        for place, token_id in enumerate(event.ids):
            self.num_tokens += 1
            self._delta.ids.append(token_id)
            ends = token_id in self._job.end_ids  # then it is the last one and has no text …
            if place < len(event.logprobs) and not (ends and self._hides_end):
                self._delta.logprobs.append((token_id, event.logprobs[place]))
            if ends:
                continue
            may_stop = self.num_tokens > self._min_tokens
            self._add_text(self._stream.push(token_id, may_stop))
            if self._stream.stopped is not None or self._parser.done:
                self._stop_here()
                return True
        return False

    @property
    def _hides_end(self) -> bool:
        """… and no entry in logprobs, unless the prompt's tokens have theirs too: evaluation
        harnesses cut the generated token's entry off by its place, so there must be one."""
        return self._job.show.echo_logprobs is None

    def _feed_finished(self, event: Finished) -> None:
        self.usage = event.usage
        if self.finish_reason is not None:
            return
        if event.reason is FinishReason.ERROR:
            raise EngineError(event.error or "the engine could not finish this request")
        if event.reason is FinishReason.ABORT:
            raise FailedCall(shutting_down())  # not by us: a call that aborts stops reading
        self._add_text(self._stream.flush())
        if self._stream.stopped is not None:
            self._stop_here()
            return
        self._end(event.reason)
        if event.stop_token in self._job.sampling.stop_token_ids:
            self.stop_reason = event.stop_token

    def _stop_here(self) -> None:
        """The text is over before the engine knows: a stop string, or the only call allowed."""
        self._end(FinishReason.STOP)
        self.stop_reason = self._stream.stopped

    def _end(self, reason: FinishReason) -> None:
        self._delta.parts += self._parser.finish()
        called = reason is FinishReason.STOP and self._parser.called
        # As OpenAI does, a call that had to be made of one named tool ends with "stop".
        told = called and self._job.offer.mode != "named"
        self.finish_reason = "tool_calls" if told else reason.value

    def _add_text(self, text: str) -> None:
        if not text:
            return
        openings, chars = self._parser.thought
        self._delta.parts += self._parser.push(text)
        now = self._parser.thought
        if now[0] > openings:  # said with the first character after the mark
            self._unthought = self._told
        if now[1] > chars:
            self.num_reasoning = min(self.num_tokens - self._unthought, self._most_reasoning)
        self._told = self.num_tokens

    @property
    def called(self) -> bool:
        """It made calls, all of them complete."""
        return self._parser.called

    @property
    def can_open(self) -> bool:
        """Whether a stream may begin: there is a token, or an end, and the prompt's scores."""
        missing = 0 if self._hides_end else len(self.prompt.tokens) - 1 - len(self.scores)
        return self.begun and missing == 0


def choices_of(job: Job, tokenizer: TextTokenizer) -> list[Choice]:
    """One per request. The choices of one prompt share its scores, which the first one gets."""
    choices = [Choice(index, job, tokenizer) for index in range(len(job.requests))]
    for choice in choices:
        choice.scores = choices[choice.index // job.n * job.n].scores
    return choices
