"""The OpenAI shapes, seen by the real client and key by key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.fakes import CONTEXT, END, FakeEngine, ServerThread, bytes_then_end, serving
from toque.types import FinishReason, Request

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerThread]:
    with serving(served_model_name=("fake-1", "Qwen")) as server:
        yield server


@pytest.fixture()
def server(shared: ServerThread) -> ServerThread:
    """One server for the module, its engine's script reset."""
    engine = shared.engine
    engine.reply = lambda request: bytes_then_end("Hello")
    engine.per_step = 1
    engine.got.clear()
    return shared


@pytest.fixture()
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# --------------------------------------------------------------------------- the real client


def test_openai_client_reads_whole_answers(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="Qwen", messages=HI)
    assert chat.object == "chat.completion" and chat.model == "Qwen"
    assert chat.choices[0].message.content == "Hello"
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    text = client.completions.create(model="fake-1", prompt="x", max_tokens=3)
    assert text.choices[0].text == "Hel" and text.choices[0].finish_reason == "length"
    assert text.system_fingerprint == "fp-1"
    assert [m.id for m in client.models.list()] == ["fake-1", "Qwen"]


def test_openai_client_reads_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="Qwen", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    text = client.completions.create(model="Qwen", prompt="x", stream=True)
    assert "".join(c.choices[0].text for c in text) == "Hello"


def test_async_openai_clients_run_side_by_side(server: ServerThread) -> None:
    async def ask(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.completions.create(
            model="Qwen", prompt=text, stream=True, max_tokens=64
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, f"prompt {i}") for i in range(16)))

    server.engine.reply = lambda request: bytes_then_end(bytes(request.prompt[1:]).decode()[::-1])
    assert asyncio.run(main()) == [f"prompt {i}"[::-1] for i in range(16)]


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-none", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="Qwen", prompt="x", temperature=9)
    assert bad.value.param == "temperature"


# -------------------------------------------------------------------------------------- keys


def test_completion_has_exactly_these_keys(server: ServerThread) -> None:
    body = server.complete(model="Qwen")
    keys = {"id", "object", "created", "model", "choices", "usage", "system_fingerprint", "seed"}
    assert set(body) == keys
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    choice = {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert set(body["choices"][0]) == choice
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_chat_has_exactly_these_keys(server: ServerThread) -> None:
    body = server.chat()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "fake-1", "no model named: the first served name"
    choice = body["choices"][0]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}


def test_chat_stream_is_role_then_content_then_end(server: ServerThread) -> None:
    events = server.stream("/v1/chat/completions", messages=HI)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d["content"] for d in deltas[1:-1]] == list("Hello")
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[:-1] == [None] * 6 and reasons[-1] == "stop"
    assert all("usage" not in event for event in events)


def test_usage_comes_last_and_once_where_asked(server: ServerThread) -> None:
    events = server.stream(prompt="x", stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_continuous_usage_counts_up(server: ServerThread) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(prompt="x", stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


def test_models_card(server: ServerThread) -> None:
    body = server.http.get("/v1/models").json()
    assert body["object"] == "list"
    card = body["data"][1]
    assert card["id"] == "Qwen" and card["object"] == "model" and card["root"] == "fake"
    assert card["max_model_len"] == CONTEXT and isinstance(card["created"], int)


# ------------------------------------------------------------------------- several choices


def test_prompts_times_n_are_numbered_prompt_by_prompt(server: ServerThread) -> None:
    """Choice c of prompt p has index p * n + c, its own request id and choice number."""
    server.engine.reply = lambda r: bytes_then_end(f"{bytes(r.prompt[1:]).decode()}{r.choice}")
    body = server.complete(prompt=["a", "b"], n=2, seed=5)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"),
    ]  # fmt: skip
    usage = body["usage"]
    assert usage["prompt_tokens"] == 4, "each prompt counts once"
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6, "first choices only"
    sent = server.engine.requests()
    assert [r.id.rpartition("-")[2] for r in sent] == ["0", "1", "2", "3"]
    assert {r.sampling.seed for r in sent} == {5}


def test_streamed_choices_keep_apart(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("ab" * (r.choice + 1))
    events = server.stream("/v1/chat/completions", messages=HI, n=3)
    texts = dict.fromkeys(range(3), "")
    ends: list[int] = []
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "ab", 1: "abab", 2: "ababab"} and sorted(ends) == [0, 1, 2]


# ------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(server: ServerThread, per_step: int, stream: bool) -> None:
    """The text ends before the match, the engine hears of it, usage counts up to the match."""
    server.engine.per_step = per_step
    server.engine.reply = lambda r: [*b"one two STOP three four five six", END]
    body: dict[str, Any] = {"prompt": "x", "stop": ["zzz", "STOP"], "max_tokens": 40}
    if stream:
        events = server.stream(**body, stream_options={"include_usage": True})
        choices = [c for event in events for c in event["choices"]]
        text, usage = "".join(c["text"] for c in choices), events[-1]["usage"]
        assert [c["stop_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    else:
        answer = server.complete(**body)
        choices, usage = answer["choices"], answer["usage"]
        text = choices[-1]["text"]
    assert text == "one two "
    assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == "STOP"
    assert usage["completion_tokens"] == len("one two STOP")
    aborts = server.engine.aborts()
    assert [a.reason for a in aborts] == [FinishReason.STOP]


def test_held_back_text_is_flushed_at_the_end(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("wait STO")
    choice = server.complete(stop="STOP")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("wait STO", "stop")
    assert choice["stop_reason"] is None, "the model's own end is no stop of the client's"


def test_stop_token_id_is_named_and_not_shown(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("ab!cd")
    choice = server.complete(stop_token_ids=[ord("!")])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("!"))


def test_ignored_end_goes_on(server: ServerThread) -> None:
    server.engine.reply = lambda r: [*b"ab", END, *b"cd"]
    body = server.complete(ignore_eos=True, max_tokens=5)
    assert body["choices"][0]["text"] == "abcd"
    assert body["choices"][0]["finish_reason"] == "length"
    shown = server.complete(ignore_eos=True, max_tokens=5, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "ab<256>cd"


def test_stream_never_splits_a_character(server: ServerThread) -> None:
    text = "naïve 漢字 👩‍👩‍👧"
    server.engine.reply = lambda r: bytes_then_end(text)
    events = server.stream("/v1/chat/completions", messages=HI)
    parts = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(parts) == text and "�" not in "".join(parts)


# --------------------------------------------------------------------------------- logprobs


def test_chat_logprobs_dialect(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("aé")
    content = server.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xc3", "\\xa9"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.25
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]},
        {"token": "b", "logprob": -1.25, "bytes": [98]},
    ]
    bare = server.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


def test_streamed_chat_logprobs_are_the_same(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("aé!")
    whole = server.chat(logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    events = server.stream("/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=1)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in parts if part for entry in part["content"]] == whole


def test_completion_logprobs_dialect(server: ServerThread) -> None:
    """Tokens, values and offsets line up; offsets count characters, not bytes."""
    server.engine.reply = lambda r: bytes_then_end("é<b")
    logprobs = server.complete(logprobs=1)["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<", "b"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["top_logprobs"][2] == {"<": -0.25}
    zero = server.complete(logprobs=0)["choices"][0]["logprobs"]
    assert zero["top_logprobs"][3] == {"b": -0.25}, "the chosen one is always there"


def test_streamed_completion_offsets_continue(server: ServerThread) -> None:
    server.engine.reply = lambda r: bytes_then_end("é<b")
    events = server.stream(prompt="x", logprobs=0)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 0, 1, 2]


# ------------------------------------------------------------------------------- token ids


def test_return_token_ids(server: ServerThread) -> None:
    choice = server.complete(return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [*b"Hello", END] and choice["prompt_token_ids"] == [257, 120]
    chat = server.chat(return_token_ids=True)
    assert chat["choices"][0]["token_ids"] == [*b"Hello", END]
    assert bytes(chat["prompt_token_ids"]).startswith(b"user: hi")
    events = server.stream(prompt="x", return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == [257, 120]
    ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    assert ids == [*b"Hello", END]


def test_echo_puts_the_prompt_first(server: ServerThread) -> None:
    assert server.complete(prompt="Say: ", echo=True)["choices"][0]["text"] == "Say: Hello"
    assert server.complete(prompt=[72, 105], echo=True)["choices"][0]["text"] == "HiHello"
    events = server.stream(prompt="Say: ", echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == "Say: Hello"


def test_prompt_forms_reach_the_engine(server: ServerThread) -> None:
    server.complete(prompt=["a", "b"])
    server.complete(prompt=[1, 2, 3])
    server.complete(prompt=[[1, 2], [3]])
    prompts = [r.prompt for r in server.engine.requests()]
    assert prompts == [(257, 97), (257, 98), (1, 2, 3), (1, 2), (3,)]


def test_chat_template_sees_plain_messages(server: ServerThread) -> None:
    """Text parts become one text, developer is system, the template's arguments arrive."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "d"},
    ]
    server.http.post(
        "/v1/chat/completions",
        json={
            "messages": messages,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ).raise_for_status()
    seen = bytes(server.engine.requests()[0].prompt).decode()
    expected = 'system: be brief\nuser: a\nb\nassistant: c\nuser: d\n{"enable_thinking": false}'
    assert seen == expected


# ------------------------------------------------------------------------------ parameters


def sampling(server: ServerThread) -> Request:
    return server.engine.requests()[-1]


def test_sampling_reaches_the_engine(server: ServerThread) -> None:
    server.complete(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={"5": 3, "6": -100},
        max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[9],
    )  # fmt: skip
    got = sampling(server).sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.9, 7, 0.1)
    penalties = (got.repetition_penalty, got.presence_penalty, got.frequency_penalty)
    assert penalties == (1.1, 0.2, -0.3)
    assert got.logit_bias == {5: 3.0, 6: -100.0} and got.seed == 2**63 - 1
    assert (got.max_tokens, got.min_tokens, got.stop, got.stop_token_ids) == (
        9,
        2,
        ("a", "b"),
        (9,),
    )


def test_defaults(server: ServerThread) -> None:
    """Completions stop after 16 tokens, chats when the context is full; absent seeds differ."""
    server.complete(temperature=None, top_p=None, n=None, stop=None)
    first = sampling(server).sampling
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (1.0, 1.0, 0, 16)
    server.chat(top_k=-1)
    request = sampling(server)
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)
    assert request.sampling.top_k == 0 and request.sampling.seed != first.seed


def test_output_is_cut_to_the_context(server: ServerThread) -> None:
    server.complete(prompt=[1] * (CONTEXT - 4), max_tokens=100, min_tokens=50)
    got = sampling(server).sampling
    assert (got.max_tokens, got.min_tokens) == (4, 4)


def test_chat_limit_by_its_newer_name(server: ServerThread) -> None:
    server.chat(max_completion_tokens=5)
    assert sampling(server).sampling.max_tokens == 5
    server.chat(max_completion_tokens=5, max_tokens=5)


def test_answer_tells_its_seed(server: ServerThread) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.headers["toque-seed"] == str(sampling(server).sampling.seed)


def test_server_seed_is_for_requests_without_one() -> None:
    with serving(seed=77) as server:
        server.complete()
        server.complete(seed=5)
        assert [r.sampling.seed for r in server.engine.requests()] == [77, 5]


def test_browser_form(server: ServerThread) -> None:
    query = "prompt=a%20b&max_tokens=3&temperature=0.5&stop=x&stop=y&stop_token_ids=7&stream=false"
    answer = server.http.get("/v1/completions?" + query)
    assert answer.json()["choices"][0]["text"] == "Hel"
    got = sampling(server)
    assert bytes(got.prompt[1:]) == b"a b" and got.sampling.temperature == 0.5
    assert got.sampling.stop == ("x", "y") and got.sampling.stop_token_ids == (7,)
    with server.http.stream("GET", "/v1/completions?prompt=a&stream=true") as stream:
        assert list(stream.iter_lines())[-2] == "data: [DONE]"


# ----------------------------------------------------------------------- tokenize, detokenize


def test_tokenize_has_vllms_shape(server: ServerThread) -> None:
    answer = server.http.post("/tokenize", json={"model": "Qwen", "prompt": "hi"})
    assert list(answer.json()) == ["count", "max_model_len", "tokens", "token_strs"]
    assert answer.json() == {
        "count": 3, "max_model_len": CONTEXT, "tokens": [257, 104, 105], "token_strs": None,
    }  # fmt: skip
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    plain = server.http.post("/tokenize", json=body).json()
    assert plain["tokens"] == [104, 105] and plain["token_strs"] == ["p104", "p105"]
    chat = server.http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False})
    assert bytes(chat.json()["tokens"]).decode() == "user: hi\n{}"


def test_detokenize_has_vllms_shape(server: ServerThread) -> None:
    answer = server.http.post("/detokenize", json={"tokens": [104, 105, END]})
    assert answer.json() == {"prompt": "hi<256>"}


def test_long_texts_are_tokenized_in_a_thread(server: ServerThread) -> None:
    import threading

    seen: list[str] = []
    tokenizer = server.server.service.tokenizer
    original = tokenizer.encode

    def spy(text: str, **kwargs: Any) -> list[int]:
        seen.append(threading.current_thread().name)
        return original(text, **kwargs)

    tokenizer.encode = spy
    try:
        server.http.post("/tokenize", json={"prompt": "x" * 10_000})
        server.http.post("/tokenize", json={"prompt": "x"})
    finally:
        del tokenizer.encode
    assert seen[0].startswith("toque-text") and not seen[1].startswith("toque-text")


def test_slow_streams_get_larger_portions() -> None:
    """Tokens that wait together leave in one event: nothing is lost or reordered."""
    engine = FakeEngine(reply=lambda r: bytes_then_end("abcdefghij"), per_step=4)
    with serving(engine) as server:
        events = server.stream(prompt="x")
        assert [e["choices"][0]["text"] for e in events] == ["abcd", "efgh", "ij"]
