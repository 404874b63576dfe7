"""The OpenAPI document against the server, by schemathesis: bodies made from it, valid and not.

Whatever comes: no 5xx, no status, content type or key that the document does not name, nothing
accepted that it forbids, and the server lives.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.serve.live import Live, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
POSITIVE = schemathesis.GenerationMode.POSITIVE
NEGATIVE = schemathesis.GenerationMode.NEGATIVE
BODIES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings",
          "/tokenize", "/detokenize")  # fmt: skip
GETS = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items", "/v1/models",
        "/v1/models/{name}", "/health", "/ready", "/ping", "/load", "/version",
        "/metrics", "/v1/completions")  # fmt: skip


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A short context: what is asked for is short then."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-model-len", "64")
    with serving(str(tiny_config), tmp_path_factory.mktemp("openapi"), *flags) as live:
        yield live
        live.wait_idle()
        assert live.metric("toque_anomalies_total") == 0
        assert live.metric("toque_calls_finished_total", outcome="failed") == 0


@pytest.fixture(scope="module")
def document(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{live.url}/openapi.json", timeout=60).json()
    return found


def explore(
    live: Live, document: dict[str, Any], path: str, method: str, mode: Any, examples: int
) -> Counter[int]:
    """Send `examples` cases of one operation; the same ones every time. Returns the statuses."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=live.url)
    checks = schemathesis.checks
    wanted = ["not_a_server_error", "status_code_conformance", "content_type_conformance",
              "response_schema_conformance"]  # fmt: skip
    if mode is NEGATIVE:
        wanted.append("negative_data_rejection")
    found = [checks.CHECKS.get_one(name) for name in wanted]
    seen: Counter[int] = Counter()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(timeout=120)
        seen[answer.status_code] += 1
        case.validate_response(answer, checks=found)

    send()
    return seen


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_the_document_allows(live: Live, document: Any, path: str) -> None:
    """Not every one is good: token ids and lengths have limits that a schema cannot say."""
    seen = explore(live, document, path, "POST", POSITIVE, 40)
    assert sum(seen.values()) >= 20


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_the_document_forbids(live: Live, document: Any, path: str) -> None:
    seen = explore(live, document, path, "POST", NEGATIVE, 25)
    assert not seen.keys() & {200}


@pytest.mark.parametrize("path", GETS)
def test_routes_without_a_body(live: Live, document: Any, path: str) -> None:
    seen = explore(live, document, path, "GET", POSITIVE, 15)
    assert "{" in path or path == "/v1/completions" or set(seen) == {200}


@pytest.mark.long
@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
def test_many_bodies(live: Live, document: Any, path: str, mode: Any) -> None:
    explore(live, document, path, "POST", mode, 400)


# ---------------------------------------------------- answers, which strategies seldom reach


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "echo": True}),
        ("/v1/completions", {"prompt": [5, 6], "prompt_logprobs": 2, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "a", "stop": ["a", "e", "i"], "max_tokens": 40}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2,
                                  "logprobs": True, "top_logprobs": 2, "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
                                  "return_token_ids": True, "prompt_logprobs": 0}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": [[5], [6]], "encoding_format": "base64"}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a", "model": "other"}),
        ("/v1/completions", {"prompt": "a" * 100}),
        ("/v1/completions", {"prompt": "a" * (17 << 20)}),
    ],
)  # fmt: skip
def test_full_answers_have_the_documents_shape(live: Live, document: Any, path: str, body: Any
) -> None:  # fmt: skip
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=live.url)
    operation = schema[path]["POST"]
    answer = httpx.post(live.url + path, json=body, timeout=60)
    operation.validate_response(schemathesis.Response.from_httpx(answer, verify=False))
    assert answer.status_code < 500


def test_every_field_of_the_table_is_in_the_document(document: dict[str, Any]) -> None:
    from toque.serve.schema import RULES

    for body, rules in RULES.items():
        schema = document["components"]["schemas"][body.__name__]
        assert set(schema["properties"]) == {*body.model_fields, *rules}
        assert schema["additionalProperties"] is False


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= set(document["components"]["schemas"])
