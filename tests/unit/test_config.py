"""What the user said becomes a complete configuration, or a sentence that says what to change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cli import _options, parser
from toque.config import Measured, reachable_context, resolve
from toque.errors import ConfigError
from toque.options import EngineOptions, ServeOptions, check_serve, parse_size
from toque.types import ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="qwen2",
    vocab_size=1000,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    rms_eps=1e-6,
    rope=RopeSpec(),
    context=2048,
)
BYTES_PER_TOKEN = 512
MACHINE = Measured(free_memory_bytes=1 << 30, prefill_tokens_per_s=1000.0)


def config(**options: Any) -> Any:
    return resolve(EngineOptions(**options), SPEC, BYTES_PER_TOKEN, MACHINE)


def test_nothing_said_gives_the_models_context_and_half_a_second_of_prefill() -> None:
    got = config()
    assert got.max_model_len == 2048
    assert 0.5 * 0.9 <= got.max_num_batched_tokens / 1000.0 <= 0.5
    assert got.total_pages * got.block_size >= got.max_model_len


def test_a_small_pool_lowers_the_context_unless_it_was_given() -> None:
    assert config(kv_cache_memory_bytes=1000 * BYTES_PER_TOKEN).max_model_len == 992
    with pytest.raises(ConfigError, match=r"needs 524,288 bytes .* pool has 507,904"):
        config(kv_cache_memory_bytes=1000 * BYTES_PER_TOKEN, max_model_len=1024)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-seqs 16"),
        ({"max_model_len": 4096}, "2048 tokens that the model was made for"),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, "at least 2048"),
        ({"kv_cache_memory_bytes": 100}, "raise --kv-cache-memory-bytes"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"block_size": 4096}, "at most 1024"),
        ({"kv_cache_metrics_sample": 0.0}, "--kv-cache-metrics-sample"),
        ({"kv_cache_metrics_sample": 1.5}, "--kv-cache-metrics-sample"),
        ({"kv_cache_metrics_sample": 0.5}, "nothing without --kv-cache-metrics"),
        ({"kv_cache_metrics_sample": float("nan")}, "--kv-cache-metrics-sample"),
    ],
)
def test_the_impossible_is_refused_with_the_way_out(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(**options)


@given(
    st.integers(1, 128),
    st.none() | st.integers(1, 2048),
    st.none() | st.integers(1, 100),
    st.none() | st.integers(10_000, 10_000_000),
    st.booleans(),
)
def test_whatever_is_accepted_can_make_progress(
    block: int, length: int | None, seqs: int | None, pool: int | None, chunked: bool
) -> None:
    """One sequence of max_model_len fits the pool, and each running one can get its token."""
    try:
        got = config(
            block_size=block,
            max_model_len=length,
            max_num_seqs=seqs,
            kv_cache_memory_bytes=pool,
            enable_chunked_prefill=chunked,
        )
    except ConfigError:
        return
    assert got.total_pages * got.block_size >= got.max_model_len
    assert got.max_num_batched_tokens >= got.max_num_seqs
    assert chunked or got.max_num_batched_tokens >= got.max_model_len
    assert length is None or got.max_model_len == length


def test_rotary_scaling_reaches_further_only_on_demand() -> None:
    rope = RopeSpec(kind="dynamic", parameters={"factor": 4.0})
    spec = msgspec.structs.replace(SPEC, rope=rope)
    assert reachable_context(spec) == 8192
    assert resolve(EngineOptions(), spec, BYTES_PER_TOKEN, MACHINE).max_model_len == 2048
    longer = EngineOptions(max_model_len=8192)
    assert resolve(longer, spec, BYTES_PER_TOKEN, MACHINE).max_model_len == 8192


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("1k", 1000), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("3GB", 3 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1x", "1 GiBs"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_flags_and_fields_are_the_same_thing() -> None:
    """Every field can be set from the command line, and an unknown flag is an error."""
    line = (
        "serve smollm2 --max-num-seqs 7 --no-enable-chunked-prefill --kv-cache-memory-bytes 2GiB "
        "--kv-cache-dtype float16 --port 9 --served-model-name a --served-model-name b "
        "--shutdown-timeout 1.5"
    )
    arguments = parser().parse_args(line.split())
    engine, serve = _options(EngineOptions, arguments), _options(ServeOptions, arguments)
    assert engine == EngineOptions(
        max_num_seqs=7,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=2 << 30,
        kv_cache_dtype="float16",
    )
    assert serve == ServeOptions(port=9, served_model_name=("a", "b"), shutdown_timeout=1.5)
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--no-such-flag"])


def test_other_names_of_kv_types() -> None:
    assert config().kv_cache_dtype == "float16"
    assert config(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
    for dtype in ("float32", "float16", "bfloat16", "int8", "fp8_e4m3"):
        assert config(kv_cache_dtype=dtype).kv_cache_dtype == dtype
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--kv-cache-dtype", "fp4"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefill": 1}, "need each other"),
        ({"prefill": 1, "decode": 1, "data_parallel_size": 2}, "give no --prefill"),
        ({"data_parallel_size": 2, "single_process": True}, "--single-process has one engine"),
        ({"data_parallel_size": 0}, "count engines"),
    ],
)
def test_engines_that_cannot_be_together(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_serve(ServeOptions(**options), EngineOptions())


def test_a_recording_is_of_one_engine() -> None:
    check_serve(ServeOptions(), EngineOptions(record="file"))
    with pytest.raises(ConfigError, match="--record is of one engine"):
        check_serve(ServeOptions(data_parallel_size=2), EngineOptions(record="file"))
