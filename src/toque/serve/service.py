"""What the routes share: options, the engine client, the tokenizer once it is loaded.

Owns: whether the server is draining, the tokenizing threads. Knows: served names, readiness.
Does not know: routes, JSON shapes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from toque.errors import RequestError
from toque.metrics import Metrics
from toque.options import ServeOptions
from toque.serve.connections import Connections
from toque.serve.failures import FailedCall, Failure, short, shutting_down
from toque.serve.formats import Formats, TemplateText, formats_of
from toque.serve.frontend import EngineClient
from toque.serve.grammar_check import GrammarCheck
from toque.serve.responses.store import ResponseStore
from toque.serve.stream import TokenText
from toque.types import Hello, Spellings

T = TypeVar("T")
INLINE_CHARS = 4096  # up to here tokenizing is quicker than handing it to a thread
SEED_BITS = 63
DRAWN_BITS = 53  # of a seed that is drawn here: JavaScript keeps so many when it reads the answer


class TextTokenizer(TokenText, TemplateText, Protocol):
    """What the API needs of a tokenizer. Every method may be called from any thread."""

    @property
    def vocab_size(self) -> int: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary spells so; None if it has none."""

    def pieces(self, ids: Iterable[int]) -> list[str]: ...

    def spellings(self, end_token_ids: tuple[int, ...]) -> Spellings:
        """How every token is spelled."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Raises RequestError for messages that the model's template refuses."""


class OpenIds:
    """The `request_id`s of calls in progress: each names one."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    @contextmanager
    def held(self, name: str | None) -> Iterator[None]:
        """Raises FailedCall (409) while another call holds the name."""
        if name is None:
            yield
            return
        if name in self._held:
            message = f"'request_id' {short(name)} names a call that is in progress"
            raise FailedCall(Failure(409, message, "request_id", "request_id_in_use"))
        self._held.add(name)
        try:
            yield
        finally:
            self._held.discard(name)


class Service:
    """One per server. Mutated by the server only; routes read it."""

    def __init__(
        self,
        options: ServeOptions,
        client: EngineClient,
        metrics: Metrics,
        connections: Connections,
        seed: int | None = None,
    ) -> None:
        self.options = options
        self.client = client
        self.metrics = metrics
        self.connections = connections
        self.tokenizer: TextTokenizer | None = None
        self.open_ids = OpenIds()
        self.grammars = GrammarCheck(client)
        self.responses = ResponseStore(options.max_responses, options.max_responses_bytes)
        self.draining = False
        self.started_unix_s = int(time.time())
        self._seed = seed
        self._formats: Formats | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="toque-text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    # -------------------------------------------------------------------------------- readiness

    def require_ready(self) -> tuple[Hello, TextTokenizer]:
        """The model, for a route that needs it. Raises FailedCall (503) with Retry-After."""
        failure = self.not_serving()
        hello, tokenizer = self.client.hello, self.tokenizer
        if failure is not None or hello is None or tokenizer is None:
            raise FailedCall(failure or loading())
        return hello, tokenizer

    def not_serving(self) -> Failure | None:
        """Why no request can be taken now."""
        if self.draining:
            return shutting_down()
        if self.client.failure is not None:
            return Failure(503, str(self.client.failure), code="engine_gone")
        if self.client.hello is None or self.tokenizer is None:
            return loading()
        if not self.client.can_answer:
            message = "no engine is running; one is being started"
            return Failure(503, message, code="engine_gone", retry_after_s=2)
        return None

    # ------------------------------------------------------------------------------------ names

    def model_names(self, hello: Hello) -> tuple[str, ...]:
        return self.options.served_model_name or (hello.model_name,)

    def model_name(self, hello: Hello, asked: str | None) -> str:
        """The name that the answer carries. Raises FailedCall (404) for a model not served."""
        names = self.model_names(hello)
        if asked is None:
            return names[0]
        if asked in names:
            return asked
        message = f"the model '{short(asked)}' is not served here; served: {', '.join(names)}"
        raise FailedCall(Failure(404, message, "model", "model_not_found"))

    # --------------------------------------------------------------------------------- services

    def formats(self, tokenizer: TextTokenizer) -> Formats:
        """How the model writes calls and reasoning."""
        if self._formats is None:
            flags = self.options.tool_call_parser, self.options.reasoning_parser
            self._formats = formats_of(*flags, tokenizer)
        return self._formats

    def seed(self, asked: int | None) -> int:
        """A request's seed, 0 to 2^63 - 1: its own, the server's, or one drawn now."""
        if asked is None:
            asked = self._seed
        return secrets.randbits(DRAWN_BITS) if asked is None else asked % (1 << SEED_BITS)

    async def text_work(self, size_chars: int, work: Callable[[], T]) -> T:
        """Tokenizing and templating: in a thread where it would hold up the other streams."""
        if size_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def loading() -> Failure:
    return Failure(503, "the model is still loading", code="loading", retry_after_s=2)


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises RequestError for the first id outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        shown = short(str(wrong), 24)
        raise RequestError(
            f"'{param}' has token id {shown}; the vocabulary has 0 to {vocab_size - 1}", param
        )
