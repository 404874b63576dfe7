"""Structured output from outside, on a real model: what clients of OpenAI and vLLM ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.serve.live import Live, serving
from tests.structured.schemas import ENFORCED, record
from tests.structured.test_grammars import HOSTILE
from tests.structured.test_schemas import check
from toque.llm import LLM
from toque.types import FinishReason, Grammar, GrammarKind, SamplingParams

CHAT = "/v1/chat/completions"
PERSON = record(
    name={"type": "string", "maxLength": 20}, age={"type": "integer", "minimum": 0, "maximum": 130}
)


@pytest.fixture(scope="module")
def live(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("structured")
    with serving("smollm2", folder, "--max-model-len", "1024") as live:
        yield live
        live.wait_idle()
        assert live.metric("toque_anomalies_total") == 0


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=120) as http:
        yield http


def ask(http: httpx.Client, content: str = "Name a person.", **extra: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 80, "seed": 1}
    answer = http.post(CHAT, json={**body, **extra})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.parametrize("strict", [True, False])
def test_json_schema(http: httpx.Client, strict: bool) -> None:
    """Strict or not, the schema is kept to."""
    for choice in ask(http, n=3, response_format=schema_format(PERSON, strict=strict)):
        assert choice["finish_reason"] == "stop"
        check(PERSON, json.loads(choice["message"]["content"]))


def test_json_object(http: httpx.Client) -> None:
    for choice in ask(http, n=3, temperature=0.5, response_format={"type": "json_object"}):
        text, cut = choice["message"]["content"], choice["finish_reason"] == "length"
        assert text.startswith("{") and (cut or isinstance(json.loads(text), dict))


def test_structured_outputs(http: httpx.Client) -> None:
    def texts(**one: Any) -> list[str]:
        choices = ask(http, n=3, structured_outputs=one)
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        return [choice["message"]["content"] for choice in choices]

    for text in texts(json=PERSON) + texts(json=json.dumps(PERSON)):
        check(PERSON, json.loads(text))
    assert all(re.fullmatch("[A-Z]{3}-[0-9]{4}", t) for t in texts(regex="[A-Z]{3}-[0-9]{4}"))
    assert set(texts(choice=["Ada", "Grace", "你好"])) <= {"Ada", "Grace", "你好"}
    made = texts(grammar='start: "I am " NAME "."\nNAME: /[A-Z][a-z]{1,8}/')
    assert all(re.fullmatch(r"I am [A-Z][a-z]{1,8}\.", text) for text in made)
    body = {"prompt": "2 + 2 =", "max_tokens": 9, "structured_outputs": {"regex": " [0-9]+"}}
    answer = http.post("/v1/completions", json=body)
    assert re.match(" [0-9]+", answer.json()["choices"][0]["text"])


def test_a_stream_carries_the_same_text(http: httpx.Client) -> None:
    form = {"response_format": schema_format(PERSON), "logprobs": True, "temperature": 0.7}
    whole = ask(http, **form)[0]
    body = {"messages": [{"role": "user", "content": "Name a person."}], "max_tokens": 80,
            "seed": 1, "stream": True, **form}  # fmt: skip
    with http.stream("POST", CHAT, json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line and line != "data: [DONE]"]
    choices = [json.loads(line)["choices"][0] for line in lines if json.loads(line)["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    spelled = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert spelled.decode() == whole["message"]["content"]


def test_how_answers_are_cut(http: httpx.Client) -> None:
    form = {"response_format": schema_format(PERSON), "temperature": 0}
    assert ask(http, **{**form, "max_tokens": 3})[0]["finish_reason"] == "length"
    stopped = ask(http, stop='"age"', **form)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", '"age"')
    assert '"age"' not in stopped["message"]["content"]
    late = ask(http, min_tokens=70, **form)[0]
    check(PERSON, json.loads(late["message"]["content"]))


def test_what_excludes_each_other(http: httpx.Client) -> None:
    for param, body in (
        ("ignore_eos", {"ignore_eos": True}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ):
        body |= {"messages": [{"role": "user", "content": "x"}]}
        answer = http.post(CHAT, json={**body, "response_format": {"type": "json_object"}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}
    assert "structured_outputs.regex" in http.post(CHAT, json=body).text


def test_a_contradiction_fails_that_request_alone(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["yes"]},
            "allowed_token_ids": [500]}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert "forbids every token" in answer.json()["error"]["message"]
    assert ask(http, structured_outputs={"choice": ["yes"]})[0]["message"]["content"] == "yes"


# ------------------------------------------------------------------------------- openai's client


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    name: str = Field(max_length=12, description='Never "none" or {x}.')
    age: int = Field(ge=0, lt=130)
    colour: Colour
    kind: Literal["friend", "foe"]
    nickname: str | None = Field(max_length=4)
    addresses: list[Address] = Field(max_length=1)


def test_openai_parse_with_pydantic(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x")
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Describe Ada as JSON."}],
        "response_format": Person,
        "temperature": 0.7,
        "max_tokens": 200,
        "seed": 3,
    }
    found = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(found.parsed, Person) and found.refusal is None
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == found.parsed
    client.close()


# ------------------------------------------------------------------------------------ the hostile


def test_hostile_grammars_change_nobody_else_s_answer(live: Live, http: httpx.Client) -> None:
    """Eight streams, four of them bound themselves, while everything hostile arrives at once."""
    good = [
        {"content": f"Count to {n}.", "temperature": 0.8, "seed": n, "max_tokens": 16,
         **({"response_format": schema_format(PERSON)} if n % 2 else {})}
        for n in range(8)
    ]  # fmt: skip
    quiet = [ask(http, **body)[0]["message"]["content"] for body in good]
    names = {GrammarKind.REGEX: "regex", GrammarKind.JSON_SCHEMA: "json"}
    forms = [{names.get(kind, "grammar"): text} for kind, text in HOSTILE.values()]

    def attack(form: dict[str, str]) -> int:
        body = {"prompt": "x", "max_tokens": 4, "structured_outputs": form}
        return httpx.post(f"{live.url}/v1/completions", json=body, timeout=120).status_code

    with ThreadPoolExecutor(8 + len(forms)) as pool:
        attacks = [pool.submit(attack, form) for form in forms]
        streams = [pool.submit(ask, http, **body) for body in good]
        loud = [stream.result()[0]["message"]["content"] for stream in streams]
        assert {a.result() for a in attacks} <= {200, 400, 500}
    assert loud == quiet


# --------------------------------------------------------------------------------------- schemas


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), max_model_len=1024, seed=0)


def outputs_are_valid(llm: LLM, name: str, seeds: int, max_tokens: int) -> int:
    """Temperature 1, one sequence per seed. How many ended; the others were cut."""
    schema = ENFORCED[name]
    prompt = f"Write JSON that matches this schema.\n{json.dumps(schema)}\n"
    sampling = SamplingParams(n=seeds, temperature=1.0, max_tokens=max_tokens)
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    ended = 0
    for output in llm.generate(prompt, sampling, grammar)[0].outputs:
        if output.finish_reason is FinishReason.STOP:
            check(schema, json.loads(output.text))
            ended += 1
    return ended


SOME = ("record", "unicode enum", "tagged union", "tree", "pattern and length", "date-time")


@pytest.mark.parametrize("name", SOME)
def test_outputs_of_a_real_model_are_valid(llm: LLM, name: str) -> None:
    assert outputs_are_valid(llm, name, seeds=3, max_tokens=60) > 0


# Members or digits without a limit, of which a small model finds no end.
ENDLESS = (
    *("anything", "any object", "number", "one bound", "bounds of numbers"),
    *("exclusive bounds of numbers", "open bound at zero", "open bounds elsewhere"),
    "keywords beside anyOf",
)


@pytest.mark.long
@pytest.mark.parametrize("name", ENFORCED)
def test_outputs_of_a_real_model_are_valid_for_every_schema(llm: LLM, name: str) -> None:
    ended = outputs_are_valid(llm, name, seeds=20, max_tokens=96)
    assert ended > 0 or name in ENDLESS, "nothing came to its end"


def test_the_oracle_would_notice() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(PERSON, {"name": "Ada", "age": 131})
