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

from toque.build import build_engine
from toque.config import EngineOptions
from toque.errors import EngineError, RequestError
from toque.files.checkpoint import open_checkpoint
from toque.files.fetch import Located, locate
from toque.ipc import InProcess
from toque.serve.stream import TextStream
from toque.serve.tokenizer import Tokenizer, load_tokenizer
from toque.types import (
    Abort,
    Finished,
    FinishReason,
    Logprob,
    Refused,
    Request,
    SamplingParams,
    StepReport,
    Tokens,
    Usage,
)

Prompt = str | Sequence[int]


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

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Complete every prompt (text, or token ids), all in one batch; order is kept.

        Raises RequestError for a prompt that cannot be served, EngineError if one failed.
        """
        params = sampling or SamplingParams()
        listed = _as_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in listed]
        outputs = [RequestOutput(p, [Completion(i) for i in range(params.n)]) for p in ids]
        for _ in self._run(outputs, params):
            pass
        return outputs

    def chat(
        self, messages: list[dict[str, Any]], sampling: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation through the model's own chat template."""
        return self.generate(self.tokenizer.encode_chat(messages), sampling)[0]

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

    # ----------------------------------------------------------------------------- inside

    def _run(self, outputs: list[RequestOutput], params: SamplingParams) -> Iterator[None]:
        """Submit, then step until all have finished; yields after each step. If the caller stops
        iterating, what is left is aborted."""
        open_choices = self._submit(outputs, params)
        try:
            while open_choices:
                self.engine.core.step()
                for message in self._channel.drain():
                    if isinstance(message, StepReport):
                        self._take(message, open_choices)
                yield
        finally:
            for request_id in open_choices:
                self._channel.send(Abort(id=request_id))
            if open_choices:
                self.engine.core.step()
                self._channel.drain()

    def _submit(self, outputs: list[RequestOutput], params: SamplingParams) -> dict[str, _Choice]:
        self._calls += 1
        open_choices: dict[str, _Choice] = {}
        context = self.engine.hello.max_model_len
        for number, output in enumerate(outputs):
            room_tokens = context - len(output.prompt_token_ids)
            if room_tokens < 1:
                raise RequestError(
                    f"the prompt has {len(output.prompt_token_ids)} tokens, the context {context}"
                )
            sampling = msgspec.structs.replace(
                params,
                seed=self._draw_seed(params),
                max_tokens=min(params.max_tokens or room_tokens, room_tokens),
            )
            for completion in output.outputs:
                request_id = f"llm-{self._calls}-{number}-{completion.index}"
                open_choices[request_id] = _Choice(
                    completion, TextStream(self.tokenizer, params.stop)
                )
                self._channel.send(
                    Request(
                        id=request_id,
                        prompt=tuple(output.prompt_token_ids),
                        sampling=sampling,
                        choice=completion.index,
                        arrived_s=time.monotonic(),
                    )
                )
        return open_choices

    def _draw_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return secrets.randbits(63) if self._seed is None else self._seed

    def _take(self, report: StepReport, open_choices: dict[str, _Choice]) -> None:
        for event in report.events:
            choice = open_choices.get(event.id)
            if choice is None:
                continue  # a choice that a stop string ended
            if isinstance(event, Tokens):
                if choice.push(event):
                    self._channel.send(Abort(id=event.id, reason=FinishReason.STOP))
                    del open_choices[event.id]
            elif isinstance(event, Finished):
                choice.finish(event)
                del open_choices[event.id]
            elif isinstance(event, Refused):
                raise RequestError(event.message, status=event.status)


@dataclass(slots=True)
class _Choice:
    completion: Completion
    stream: TextStream

    def push(self, event: Tokens) -> bool:
        """Take tokens; True when a stop string has matched and the rest is not wanted."""
        self.completion.token_ids.extend(event.ids)
        for token in event.ids[:-1] if event.ends else event.ids:
            self.completion.text += self.stream.push(token)
        self.completion.logprobs.extend(event.logprobs)
        if self.stream.stopped is not None:
            self.completion.finish_reason = FinishReason.STOP
        return self.stream.stopped is not None

    def finish(self, event: Finished) -> None:
        if event.reason is FinishReason.ERROR:
            raise EngineError(event.error or "the request failed")
        self.completion.text += self.stream.flush()
        self.completion.finish_reason = event.reason
        self.completion.usage = event.usage


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
