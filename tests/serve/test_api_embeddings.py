"""/v1/embeddings: what it takes, what it answers, what it refuses; through real clients too."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.serve.fakes import CONTEXT, VOCAB, FakeEngine, ServerThread, error_of, serving, wait_for
from tests.serve.live import Live
from tests.serve.live import serving as serving_live
from toque import LLM
from toque.types import Pooling, Refused, SamplingParams

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving() as server:
        yield server


def embed(server: ServerThread, given: Any = "x", **body: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json={"input": given, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [entry["embedding"] for entry in answer["data"]]


def test_the_shape_is_openais(server: ServerThread) -> None:
    assert embed(server, "abc") == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [4.0, 257.0, 0.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [[3, 257, 0]]),
        (["ab", "c"], [[3, 257, 0], [2, 257, 0]]),
        ([7, 8], [[2, 7, 0]]),
        ([[7, 8], [9]], [[2, 7, 0], [1, 9, 0]]),
        ([str(i) * (i + 1) for i in range(20)], [[2 + i, 257, 0] if i < 10 else [3 + 2 * i, 257, 0]
                                                 for i in range(20)]),
    ],
)  # fmt: skip
def test_every_form_of_input_in_its_order(server: ServerThread, given: Any, expected: Any) -> None:
    answer = embed(server, given)
    assert vectors(answer) == expected
    assert [entry["index"] for entry in answer["data"]] == list(range(len(expected)))
    tokens = sum(int(vector[0]) for vector in expected)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_is_little_endian_float32(server: ServerThread) -> None:
    for form, expected in (("float", None), (None, None), ("base64", struct.pack("<3f", 2, 7, 0))):
        (vector,) = vectors(embed(server, [7, 8], encoding_format=form))
        if expected is None:
            assert vector == [2, 7, 0]
        else:
            assert base64.b64decode(vector, validate=True) == expected  # type: ignore[arg-type]


def test_fields_reach_the_engine(server: ServerThread) -> None:
    embed(server, "x", pooling="mean", cache_salt="s", add_special_tokens=False, user="u")
    request = server.engine.requests()[-1]
    assert request.pooling is Pooling.MEAN and request.cache_salt == "s"
    assert request.prompt == (120,)
    assert request.sampling == SamplingParams(max_tokens=0, temperature=0.0, seed=0)
    for body in ({}, {"pooling": None}, {"pooling": "last"}):
        embed(server, **body)
        assert server.engine.requests()[-1].pooling is Pooling.LAST


def test_long_inputs_are_cut_where_the_client_says_so(server: ServerThread) -> None:
    ids = [i % 200 for i in range(CONTEXT + 50)]
    assert vectors(embed(server, ids, truncate_prompt_tokens=3)) == [[3, ids[-3], 0]]
    right = embed(server, ids, truncate_prompt_tokens=3, truncation_side="right")
    assert vectors(right) == [[3, 0, 0]]
    assert vectors(embed(server, ids, truncate_prompt_tokens=-1))[0][0] == CONTEXT - 1
    assert vectors(embed(server, [5], truncate_prompt_tokens=-1)) == [[1, 5, 0]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"),
        ({"input": [[]]}, "input"), ({"input": ["a", ""]}, "input"), ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"), ({"input": {"a": 1}}, "input"), ({"input": [5.5]}, "input"),
        ({"input": [VOCAB]}, "input"), ({"input": [-1]}, "input"), ({"input": [[3], [-1]]},
        "input"), ({"input": ["x"] * 1025}, "input"), ({"encoding_format": "x"}, "encoding_format"),
        ({"dimensions": 8}, "dimensions"), ({"pooling": "max"}, "pooling"),
        ({"normalize": False}, "normalize"), ({"messages": []}, "messages"),
        ({"max_tokens": 3}, "max_tokens"), ({"temperature": 1}, "temperature"),
        ({"prompt": "x"}, "prompt"), ({"stream": True}, "stream"), ({"odd": 1}, "odd"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"priority": 3}, "priority"),
        ({"request_id": "/"}, "request_id"), ({"cache_salt": ""}, "cache_salt"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: ServerThread, body: Any, param: str) -> None:
    before = len(server.engine.got)
    answer = server.http.post(PATH, json={"input": "x", **body})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert len(server.engine.got) == before, "the engine heard of it"


def test_neutral_values_pass(server: ServerThread) -> None:
    embed(server, dimensions=None, normalize=True, user="me", priority=0, embed_dtype="float32")


def test_a_prompt_beyond_the_context_gives_both_numbers(server: ServerThread) -> None:
    assert vectors(embed(server, [5] * (CONTEXT - 1)))[0][0] == CONTEXT - 1
    answer = server.http.post(PATH, json={"input": [[5], [5] * CONTEXT]})
    error = error_of(answer)
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].count(str(CONTEXT)) >= 2


def test_other_failures_keep_their_status(server: ServerThread) -> None:
    for body, status in (({"model": "other"}, 404), ({"input": "x" * (17 << 20)}, 413)):
        answer = server.http.post(PATH, json={"input": "x", **body})
        assert answer.status_code == status
        error_of(answer)
    answer = server.http.get(PATH)
    assert answer.status_code == 405 and error_of(answer)
    refusal = Refused(id="", message="too busy", status=429, retry_after_s=2.2)
    with serving(FakeEngine(refuse=refusal)) as busy:
        answer = busy.http.post(PATH, json={"input": ["a", "b"]})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert error_of(answer)["type"] == "rate_limit_error"


def test_the_number_of_inputs_is_the_operators() -> None:
    with serving(max_sequences=2) as server:
        embed(server, ["a", "b"])
        answer = server.http.post(PATH, json={"input": ["a", "b", "c"]})
        assert answer.status_code == 400 and "--max-sequences" in error_of(answer)["message"]


def test_who_leaves_is_aborted_and_an_id_names_one_open_call() -> None:
    engine = FakeEngine(paused=True)
    with serving(engine) as server:
        body = {"input": ["a", "b"], "request_id": "mine"}
        content = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}"
            first.sendall(head.encode() + b"\r\n\r\n" + content)
            wait_for(lambda: len(engine.requests()) == 2)
        wait_for(lambda: len(engine.aborts()) == 2)
        again = threading.Thread(target=lambda: server.http.post(PATH, json=body))
        again.start()
        wait_for(lambda: len(engine.requests()) == 4)  # the name is free again
        second = httpx.post(server.url + PATH, json=body, timeout=60)
        assert second.status_code == 409 and error_of(second)["param"] == "request_id"
        engine.paused = False
        again.join()


def test_calls_are_counted(server: ServerThread) -> None:
    def count(outcome: str) -> float:
        text = server.http.get("/metrics").text
        name = f'toque_calls_finished_total{{outcome="{outcome}"}} '
        return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))

    done, refused = count("success"), count("refused")
    embed(server, ["a", "b"])
    server.http.post(PATH, json={"input": []})
    assert (count("success"), count("refused")) == (done + 1, refused + 1)


# ------------------------------------------------------------------------- the real engine


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "3",
             "--max-model-len", "256", "--max-num-batched-tokens", "40")  # fmt: skip
    with serving_live(str(tiny_config), tmp_path_factory.mktemp("embed"), *flags) as live:
        yield live


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_openai_client_gets_the_engines_vectors(
    live: Live, tiny_config: Path, pooling: str
) -> None:
    """base64, which it asks for unless told otherwise, and plain numbers; more than there are rows,
    cut into chunks, with shared beginnings: as one prompt alone in this process gives them."""
    texts = [("a common beginning of some length " * 5)[: 20 + 20 * i] + str(i) for i in range(7)]
    llm = LLM(str(tiny_config), load_format="dummy", max_num_seqs=1, max_model_len=256)
    alone = np.concatenate([llm.embed(text, pooling) for text in texts])
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=60)
    extra = {"pooling": pooling}
    for _ in range(2):  # the second time much is in the cache
        packed = client.embeddings.create(model="tiny", input=texts, extra_body=extra)
        got = np.array([entry.embedding for entry in packed.data], dtype=np.float32)
        np.testing.assert_array_equal(got, alone)
        plain = client.embeddings.create(
            model="tiny", input=texts, encoding_format="float", extra_body=extra
        )
        written = np.array([entry.embedding for entry in plain.data], dtype=np.float32)
        np.testing.assert_array_equal(written, alone)
    assert packed.usage.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in texts)
    live.wait_idle()
