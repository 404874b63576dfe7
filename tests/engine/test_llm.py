"""LLM: the engine in the caller's thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque import LLM, SamplingParams
from toque.errors import ConfigError, RequestError
from toque.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_config: Path) -> LLM:
    return LLM(str(tiny_config), load_format="dummy", max_num_seqs=4, max_model_len=256)


def test_many_prompts_come_back_in_order_and_as_if_alone(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in prompts]
    assert together == alone


def test_interleaved_streams_do_not_lose_each_others_events(llm: LLM) -> None:
    whole = [llm.generate(p, GREEDY)[0].outputs[0].text for p in ("a", "b")]
    first, second = llm.stream("a", GREEDY), llm.stream("b", GREEDY)
    begun = next(first)
    assert "".join(second) == whole[1]
    assert begun + "".join(first) == whole[0]


def test_a_stream_that_is_left_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream("left", SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate("x", GREEDY)
    llm.engine.core.scheduler.check()
    assert llm.engine.core.scheduler.load(0.0).held_pages == 0


def test_a_stop_string_ends_the_text_and_min_tokens_holds_it_back(llm: LLM) -> None:
    text = llm.generate("stop", GREEDY)[0].outputs[0].text
    needle = text[3:5]
    stopping = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(needle,))
    done = llm.generate("stop", stopping)[0].outputs[0]
    assert done.text == text[: text.index(needle)]
    assert done.finish_reason is FinishReason.STOP
    assert done.usage is not None
    assert done.usage.completion_tokens == len(done.token_ids)
    held = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop=(needle,), min_tokens=12
    )
    assert llm.generate("stop", held)[0].outputs[0].text == text


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="300 tokens, the context 256"):
        llm.generate([[5] * 10, [5] * 300], GREEDY)
    assert not llm.engine.core.scheduler.has_work


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0), "top_p"),
        (SamplingParams(top_p=1.5), "top_p"),
        (SamplingParams(logit_bias={-1: 100}), "vocabulary"),
        (SamplingParams(stop_token_ids=(99999,)), "vocabulary"),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_name(
    llm: LLM, params: SamplingParams, complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        llm.generate("x", params)


def test_n_choices_of_one_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("x", params)[0].outputs for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_model_len": -5}, "--max-model-len is -5"),
        ({"max_model_len": 10**8}, "beyond the 512"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes is 0"),
    ],
)
def test_options_are_checked_before_anything_is_sized_by_them(
    tiny_config: Path, options: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM(str(tiny_config), load_format="dummy", **options)


def test_a_context_shorter_than_the_probe_works(tiny_config: Path) -> None:
    short = LLM(str(tiny_config), load_format="dummy", max_model_len=32)
    assert len(short.generate("x", GREEDY)[0].outputs[0].token_ids) == 12
