"""LLM: the engine in the caller's own thread, for scripts, benchmarks and tests.

Owns: one engine and the requests of the call in progress. Knows: text and tokens.
Does not know: HTTP, processes. The engine is the very one that serves: same scheduler, same steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.build import build_engine
from toque.errors import EngineError, RequestError, ToqueError
from toque.files.checkpoint import open_checkpoint
from toque.files.fetch import Located, locate
from toque.ipc import InProcess
from toque.options import EngineOptions
from toque.serve.stream import TextStream
from toque.serve.tokenizer import Tokenizer, load_tokenizer
from toque.types import (
    Abort,
    Event,
    Finished,
    FinishReason,
    Grammar,
    Logprob,
    Pooling,
    PromptScores,
    PromptVector,
    Refused,
    Request,
    SamplingParams,
    StepReport,
    Tokens,
    Usage,
)

Prompt = str | Sequence[int]
IDLE_WAIT_S = 0.01  # for a grammar that is being compiled


@dataclass(slots=True)
class Completion:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(slots=True)
class RequestOutput:
    """What one prompt gave: `n` choices."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # from the second token on
    vector: bytes = b""  # of `embed`, see PromptVector


class LLM:
    def __init__(self, model: str, *, seed: int | None = None, **options: Any) -> None:
        """`model` and the options are those of `toque serve`; see EngineOptions.

        Raises ConfigError, ModelError.
        """
        self._options = EngineOptions(**options)
        located: Located = locate(model)
        self._channel = InProcess()
        self.engine = build_engine(
            located.path, located.served_names[0], self._options, self._channel.engine
        )
        self.tokenizer: Tokenizer = load_tokenizer(
            open_checkpoint(located.path, self._options.load_format)
        )
        self._seed = seed
        self._calls = 0
        self._taught = False  # the engine knows how tokens are spelled
        self._open: dict[str, _Choice] = {}  # by request id, of all calls in progress

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        grammar: Grammar | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, or token ids), all in one batch; order is kept. Outputs
        match `grammar` if there is one and they end by themselves.

        Raises RequestError for a prompt that cannot be served, EngineError if one failed.
        """
        params = sampling or SamplingParams()
        listed = _as_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in listed]
        outputs = [RequestOutput(p, [Completion(i) for i in range(params.n)]) for p in ids]
        for _ in self._run(outputs, params, grammar=grammar):
            pass
        return outputs

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: str = "last"
    ) -> NDArray[np.float32]:
        """One vector of length 1 per prompt: [prompts, hidden]. `pooling`: last, or mean.

        Raises RequestError for a prompt that cannot be served, EngineError if one failed.
        """
        ids = [
            self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in _as_list(prompts)
        ]
        outputs = [RequestOutput(p, [Completion(0)]) for p in ids]
        params = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
        for _ in self._run(outputs, params, Pooling(pooling)):
            pass
        return np.array([np.frombuffer(output.vector, "<f4") for output in outputs])

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        grammar: Grammar | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the model's own chat template."""
        return self.generate(self.tokenizer.encode_chat(messages), sampling, grammar)[0]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece."""
        params = msgspec.structs.replace(sampling or SamplingParams(), n=1)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        output = RequestOutput(ids, [Completion(0)])
        shown = 0
        for _ in self._run([output], params):
            text = output.outputs[0].text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
        if len(output.outputs[0].text) > shown:  # steps of another call have finished this one
            yield output.outputs[0].text[shown:]

    # ----------------------------------------------------------------------------- inside

    def _run(
        self,
        outputs: list[RequestOutput],
        params: SamplingParams,
        pooling: Pooling | None = None,
        grammar: Grammar | None = None,
    ) -> Iterator[None]:
        """Submit, then step until all have finished; yields after each step. Calls may interleave:
        each step serves all that are open. What a caller leaves unfinished is aborted."""
        mine = self._submit(outputs, params, pooling, grammar)
        try:
            while not all(choice.done for choice in mine.values()):
                self._step()
                for choice in mine.values():
                    if choice.failure is not None:
                        raise choice.failure
                yield
        finally:
            for request_id in self._open.keys() & mine.keys():
                self._channel.send(Abort(id=request_id))
                del self._open[request_id]

    def _step(self) -> None:
        """One step of the engine; its events go to whichever call they belong to."""
        core = self.engine.core
        core.step(0.0 if core.scheduler.has_work else IDLE_WAIT_S)
        for message in self._channel.drain():
            for event in message.events if isinstance(message, StepReport) else ():
                choice = self._open.get(event.id)
                if choice is None:
                    continue  # aborted, and not yet known to the engine
                if choice.take(event):
                    kept_tokens = len(choice.completion.token_ids)
                    self._channel.send(
                        Abort(id=event.id, reason=FinishReason.STOP, kept_tokens=kept_tokens)
                    )
                if choice.done:
                    del self._open[event.id]

    def _submit(
        self,
        outputs: list[RequestOutput],
        params: SamplingParams,
        pooling: Pooling | None,
        grammar: Grammar | None,
    ) -> dict[str, _Choice]:
        if grammar is not None and not self._taught:
            self._channel.send(self.tokenizer.spellings(self.engine.hello.end_token_ids))
            self._taught = True
        self._calls += 1
        mine: dict[str, _Choice] = {}
        requests: list[Request] = []
        for number, output in enumerate(outputs):
            sampling = self._complete(params, output)
            for completion in output.outputs:
                request = Request(
                    id=f"llm-{self._calls}-{number}-{completion.index}",
                    prompt=tuple(output.prompt_token_ids),
                    sampling=sampling,
                    choice=completion.index,
                    arrived_s=time.monotonic(),
                    pooling=pooling,
                    grammar=grammar,
                )
                requests.append(request)
                stream = TextStream(self.tokenizer, params.stop)
                mine[request.id] = _Choice(output, completion, stream, params.min_tokens)
        for request in requests:  # all or none: nothing raises from here on
            self._channel.send(request)
        self._open |= mine
        return mine

    def _complete(self, params: SamplingParams, output: RequestOutput) -> SamplingParams:
        """Seed and max_tokens filled in. Raises RequestError for a prompt beyond the context."""
        context, length = self.engine.hello.max_model_len, len(output.prompt_token_ids)
        if length >= context:
            raise RequestError(f"the prompt has {length} tokens, the context {context}")
        room = context - length
        seed = params.seed if params.seed is not None else self._seed
        return msgspec.structs.replace(
            params,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )


@dataclass(slots=True)
class _Choice:
    output: RequestOutput
    completion: Completion
    stream: TextStream
    min_tokens: int
    done: bool = False
    failure: ToqueError | None = None

    def take(self, event: Event) -> bool:
        """Take an event in; True when a stop string has just matched: the rest is not wanted."""
        match event:
            case Tokens():
                return self._push(event)
            case PromptScores():
                if self.completion.index == 0:
                    self.output.prompt_logprobs.extend(event.logprobs)
            case PromptVector():
                self.output.vector = event.vector
            case Finished():
                self._finish(event)
            case Refused():
                self.done, self.failure = True, RequestError(event.message, status=event.status)
        return False

    def _push(self, event: Tokens) -> bool:
        completion, stream = self.completion, self.stream
        if stream.stopped is not None:
            return False  # computed before the engine heard of the match
        completion.token_ids.extend(event.ids)
        completion.logprobs.extend(event.logprobs)
        for token in event.ids[:-1] if event.ends else event.ids:
            completion.text += stream.push(token, len(completion.token_ids) > self.min_tokens)
        return stream.stopped is not None

    def _finish(self, event: Finished) -> None:
        self.done = True
        completion = self.completion
        if event.reason is FinishReason.ERROR:
            self.failure = EngineError(event.error or "the request failed")
        if self.stream.stopped is None:
            completion.text += self.stream.flush()
        stopped = self.stream.stopped is not None
        completion.finish_reason = FinishReason.STOP if stopped else event.reason
        completion.usage = msgspec.structs.replace(
            event.usage, completion_tokens=len(completion.token_ids)
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
