"""Clients of others, where they are installed; and what harnesses rely on, without one.

None of them is in the `test` extra: litellm and langchain-openai bring thirty packages, and lm-eval
brings pandas, pyarrow and scikit-learn. `pip install litellm langchain-openai` runs the first two.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import Live, serving

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def live(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("clients")
    flags = ("--served-model-name", "smollm2", "--max-model-len", "1024")
    with serving("smollm2", folder, *flags) as live:
        yield live


def test_langchain(live: Live) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="x", model="smollm2", max_tokens=12, temperature=0
    )
    text = model.invoke(QUESTION).content
    assert "Paris" in text
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == text


def test_litellm(live: Live) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        asked: dict[str, Any] = {
            "model": "openai/smollm2", "api_base": f"{live.url}/v1", "api_key": "x",
            "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0,
        }  # fmt: skip
        text = litellm.completion(**asked).choices[0].message.content
        chunks = litellm.completion(**asked, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text and streamed == text


def harness_score(live: Live, prompt: list[int], context: int) -> tuple[float, bool]:
    """As lm-eval's local-completions reads an answer: the sum over [context : -1], and greedy."""
    body = {"prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0,
            "seed": 1234}  # fmt: skip
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
    logprobs = answer["choices"][0]["logprobs"]
    values = logprobs["token_logprobs"][context:-1]
    best = logprobs["top_logprobs"][context:-1]
    assert len(values) == len(prompt) - context
    greedy = all(v == max(top.values()) for v, top in zip(values, best, strict=True))
    return sum(values), greedy


def test_a_harness_reads_the_scores_that_it_means(live: Live) -> None:
    def ids(text: str) -> list[int]:
        answer = httpx.post(f"{live.url}/tokenize", json={"prompt": text}, timeout=60)
        found: list[int] = answer.json()["tokens"]
        return found

    context = ids("The capital of France is")
    scores = {}
    for end in (" Paris", " banana"):
        prompt = context + ids(end)
        scores[end], greedy = harness_score(live, prompt, len(context))
        assert greedy == (end == " Paris")
        body = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0}
        own = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
        entries = own["choices"][0]["prompt_logprobs"]
        total = sum(entries[i][str(prompt[i])]["logprob"] for i in range(len(context), len(prompt)))
        assert scores[end] == pytest.approx(total, abs=1e-6)
    assert scores[" Paris"] > scores[" banana"] + 5
    # A prompt whose next token is an end token: its entry is the one that is cut off.
    ended = context + ids(" Paris.")
    assert len(ended) > 2
    harness_score(live, ended, len(context))
