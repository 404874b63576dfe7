"""Clients of others against the running server; and what harnesses rely on, without one.

scripts/install-test-tools.sh installs them last; where it could not, these tests say so and are
skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.serve.live import Live, serving
from toque import LLM, SamplingParams

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
    assert [answer.content for answer in model.batch([QUESTION] * 3)] == [text] * 3


def test_langchains_embeddings(live: Live) -> None:
    """check_embedding_ctx_length False: otherwise it sends ids of a tokenizer of OpenAI's."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.OpenAIEmbeddings(
        base_url=f"{live.url}/v1", api_key="x", model="smollm2", check_embedding_ctx_length=False
    )
    cat, kitten, tax = np.array(model.embed_documents(["a cat", "a kitten", "the tax office"]))
    assert cat @ kitten > cat @ tax
    np.testing.assert_array_equal(cat, model.embed_query("a cat"))


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
        vector = litellm.embedding(
            model="openai/smollm2", api_base=asked["api_base"], api_key="x", input=[QUESTION]
        ).data[0]["embedding"]
    assert "Paris" in text and streamed == text
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


# ------------------------------------------------------------------------------ evaluation

CAPITALS = (
    {"country": "France", "choices": ["Paris", "banana", "seven"], "label": 0},
    {"country": "Germany", "choices": ["purple", "Berlin", "run away"], "label": 1},
    {"country": "Italy", "choices": ["a", "12", "Rome"], "label": 2},
)
TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_lm_eval_scores_a_task(live: Live, smollm2_path: Path, tmp_path: Path) -> None:
    """The harness itself, without a hub: its own task file, and the tokenizer of the model's file.
    Each choice's loglikelihood is what this process computes from the prompt's logprobs."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        tokenizer = AutoTokenizer.from_pretrained(
            str(smollm2_path.parent), gguf_file=smollm2_path.name
        )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "capitals.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in CAPITALS))
    (tmp_path / "capitals.yaml").write_text(TASK.format(data=data))
    arguments = {
        "model": "smollm2",
        "base_url": f"{live.url}/v1/completions",
        "tokenizer": str(tmp_path / "tokenizer"),
        "num_concurrent": "3",
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args",
               ",".join(f"{name}={value}" for name, value in arguments.items()), "--tasks",
               "capitals", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
               "--log_samples"]  # fmt: skip
    ended = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == 1.0
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    llm = LLM(str(smollm2_path), max_num_seqs=4, max_model_len=64, kv_cache_memory_bytes=32 << 20)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(CAPITALS)
    for line in lines:
        for choice, (response,) in zip(line["doc"]["choices"], line["resps"], strict=True):
            score, greedy = response
            expected, best = loglikelihood(llm, line["doc"]["country"], choice)
            assert float(score) == pytest.approx(expected, abs=1e-4)
            assert str(greedy) == str(best)


def loglikelihood(llm: LLM, country: str, choice: str) -> tuple[float, bool]:
    """The sum over the choice's tokens, and whether each was the likeliest."""
    context = llm.tokenizer.encode(f"The capital of {country} is")
    ids = llm.tokenizer.encode(f"The capital of {country} is {choice}")
    assert ids[: len(context)] == context
    sampling = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate(ids, sampling)
    scores = output.prompt_logprobs[len(context) - 1 :]
    return sum(score.chosen for score in scores), all(score.rank == 1 for score in scores)


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


def test_openais_async_client_and_its_stream_helper(live: Live) -> None:
    """Many calls at once, whole and streamed by the helper that puts deltas together: one text."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
            messages: Any = [{"role": "user", "content": QUESTION}]

            async def whole() -> str:
                answer = await client.chat.completions.create(
                    model="smollm2", messages=messages, max_tokens=12, temperature=0
                )
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                async with client.chat.completions.stream(
                    model="smollm2", messages=messages, max_tokens=12, temperature=0
                ) as events:
                    completion = await events.get_final_completion()
                return completion.choices[0].message.content or ""

            return list(await asyncio.gather(*(whole() for _ in range(4)), streamed(), streamed()))

    texts = asyncio.run(ask())
    assert len(texts) == 6 and "Paris" in texts[0]
    assert set(texts) == {texts[0]}


def test_a_huge_prompt_does_not_stop_other_streams(live: Live) -> None:
    """200,000 tokens are counted in a thread and refused with both numbers; a stream that runs
    goes on meanwhile."""
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x")
    huge = "The quick brown fox jumps over the lazy dog again. " * 20_000
    refusal: list[openai.BadRequestError] = []

    def post() -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="smollm2", prompt=huge, max_tokens=1)
        refusal.append(caught.value)

    options: Any = {"ignore_eos": True}
    stream = client.completions.create(
        model="smollm2", prompt="Count:", max_tokens=900, stream=True, extra_body=options
    )
    next(stream)
    posting = threading.Thread(target=post)
    posting.start()
    meanwhile = 0
    for _ in stream:
        meanwhile += not refusal
        if refusal:
            break
    stream.close()
    posting.join(120)
    assert meanwhile >= 1
    numbers = [int(word) for word in re.findall(r"\d+", refusal[0].message)]
    assert max(numbers) > 200_000 and 1024 in numbers, refusal[0].message
