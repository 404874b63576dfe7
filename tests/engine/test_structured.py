"""Grammars in the engine: the same tokens in any company, neighbours untouched, every end named.

On a tiny random model whose tokens are bytes; requests go through the same doors as in a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine.test_equivalence import CONFIG, STEM, requests, ways
from toque.build import Engine, Loaded, assemble, load
from toque.config import EngineConfig
from toque.files.checkpoint import open_checkpoint
from toque.ipc import InProcess
from toque.options import EngineOptions
from toque.serve.tokenizer import load_tokenizer
from toque.structured.gate import Gate
from toque.structured.grammars import Grammars
from toque.types import (
    Abort,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    Shutdown,
    Spellings,
    StepReport,
    ToEngine,
    Tokens,
)

END = 2
REGEX, SCHEMA = GrammarKind.REGEX, GrammarKind.JSON_SCHEMA
RECORD = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tag": {"enum": ["é", "你好", 'a"b']},
    },
    "required": ["ok", "n", "tag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded(tiny_config: Path) -> Loaded:
    return load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))


@pytest.fixture(scope="module")
def spellings(tiny_config: Path) -> Spellings:
    return load_tokenizer(open_checkpoint(tiny_config, "dummy")).spellings((END,))


@dataclass
class Ran:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)
    preemptions: int = 0


def run(engine: Engine, channel: InProcess, messages: Iterable[ToEngine], gap: int = 0) -> Ran:
    """Until every request has finished; a new one every `gap` steps (0: all at once)."""
    pending, wanted, ran, step = list(messages), set[str](), Ran(), 0
    while pending or wanted - ran.ends.keys():
        while pending and (gap == 0 or step % gap == 0):
            message = pending.pop(0)
            wanted |= {message.id} if isinstance(message, Request) else set()
            channel.send(message)
            if gap:
                break
        engine.core.step(0.0 if engine.core.scheduler.has_work else 0.01)
        step += 1
        for report in channel.drain():
            if isinstance(report, StepReport):
                ran.preemptions = report.counters.preemptions
                for event in report.events:
                    if isinstance(event, Tokens):
                        ran.tokens.setdefault(event.id, []).extend(event.ids)
                    elif isinstance(event, Finished):
                        ran.ends[event.id] = event
    engine.core.scheduler.check()
    return ran


def answer(
    loaded: Loaded, spellings: Spellings, wanted: list[Request], config: EngineConfig = CONFIG,
    gap: int = 0,
) -> Ran:  # fmt: skip
    channel = InProcess()
    engine = assemble(loaded, config, "tiny", channel.engine)
    return run(engine, channel, [spellings, *wanted], gap)


def ask(name: str, kind: GrammarKind, text: str, seed: int = 0, **sampling: Any) -> Request:
    params = {"temperature": 1.0, "seed": seed, "max_tokens": 90, **sampling}
    return Request(
        id=name,
        prompt=tuple(STEM[: 10 + 7 * seed]),
        sampling=SamplingParams(**params),
        arrived_s=0,
        grammar=Grammar(kind=kind, text=text),
    )


def text_of(tokens: list[int]) -> str:
    return bytes(byte_of(token) for token in tokens if token != END).decode()


def byte_of(token: int) -> int:
    return BYTES[token][0]


BYTES: list[bytes] = []


@pytest.fixture(scope="module", autouse=True)
def _bytes(spellings: Spellings) -> None:
    BYTES[:] = spellings.tokens


def bound() -> list[Request]:
    """Eight with grammars, sampled in different ways."""
    made = []
    for seed in range(4):
        more = {"repetition_penalty": 1.2, "top_p": 0.9} if seed % 2 else {"top_k": 40}
        blanks = {BYTES.index(bytes([byte])): -100.0 for byte in b" \t\r\n"}
        record = ask(f"s{seed}", SCHEMA, json.dumps(RECORD), seed, logit_bias=blanks, **more)
        made.append(record)
        made.append(ask(f"x{seed}", REGEX, "[a-f]{20,30}z", seed, **more))
    return made


def either() -> list[Request]:
    """A record, or a call instead."""
    call = json.dumps({"enum": [True, 12, "é"]})
    calls = f'start: "<call>" body\nbody: %json {call}'
    made = []
    for seed in range(4):
        blanks = {BYTES.index(bytes([byte])): -100.0 for byte in b" \t\r\n"}
        begin = BYTES.index(b"<{"[seed % 2 :][:1])
        found = ask(f"e{seed}", SCHEMA, json.dumps(RECORD), seed, logit_bias={**blanks, begin: 9.0})
        assert found.grammar is not None
        made.append(replace(found, grammar=replace(found.grammar, calls=calls)))
    return made


def test_an_output_is_one_or_the_other(loaded: Loaded, spellings: Spellings) -> None:
    ran = answer(loaded, spellings, either())
    for name, tokens in ran.tokens.items():
        assert ran.ends[name].reason is FinishReason.STOP
        text = text_of(tokens)
        if name in ("e0", "e2"):
            assert json.loads(text.removeprefix("<call>")) in (True, 12, "é")
        else:
            assert list(json.loads(text)) == ["ok", "n", "tag"]


@pytest.fixture(scope="module")
def alone(loaded: Loaded, spellings: Spellings) -> dict[str, list[int]]:
    """One engine for each request."""
    return {
        name: tokens
        for request in [*bound(), *either(), *requests()]
        for name, tokens in answer(loaded, spellings, [request]).tokens.items()
    }


@pytest.mark.parametrize(("config", "gap"), ways())
def test_the_same_tokens_in_any_company(
    loaded: Loaded,
    spellings: Spellings,
    alone: dict[str, list[int]],
    config: EngineConfig,
    gap: int,
) -> None:
    """Whole prompts and chunks, cold and shared, roomy and preempted; bound and free together."""
    wanted = [r for pair in zip(bound(), requests(), strict=False) for r in pair]
    wanted += [*either(), *requests()[8:]]
    ran = answer(loaded, spellings, wanted, config, gap)
    assert ran.tokens == alone
    if config.total_pages < 256:
        assert ran.preemptions > 0, "the tight pool was meant to preempt"


def test_outputs_match_and_end_by_themselves(loaded: Loaded, spellings: Spellings) -> None:
    ran = answer(loaded, spellings, bound())
    for name, tokens in ran.tokens.items():
        assert ran.ends[name].reason is FinishReason.STOP
        if name.startswith("x"):
            assert re.fullmatch("[a-f]{20,30}z", text_of(tokens))
        else:
            value = json.loads(text_of(tokens))
            assert list(value) == ["ok", "n", "tag"] and 0 <= value["n"] <= 99
            assert value["tag"] in RECORD["properties"]["tag"]["enum"]  # type: ignore[index]


def one(loaded: Loaded, spellings: Spellings, request: Request) -> tuple[list[int], Finished]:
    ran = answer(loaded, spellings, [request])
    return ran.tokens.get(request.id, []), ran.ends[request.id]


def test_how_an_output_ends(loaded: Loaded, spellings: Spellings) -> None:
    """At once where nothing can follow, by the end token where something could, else cut."""
    tokens, end = one(loaded, spellings, ask("whole", REGEX, "abc"))
    assert (text_of(tokens), len(tokens)) == ("abc", 3)
    assert end.reason is FinishReason.STOP and end.stop_token is None
    assert end.usage.completion_tokens == 3

    tokens, end = one(loaded, spellings, ask("exact", REGEX, "abc", max_tokens=3))
    assert end.reason is FinishReason.STOP, "whole and at the limit: it is not cut"

    tokens, end = one(loaded, spellings, ask("cut", REGEX, "abc", max_tokens=2))
    assert text_of(tokens) == "ab" and end.reason is FinishReason.LENGTH

    tokens, end = one(loaded, spellings, ask("either", REGEX, "a*", logit_bias={END: 100.0}))
    assert tokens == [END] and end.stop_token == END

    tokens, end = one(loaded, spellings, ask("more", REGEX, "a{1,9}", min_tokens=5,
                                             logit_bias={END: 100.0}))  # fmt: skip
    assert text_of(tokens) == "aaaaa" and tokens[-1] == END, "the end token waits for min_tokens"

    tokens, end = one(loaded, spellings, ask("least", REGEX, "ab", min_tokens=5))
    assert text_of(tokens) == "ab" and end.reason is FinishReason.STOP, "it can only end"

    stop = BYTES.index(b"b")
    tokens, end = one(loaded, spellings, ask("stop", REGEX, "abab", stop_token_ids=(stop,)))
    assert text_of(tokens) == "ab" and end.stop_token == stop


def test_no_token_left_fails_that_request_alone(loaded: Loaded, spellings: Spellings) -> None:
    a, b = BYTES.index(b"a"), BYTES.index(b"b")
    stuck = ask("stuck", REGEX, "aab", bad_words=((a,),))
    other = ask("other", REGEX, "aab", allowed_token_ids=(b,))
    fine = ask("fine", REGEX, "aab", allowed_token_ids=(a, b))
    ran = answer(loaded, spellings, [stuck, other, fine, *requests()])
    for name in ("stuck", "other"):
        assert ran.ends[name].reason is FinishReason.ERROR
        assert "forbids every token" in (ran.ends[name].error or "")
    assert text_of(ran.tokens["fine"]) == "aab"
    assert len(ran.ends) == 3 + len(requests())


def test_logprobs_are_of_the_model_not_of_the_mask(loaded: Loaded, spellings: Spellings) -> None:
    channel = InProcess()
    engine = assemble(loaded, CONFIG, "tiny", channel.engine)
    free = replace_id(requests()[1], "free", logprobs=5)
    bound = Request(
        id="bound",
        prompt=free.prompt,
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=5),
        arrived_s=0,
        grammar=Grammar(kind=REGEX, text="qqq"),
    )
    found: dict[str, Any] = {}
    channel.send(spellings)
    channel.send(bound)
    channel.send(free)
    while len(found) < 2:
        engine.core.step(0.01)
        for report in channel.drain():
            for event in report.events if isinstance(report, StepReport) else ():
                if isinstance(event, Tokens):
                    found.setdefault(event.id, event.logprobs[0])
    assert found["bound"].top == found["free"].top
    assert found["bound"].rank > 1


def replace_id(request: Request, name: str, **sampling: Any) -> Request:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, **sampling)
    return Request(id=name, prompt=request.prompt, sampling=params, arrived_s=0)


def test_n_and_prompt_scores(loaded: Loaded, spellings: Spellings) -> None:
    """Scored prompts sample in another place; the mask is there as well."""
    scored = ask("scored", REGEX, "[a-f]{5}", prompt_logprobs=0)
    plain = ask("plain", REGEX, "[a-f]{5}")
    ran = answer(loaded, spellings, [scored, plain])
    assert ran.tokens["scored"] == ran.tokens["plain"]
    assert re.fullmatch("[a-f]{5}", text_of(ran.tokens["scored"]))


def test_what_the_engine_cannot_compile_fails_by_name(loaded: Loaded, spellings: Spellings) -> None:
    """Serve checks first; this is the second lock."""
    ran = answer(loaded, spellings, [ask("bad", REGEX, "(["), ask("good", REGEX, "ab")])
    assert ran.ends["bad"].reason is FinishReason.ERROR
    assert "unclosed" in (ran.ends["bad"].error or "")
    assert text_of(ran.tokens["good"]) == "ab"
    channel = InProcess()
    untold = run(assemble(loaded, CONFIG, "tiny", channel.engine), channel, [ask("x", REGEX, "ab")])
    assert "was not told" in (untold.ends["x"].error or "")


# ----------------------------------------------------------------------------------------- the gate


class Slow(Grammars):
    """Grammars that are ready when the test says so."""

    def __init__(self, room: bool = True) -> None:
        super().__init__()
        self.futures: dict[str, Future[Any]] = {}
        self.room = room
        self.released: list[str] = []

    def has_room(self, grammar: Grammar) -> bool:
        return self.room

    def take(self, request_id: str, grammar: Grammar) -> Future[Any]:
        self.futures[request_id] = Future()
        return self.futures[request_id]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def names(messages: list[ToEngine]) -> list[str]:
    return [getattr(m, "id", type(m).__name__) for m in messages]


def test_who_has_no_grammar_does_not_wait_for_one() -> None:
    channel, slow = InProcess(), Slow()
    gate = Gate(channel.engine, slow)
    free = requests()[0]
    for message in (ask("one", REGEX, "a"), free, ask("two", REGEX, "b")):
        channel.send(message)
    assert names(gate.receive(0.0)) == [free.id]
    slow.futures["two"].set_result(None)
    assert names(gate.receive(0.0)) == ["two"]
    slow.futures["one"].set_exception(ValueError())
    assert names(gate.receive(5.0)) == ["one"], "a failure enters as well: its row reports it"
    assert names(gate.receive(0.0)) == []


def test_an_end_comes_after_what_it_ends() -> None:
    channel, slow = InProcess(), Slow()
    gate = Gate(channel.engine, slow)
    for message in (ask("one", REGEX, "a"), ask("two", REGEX, "b"), Abort(id="one")):
        channel.send(message)
    assert names(gate.receive(0.0)) == ["one", "one"]
    channel.send(Shutdown())
    assert names(gate.receive(0.0)) == ["two", "Shutdown"]


def test_room_is_waited_for() -> None:
    channel, slow = InProcess(), Slow(room=False)
    gate = Gate(channel.engine, slow)
    channel.send(ask("one", REGEX, "a"))
    assert gate.receive(0.0) == [] and not slow.futures
    slow.room = True
    assert gate.receive(0.0) == []
    slow.futures["one"].set_result(None)
    assert names(gate.receive(0.0)) == ["one"]


def test_grammars_are_kept_while_in_use(
    spellings: Spellings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toque.structured.grammars.CACHED_CHARS", 10)
    grammars = Grammars()
    grammars.learn(spellings)
    big = [Grammar(kind=REGEX, text=f"a{i}bc") for i in range(3)]
    taken = [grammars.take(str(i), g) for i, g in enumerate(big[:2])]
    assert grammars.has_room(big[0]) and not grammars.has_room(big[2])
    for future in taken:
        future.result()
    assert grammars.take("again", big[0]) is taken[0], "compiled once for all"
    grammars.release("0")
    assert grammars.take("third", big[0]) is taken[0], "somebody still uses it"
    for name in ("again", "third", "1"):
        grammars.release(name)
    assert not grammars._in_use and not grammars._used_by
