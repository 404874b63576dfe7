"""A tokenizer whose tokens are bytes, an engine that follows a script, a server around them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from msgspec import structs

from toque.errors import EngineError
from toque.options import ServeOptions
from toque.serve.server import Server
from toque.types import (
    Abort,
    Branch,
    Counters,
    Event,
    Explain,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Lane,
    Load,
    Logprob,
    Look,
    Note,
    Pooling,
    PromptScores,
    PromptVector,
    Refused,
    Request,
    Shutdown,
    Slo,
    Snapshot,
    Spellings,
    StepReport,
    StepTimes,
    Timeline,
    Times,
    Tokens,
    Usage,
)

END = 256
VOCAB = 260
CONTEXT = 512


class ByteTokenizer:
    """Ids 0-255 are bytes; 256 and up are special."""

    vocab_size = VOCAB

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        return ([257] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i >= 256)]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"p{i}" for i in ids]

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    template_text = ""  # a test gives it the marks and variables of a model's template
    template_variables: frozenset[str] = frozenset()

    def token_id(self, token: str) -> int | None:
        return None

    def spellings(self, end_token_ids: tuple[int, ...]) -> Spellings:
        tokens = tuple(self.token_bytes(i) for i in range(VOCAB))
        return Spellings(tokens=tokens, markers=(256, 257, 258, 259), end_token_ids=end_token_ids)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kw: Any,
    ) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages) + json.dumps(kw)
        if continue_final_message:
            text = text[: text.rindex(messages[-1]["content"]) + len(messages[-1]["content"])]
        return list((text + ("assistant:" if add_generation_prompt else "")).encode())


@dataclass
class Running:
    request: Request
    script: list[int]
    done: int = 0
    first_s: float | None = None


def bytes_then_end(text: str) -> list[int]:
    return [*text.encode(), END]


@dataclass
class FakeEngine:
    """A ServePort with the engine inside: each `receive` is a step that gives every row a token."""

    reply: Callable[[Request], list[int]] = lambda request: bytes_then_end("Hello")
    per_step: int = 1
    step_s: float = 0.0
    refuse: Refused | None = None
    cached: int = 3
    hello: bool = True
    paused: bool = False
    got: list[Any] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    totals: Counters = field(default_factory=Counters)
    outbox: list[Any] = field(default_factory=list)
    dead: str | None = None
    answer_aborts: bool = True
    context: int = CONTEXT
    policy: str = "fcfs"
    slos: tuple[Slo, ...] = ()
    answer_looks: bool = True
    notes: tuple[Note, ...] = ()  # of every timeline

    def __post_init__(self) -> None:
        if self.hello:
            self.say_hello()

    def say_hello(self) -> None:
        self.outbox.append(
            Hello(
                model_name="fake",
                vocab_size=VOCAB,
                max_model_len=self.context,
                end_token_ids=(END,),
                block_size=16,
                total_pages=100,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                kv_cache_dtype="float32",
                fingerprint="fp-1",
                scheduling_policy=self.policy,
                slo_classes=self.slos,
                startup_s={"weights": 1.5},
            )
        )

    # ------------------------------------------------------------------------------ ServePort

    def send(self, message: Any) -> None:
        self.got.append(message)
        if isinstance(message, Request) and self.refuse is not None:
            refusal = structs.replace(self.refuse, id=message.id)
            self.outbox.append(StepReport(events=(refusal,)))
        elif isinstance(message, Request):
            self.running[message.id] = Running(message, self.reply(message))
        elif isinstance(message, Look) and self.answer_looks:
            self.outbox.append(self._snapshot())
        elif isinstance(message, Explain) and self.answer_looks:
            known = message.id in self.running
            self.outbox.append(Timeline(id=message.id, notes=self.notes if known else ()))
        elif isinstance(message, Abort) and self.answer_aborts and message.id in self.running:
            row = self.running.pop(message.id)
            self.outbox.append(self._report((self._finished(row, message.reason),), False))

    async def receive(self) -> Any:
        while True:
            if self.dead is not None:
                raise EngineError(self.dead)
            if self.outbox:
                return self.outbox.pop(0)
            if self.running and not self.paused:
                await asyncio.sleep(self.step_s)
                if self.running and not self.paused and self.dead is None:
                    return self._step()
            else:
                await asyncio.sleep(0.002)

    def close(self) -> None: ...

    # ----------------------------------------------------------------------------------- steps

    def _step(self) -> StepReport:
        events: list[Event] = []
        for row in list(self.running.values()):
            events += self._advance(row)
        return self._report(tuple(events), True)

    def _advance(self, row: Running) -> list[Event]:
        request, now = row.request, time.monotonic()
        limit = request.sampling.max_tokens
        assert limit is not None and len(request.prompt) + limit <= self.context
        if row.first_s is None:
            row.first_s = now
            self._count(prompt_tokens=len(request.prompt), prefix_queries=len(request.prompt))
            self._count(prefix_hits=self.cached)
        scores = self._scores(request) if row.done == 0 else []
        if limit == 0:
            del self.running[request.id]
            return [*scores, *_vector(request), self._finished(row, FinishReason.LENGTH)]
        ids = tuple(row.script[row.done :][: min(self.per_step, limit - row.done)])
        row.done += len(ids)
        self._count(generation_tokens=len(ids))
        events: list[Event] = [
            *scores,
            Tokens(id=request.id, ids=ids, logprobs=self._logprobs(request, ids)),
        ]
        ends = (END, *request.sampling.stop_token_ids)
        if ids[-1] in ends and not (request.sampling.ignore_eos and ids[-1] == END):
            events.append(self._finished(row, FinishReason.STOP, ids[-1]))
        elif row.done >= min(limit, len(row.script)):
            events.append(self._finished(row, FinishReason.LENGTH))
        if isinstance(events[-1], Finished):
            del self.running[request.id]
        return events

    def _scores(self, request: Request) -> list[Event]:
        """Logprob -place/100 for the token at each place, in two portions."""
        k = request.sampling.prompt_logprobs
        if k is None or len(request.prompt) == 1:
            return []
        made = tuple(
            Logprob(
                chosen=-place / 100,
                rank=place,
                top=tuple(((token + d) % 256, -place / 100 - d) for d in range(k)),
            )
            for place, token in enumerate(request.prompt[1:], 1)
        )
        parts = [part for part in (made[:2], made[2:]) if part]
        return [PromptScores(id=request.id, logprobs=part) for part in parts]

    def _logprobs(self, request: Request, ids: tuple[int, ...]) -> tuple[Logprob, ...]:
        k = request.sampling.logprobs
        if k is None:
            return ()
        tops = [tuple(((i + d) % 256, -0.25 - d) for d in range(k)) for i in ids]
        return tuple(Logprob(chosen=-0.25, top=top) for top in tops)

    def _finished(self, row: Running, reason: FinishReason, token: int | None = None) -> Finished:
        usage = Usage(
            prompt_tokens=len(row.request.prompt),
            completion_tokens=row.done,
            cached_tokens=self.cached,
        )
        now = time.monotonic()
        arrived = row.request.arrived_s
        times = Times(
            arrived_s=arrived, admitted_s=row.first_s, first_token_s=row.first_s, finished_s=now
        )
        return Finished(
            id=row.request.id,
            reason=reason,
            usage=usage,
            times=times,
            stop_token=token,
            timeline=self.notes,
        )

    def _snapshot(self) -> Snapshot:
        """The first page is shared, the others held or free."""
        lanes = tuple(
            Lane(
                id=row.request.id,
                row=place,
                prompt_tokens=len(row.request.prompt),
                computed_tokens=len(row.request.prompt) + row.done,
                output_tokens=row.done,
                arrived_s=row.request.arrived_s,
            )
            for place, row in enumerate(self.running.values())
        )
        pages = bytes([3, *([2] * 9), *([0] * 90)])
        tree = (Branch(pages=2, holders=2), Branch(parent=0, pages=1))
        return Snapshot(step=self.totals.steps, lanes=lanes, pages=pages, tree=tree, branches=2)

    def _count(self, **grown: int) -> None:
        now = {name: getattr(self.totals, name) + add for name, add in grown.items()}
        kept = {name: getattr(self.totals, name) for name in Counters.__struct_fields__}
        self.totals = Counters(**{**kept, **now})

    def _report(self, events: tuple[Event, ...], ran: bool) -> StepReport:
        if ran:
            self._count(steps=1)
        return StepReport(
            events=events,
            load=Load(
                running=len(self.running), free_pages=90, cached_pages=6, held_pages=4,
                total_pages=100,
            ),
            counters=self.totals,
            times=StepTimes(plan_ms=1.0, run_ms=20.0, commit_ms=2.0) if ran else None,
            batch_tokens=len(events),
        )  # fmt: skip

    # ---------------------------------------------------------------------------- for the tests

    def aborts(self) -> list[Abort]:
        return [m for m in self.got if isinstance(m, Abort)]

    def requests(self) -> list[Request]:
        return [m for m in self.got if isinstance(m, Request)]

    def was_shut_down(self) -> bool:
        return any(isinstance(m, Shutdown) for m in self.got)

    def heartbeat(self, predicted_ms: float) -> None:
        self.outbox.append(Heartbeat(predicted_ms=predicted_ms))


def _vector(request: Request) -> list[Event]:
    """(tokens, first token, whether it is a mean): tests see what comes through."""
    if request.pooling is None:
        return []
    numbers = len(request.prompt), request.prompt[0], request.pooling is Pooling.MEAN
    return [PromptVector(id=request.id, vector=struct.pack("<3f", *numbers))]


class ServerThread:
    """A Server in a thread of its own, and a client for it."""

    def __init__(self, engine: FakeEngine, options: ServeOptions, **extra: Any) -> None:
        self.engine = engine
        self.options = options
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.exit_code: int | None = None
        self._load = extra.pop("load_tokenizer", ByteTokenizer)
        self._extra = extra
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_for(lambda: self._started.is_set() or not self.thread.is_alive())
        assert self._started.is_set(), "the server failed at start"

    def _run(self) -> None:
        async def main() -> int:
            self.server = Server(self.sock, self.options, self.engine, **self._extra)
            self.loop = asyncio.get_running_loop()
            self._started.set()
            return await self.server.run(self._load)

        self.exit_code = asyncio.run(main())

    def signal(self) -> None:
        self.loop.call_soon_threadsafe(self.server.signalled)

    def wait_ready(self) -> None:
        wait_for(lambda: self.http.get("/ready").status_code == 200)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.signal()
            self.signal()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.http.close()

    # shortcuts

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json={"prompt": "x", **body})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def chat(self, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        answer = self.http.post("/v1/chat/completions", json={"messages": messages, **body})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream; asserts that it ends with [DONE]."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as answer:
            lines = [line for line in answer.iter_lines() if line]
            assert answer.status_code == 200, lines
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


@contextmanager
def serving(
    engine: FakeEngine | None = None, ready: bool = True, **options: Any
) -> Iterator[ServerThread]:
    engine = engine or FakeEngine()
    extra = {k: options.pop(k) for k in ("seed", "load_tokenizer") if k in options}
    server = ServerThread(engine, ServeOptions(**options), **extra)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Poll; fails the test when the condition stays false."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object; asserts the one shape."""
    assert answer.headers["content-type"].startswith("application/json"), answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in error["message"] and "/" + "usr" not in error["message"]
    return error
