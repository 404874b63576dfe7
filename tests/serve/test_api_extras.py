"""vLLM's extras: scoring a prompt, bans, truncation, names, and filling in the middle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.fakes import (
    CONTEXT,
    END,
    ByteTokenizer,
    FakeEngine,
    ServerThread,
    bytes_then_end,
    error_of,
    serving,
    wait_for,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving(FakeEngine(reply=lambda r: bytes_then_end("naïve 🙂 text"))) as server:
        yield server


def last_request(server: ServerThread) -> Any:
    return server.engine.requests()[-1]


# ----------------------------------------------------------------------------------- scoring


def check_echo(choice: dict[str, Any], prompt: str, tokens: int) -> None:
    """The public contract: aligned lists, one null, offsets that add up. BOS is no text."""
    logprobs = choice["logprobs"]
    lengths = {key: len(value) for key, value in logprobs.items()}
    assert set(lengths.values()) == {tokens}, lengths
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    for place in range(1, 1 + len(prompt)):
        assert logprobs["token_logprobs"][place] == pytest.approx(-place / 100)
    assert choice["text"].startswith(prompt)
    offset = 0
    for token, start in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert start == offset
        if not token.startswith("bytes:") and token != f"<{END}>":
            assert choice["text"][start:].startswith(token)
            offset += len(token)
        else:
            offset = logprobs["text_offset"][min(len(logprobs["tokens"]) - 1, place)]
            break


def test_a_prompt_is_scored_without_generating(server: ServerThread) -> None:
    """What evaluation harnesses send: a token for every id, and nothing generated."""
    answer = server.complete(prompt="Answer: Yes", echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "Answer: Yes" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 12
    check_echo(choice, "Answer: Yes", 12)
    assert choice["logprobs"]["tokens"][0] == "<257>"  # BOS has its identity, and no text
    assert last_request(server).sampling.max_tokens == 0


def test_ids_are_scored_one_for_one_and_the_end_token_has_its_entry() -> None:
    """Harnesses cut the generated token's entry off by its place: it must be there, end or not."""
    with serving(FakeEngine(reply=lambda r: [END])) as server:
        ids = list(b"abcdef")
        answer = server.complete(prompt=ids, echo=True, logprobs=2, max_tokens=1)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert logprobs["tokens"][:-1] == list("abcdef") and logprobs["tokens"][-1] == f"<{END}>"
        assert answer["choices"][0]["text"] == "abcdef"
        assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2, 2, 2, 2, 2, 3]
        plain = server.complete(prompt=ids, logprobs=2, max_tokens=1)
        assert plain["choices"][0]["logprobs"]["tokens"] == []


def test_a_scored_stream_is_the_whole_answer_in_pieces(server: ServerThread) -> None:
    body: dict[str, Any] = {"prompt": ["one", "t"], "echo": True, "logprobs": 1, "max_tokens": 9,
                            "n": 2}  # fmt: skip
    whole = server.complete(**body)["choices"]
    events = server.stream(**body)
    for choice in whole:
        mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key, values in choice["logprobs"].items():
            pieces = [c["logprobs"][key] for c in mine if c["logprobs"]]
            assert [value for piece in pieces for value in piece] == values, key
        assert sum(c["finish_reason"] is not None for c in mine) == 1
    scored = [r.sampling.prompt_logprobs for r in server.engine.requests()[-4:]]
    assert scored == [1, None, 1, None], "a prompt is scored once, not once per choice"


def test_offsets_go_on_after_the_echo(server: ServerThread) -> None:
    (choice,) = server.complete(prompt="ab", echo=True, logprobs=0, max_tokens=3)["choices"]
    assert choice["text"] == "abna\ufffd"  # cut within the third character
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_ends_a_stream_too(server: ServerThread, stream: bool) -> None:
    if not stream:
        return
    events = server.stream(prompt="abc", echo=True, max_tokens=0)
    assert "".join(c["text"] for e in events for c in e["choices"]) == "abc"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_prompt_logprobs_have_vllms_form_on_both_routes(server: ServerThread) -> None:
    answer = server.complete(prompt="ab", prompt_logprobs=2, max_tokens=1)
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 3
    own = scores[1][str(ord("a"))]
    assert own == {"logprob": -0.01, "rank": 1, "decoded_token": "a"}
    assert scores[1][str(ord("b"))]["rank"] == 2
    chat = server.chat(prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in server.chat(max_tokens=1)
    only = server.complete(prompt="ab", prompt_logprobs=0, max_tokens=0)
    assert only["choices"][0]["text"] == ""


# -------------------------------------------------------------------------- stops and limits


def test_the_stop_string_is_shown_where_it_is_wanted(server: ServerThread) -> None:
    for extra, text in (({}, "na"), ({"include_stop_str_in_output": True}, "naïve")):
        body: dict[str, Any] = {"stop": ["ïve"], "max_tokens": 30, **extra}
        (choice,) = server.complete(**body)["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, "ïve")
        pieces = [c["text"] for e in server.stream(prompt="x", **body) for c in e["choices"]]
        assert "".join(pieces) == text


def test_no_stop_string_matches_before_min_tokens() -> None:
    with serving(FakeEngine(reply=lambda r: bytes_then_end("stop and stop here"))) as server:
        (choice,) = server.complete(stop=["stop"], max_tokens=30)["choices"]
        assert choice["text"] == ""
        for least, text in ((1, "stop and "), (4, "stop and "), (9, "stop and "), (10, None)):
            (choice,) = server.complete(stop=["stop"], min_tokens=least, max_tokens=30)["choices"]
            assert choice["text"] == (text or "stop and stop here"), least


def test_cut_max_tokens_is_reported(server: ServerThread) -> None:
    prompt = [65] * (CONTEXT - 5)
    for stream in (False, True):
        answer = server.http.post(
            TEXT, json={"prompt": prompt, "max_tokens": 50, "stream": stream, "logprobs": 0}
        )
        assert answer.headers["toque-max-tokens"] == "5"
    for body in ({"prompt": prompt, "max_tokens": 5}, {"prompt": prompt[:9], "max_tokens": 50}):
        assert "toque-max-tokens" not in server.http.post(TEXT, json=body).headers


def test_truncation_keeps_the_end_or_the_beginning(server: ServerThread) -> None:
    for extra, kept in (
        ({"truncate_prompt_tokens": 3}, b"fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 100}, b"abcdefgh"),
    ):
        answer = server.complete(prompt=list(b"abcdefgh"), echo=True, max_tokens=1, **extra)
        assert bytes(last_request(server).prompt) == kept
        assert answer["choices"][0]["text"].startswith(kept.decode())
    long = [65] * (CONTEXT * 2)
    server.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=7)
    assert len(last_request(server).prompt) == CONTEXT - 7
    messages = [{"role": "user", "content": "x" * CONTEXT}]
    body = {"messages": messages, "truncate_prompt_tokens": 20, "max_tokens": 1}
    assert server.http.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == 20


# ------------------------------------------------------------------------------ what travels


def test_bans_salt_and_priority_reach_the_engine() -> None:
    engine = FakeEngine(policy="priority")
    with serving(engine) as server:
        server.complete(
            bad_words=["ab", " c"],
            allowed_token_ids=[7, 9, 7],
            cache_salt="tenant-1",
            priority=-4,
        )
        request = last_request(server)
        assert request.sampling.bad_words == (tuple(b"ab"), tuple(b" ab"), tuple(b" c"))
        assert request.sampling.allowed_token_ids == (7, 9)
        assert (request.cache_salt, request.priority) == ("tenant-1", -4)


@pytest.mark.parametrize(
    "bans",
    [
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [END], "min_tokens": 1},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
    ],
)
def test_bans_that_leave_nothing_are_refused(server: ServerThread, bans: Any) -> None:
    answer = server.http.post(TEXT, json={"prompt": "x", **bans})
    assert answer.status_code == 400 and error_of(answer)["param"] == "allowed_token_ids"
    for name in bans:
        rest = {k: v for k, v in bans.items() if k != name}
        server.complete(**rest)


def test_special_tokens_are_added_unless_told_otherwise(server: ServerThread) -> None:
    for value, prompt in ((True, (257, 120)), (False, (120,)), (None, (257, 120))):
        server.complete(add_special_tokens=value)
        assert last_request(server).prompt == prompt


def test_a_final_message_is_continued(server: ServerThread) -> None:
    messages = [*HI, {"role": "assistant", "content": "The answer"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert server.http.post(CHAT, json=body).status_code == 200
    assert bytes(last_request(server).prompt).endswith(b"assistant: The answer")
    body.pop("max_tokens")
    ids = server.http.post("/tokenize", json=body).json()["tokens"]
    assert bytes(ids).endswith(b"assistant: The answer")


def test_tokens_may_be_spelled_by_id(server: ServerThread) -> None:
    text = server.complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    assert text["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord('n')}"]
    chat = server.chat(logprobs=True, top_logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert token["token"] == token["top_logprobs"][0]["token"] == f"token_id:{ord('n')}"
    assert token["bytes"] == [ord("n")]


# ----------------------------------------------------------------------------------- names


def test_a_request_id_names_one_open_call() -> None:
    engine = FakeEngine(paused=True)
    with serving(engine) as server:
        body = {"prompt": "x", "request_id": "job:7", "max_tokens": 3}
        answers: list[Any] = []
        first = threading.Thread(
            target=lambda: answers.append(server.http.post(TEXT, json=body).json())
        )
        first.start()
        wait_for(lambda: engine.requests())
        second = server.http.post(TEXT, json=body)
        assert second.status_code == 409
        assert error_of(second)["param"] == "request_id"
        engine.paused = False
        first.join()
        assert answers[0]["id"] == "cmpl-job:7"
        again = server.complete(request_id="job:7")
        assert again["id"] == "cmpl-job:7"
        chat = server.chat(request_id="job:7")
        assert chat["id"] == "chatcmpl-job:7"
        ids = [request.id for request in engine.requests()]
        assert len(set(ids)) == len(ids), "the engine's ids are never the client's"


# ---------------------------------------------------------------------- filling in the middle


class CoderTokenizer(ByteTokenizer):
    """A vocabulary with the three tokens of fill-in-the-middle."""

    def token_id(self, token: str) -> int | None:
        known = {"<|fim_prefix|>": 257, "<|fim_suffix|>": 258, "<|fim_middle|>": 259}
        return known.get(token)


def test_suffix_is_fill_in_the_middle_where_the_model_has_the_tokens() -> None:
    with serving(load_tokenizer=CoderTokenizer) as server:
        server.complete(prompt="def f(", suffix="): pass")
        expected = (257, *b"def f(", 258, *b"): pass", 259)
        assert last_request(server).prompt == expected
        for suffix in ("", None):
            server.complete(prompt="ab", suffix=suffix)
            assert last_request(server).prompt == (257, *b"ab")  # BOS of the plain way
        for body in ({"prompt": [1, 2]}, {"prompt": "x", "echo": True}):
            answer = server.http.post(TEXT, json={**body, "suffix": "y"})
            assert answer.status_code == 400 and error_of(answer)["param"] == "suffix"


# ----------------------------------------------------------------------------- unknown fields


def test_unknown_fields_pass_only_where_the_operator_says_so(server: ServerThread) -> None:
    messages = [{"role": "user", "content": "x", "odd": 1}]
    bodies = (
        (TEXT, {"prompt": "x", "odd": 1}),
        (CHAT, {"messages": messages}),
        (TEXT, {"prompt": "x", "stream": True, "stream_options": {"odd": 1}}),
        ("/tokenize", {"prompt": "x", "odd": 1}),
    )
    for path, body in bodies:
        assert server.http.post(path, json=body).status_code == 400
    with serving(allow_unknown_fields=True) as lenient:
        for path, body in bodies:
            assert lenient.http.post(path, json=body).status_code == 200
        refused = lenient.http.post(TEXT, json={"prompt": "x", "best_of": 3})
        assert refused.status_code == 400, "a known field is never ignored"


@pytest.mark.parametrize(
    ("options", "good", "bad", "flag"),
    [
        ({"max_stop_strings": 2}, {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop-strings"),
        ({"max_sequences": 3}, {"n": 3}, {"n": 2, "prompt": ["a", "b"]}, "max-sequences"),
        ({"max_logit_bias": 1}, {"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1}},
         "max-logit-bias"),
        ({"max_json_depth": 3}, {"logit_bias": {}}, {"metadata": {"a": [[1]]}}, "max-json-depth"),
    ],
)  # fmt: skip
def test_limits_are_the_operators(options: Any, good: Any, bad: Any, flag: str) -> None:
    with serving(**options) as server:
        server.complete(**good)
        answer = server.http.post(TEXT, json={"prompt": "x", **bad})
        assert answer.status_code == 400 and flag in error_of(answer)["message"]
