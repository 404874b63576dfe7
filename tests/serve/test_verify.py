"""`toque verify`: a saved answer is made again and is equal, streamed or whole; what was changed in
it is found and placed; another engine is named, and nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.live import Live, serving
from toque.cli import main
from toque.commands.saved_answer import differences, fingerprint_difference, read_saved

FLAGS = ("--load-format", "dummy", "--threads", "1")

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"prompt": "abc", "max_tokens": 20, "temperature": 0}),
    "sampled": ("completions", {"prompt": "abc", "max_tokens": 20}),
    "own seed": ("completions", {"prompt": "abc", "max_tokens": 9, "seed": -7}),
    "two prompts, three choices, token ids": (
        "completions",
        {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 9, "return_token_ids": True},
    ),
    "logprobs and echo": (
        "completions",
        {"prompt": "abc", "max_tokens": 9, "logprobs": 3, "echo": True},
    ),
    "stop string and names": (
        "completions",
        {"prompt": "abc", "max_tokens": 60, "stop": ["e", "a"], "request_id": "mine", "user": "u"},
    ),
    "chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20},
    ),
    "chat with logprobs": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 9,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def server(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(str(tiny_config), tmp_path_factory.mktemp("live"), *FLAGS) as live:
        yield live


def ask(server: Live, route: str, body: dict[str, Any]) -> str:
    reply = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.text


def verify(*arguments: object) -> int:
    return main(["verify", *map(str, arguments), *FLAGS])


def saved(folder: Path, request: dict[str, Any], response: Any) -> Path:
    path = folder / "saved.json"
    path.write_text(json.dumps({"request": request, "response": response}))
    return path


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_is_equal_when_it_is_made_again(
    server: Live, tmp_path: Path, name: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    route, body = REQUESTS[name]
    body = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    (tmp_path / "body.json").write_text(json.dumps(body))
    (tmp_path / "answer").write_text(ask(server, route, body))
    assert verify(tmp_path / "body.json", tmp_path / "answer") == 0
    assert capsys.readouterr().out.startswith("equal: ")


def test_one_file_holds_both(server: Live, tmp_path: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 9}
    whole = ask(server, "completions", body)
    assert verify(saved(tmp_path, body, json.loads(whole))) == 0
    body["stream"] = True
    assert verify(saved(tmp_path, body, ask(server, "completions", body))) == 0  # events as text


def test_where_they_part(server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "n": 2, "ignore_eos": True, "return_token_ids": True}
    answer = json.loads(ask(server, "completions", body))

    def out_of(change: Any) -> str:
        other = json.loads(json.dumps(answer))
        change(other)
        assert verify(saved(tmp_path, body, other)) == 1
        return capsys.readouterr().out

    def one_token(other: Any) -> None:
        other["choices"][1]["token_ids"][4] ^= 1

    def shorter(other: Any) -> None:
        del other["choices"][0]["token_ids"][7:]

    def text_only(other: Any) -> None:
        for choice in other["choices"]:
            del choice["token_ids"], choice["prompt_token_ids"]
        other["choices"][0]["text"] = "一" + other["choices"][0]["text"][1:]

    def finish(other: Any) -> None:
        other["choices"][0]["finish_reason"] = "stop"

    def seed(other: Any) -> None:
        other["seed"] += 1

    ids = answer["choices"][1]["token_ids"]
    assert f"choice 1 parts at token 4: {ids[4] ^ 1} was saved, {ids[4]} now" in out_of(one_token)
    assert "choice 0 parts at token 7: the end was saved" in out_of(shorter)
    assert "choice 0 parts at character 0 of text: '一" in out_of(text_only)
    assert "parts at character 0 of finish_reason: 'stop'" in out_of(finish)
    assert "choice 0 parts at token" in out_of(seed)


def test_a_stream_that_lost_a_piece(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 20, "ignore_eos": True, "stream": True}
    events = ask(server, "chat/completions", body).split("\n\n")
    deltas = [json.loads(e[6:])["choices"][0]["delta"] for e in events if e.startswith("data: {")]
    del events[next(i for i, delta in enumerate(deltas) if delta.get("content"))]
    assert verify(saved(tmp_path, body, "\n\n".join(events))) == 1
    assert "choice 0 parts at character" in capsys.readouterr().out


def test_another_engine_is_named(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "abc", "max_tokens": 3}
    path = saved(tmp_path, body, json.loads(ask(server, "completions", body)))
    assert verify(path, "--kv-cache-dtype", "float32") == 2
    assert "another engine made this answer: KV dtype: float16 then, float32 now" in (
        capsys.readouterr().err
    )


def test_a_streamed_call_is_put_together(tmp_path: Path) -> None:
    """Its id is drawn for each answer; its arguments come in pieces."""

    def chunk(delta: dict[str, Any], **end: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        frame = {"object": "chat.completion.chunk", "system_fingerprint": "f", "seed": 1}
        return f"data: {json.dumps(frame | {'choices': [choice]})}"

    def piece(index: int, arguments: str, **rest: Any) -> dict[str, Any]:
        name = {"name": rest.pop("name")} if "name" in rest else {}
        function = name | {"arguments": arguments}
        return {"tool_calls": [{"index": index, "function": function, **rest}]}

    events = [
        chunk({"role": "assistant", "content": None}),
        chunk(piece(0, "", name="look", id="call_1", type="function")),
        chunk(piece(0, '{"a":')),
        chunk(piece(0, " 1}")),
        chunk(piece(1, "{}", name="see", id="call_2", type="function")),
        chunk({}, finish_reason="tool_calls"),
        "data: [DONE]",
    ]
    (tmp_path / "body").write_text("{}")
    (tmp_path / "answer").write_text("\n\n".join(events))
    found = read_saved(tmp_path / "body", tmp_path / "answer")

    def call(name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{name}", "type": "function", "function": function}

    message = {"role": "assistant", "content": None, "refusal": None}
    message["tool_calls"] = [call("look", '{"a": 1}'), call("see", "{}")]  # type: ignore[assignment]
    now: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    assert list(differences(found, [now])) == []
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'  # type: ignore[index]
    (difference,) = differences(found, [now])
    assert "at character 6 of message.tool_calls[0].function.arguments" in difference


def test_fingerprints_are_compared_part_by_part() -> None:
    old = "toque-0.1.0-0123456789ab-cpu/avx2/a14-float16"
    assert fingerprint_difference(old, old) is None
    new = "toque-0.2.0-ba9876543210-int4-cpu/avx512/a14-int8"
    assert fingerprint_difference(old, new) == (
        "version: 0.1.0 then, 0.2.0 now; model hash: 0123456789ab then, ba9876543210 now; "
        "quantization: none then, int4 now; kernel set: cpu/avx2/a14 then, cpu/avx512/a14 now; "
        "KV dtype: float16 then, int8 now"
    )
    assert "cannot be read" in (fingerprint_difference("fp_44709d6fcb", new) or "")


WHOLE = {
    "object": "text_completion",
    "model": "no/such/model",
    "system_fingerprint": "f",
    "seed": 1,
    "choices": [],
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "neither"),
        (json.dumps({"request": 1, "response": WHOLE}), "the request is not"),
        (json.dumps({"request": {}, "response": "data: x\n\n"}), "not JSON"),
        (json.dumps({"request": {}, "response": ""}), "not JSON"),
        (json.dumps({"request": {}, "response": []}), "neither a JSON object nor"),
        (json.dumps({"request": {}, "response": {"error": {"message": "no"}}}), "is an error"),
        (json.dumps({"request": {}, "response": WHOLE | {"object": "list"}}), "'list' cannot"),
        (
            json.dumps({"request": {}, "response": WHOLE | {"system_fingerprint": None}}),
            "not one of toque's",
        ),
        (json.dumps({"request": {}, "response": WHOLE | {"seed": None}}), "no seed"),
        (json.dumps({"request": {}, "response": WHOLE | {"model": None}}), "--model"),
        (json.dumps({"request": {}, "response": WHOLE}), "no/such/model"),
    ],
)
def test_what_cannot_be_used_is_said(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.json"
    path.write_text(content)
    assert verify(path) == 2
    assert message in capsys.readouterr().err


def test_a_request_that_is_refused_now(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "abc", "max_tokens": 3}
    answer = json.loads(ask(server, "completions", body))
    assert verify(saved(tmp_path, body | {"temperature": 9}, answer)) == 2
    assert "refused now, with status 400" in capsys.readouterr().err


def test_openais_client_keeps_the_seed(server: Live) -> None:
    """An answer's `seed` is ours: a strict client must still read the answer, and show it."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    whole = client.completions.create(model=server_model(server), prompt="abc", seed=5)
    assert whole.model_extra is not None and whole.model_extra["seed"] == 5
    messages: Any = [{"role": "user", "content": "hi"}]
    chunks = client.chat.completions.create(
        model=server_model(server), messages=messages, max_tokens=3, stream=True
    )
    seeds = {(chunk.model_extra or {})["seed"] for chunk in chunks}
    assert len(seeds) == 1
    assert 0 <= seeds.pop() < 2**53


def server_model(server: Live) -> str:
    found = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"]
    assert isinstance(found, str)
    return found
