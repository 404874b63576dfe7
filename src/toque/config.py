"""What the engine runs with: what the user said, completed by the model and the machine.

`resolve()` turns `EngineOptions` into an `EngineConfig`, frozen and complete, or refuses with a
sentence that says what to change.

Owns: defaults that depend on the model or the machine, and their limits. Knows: the model's
structure and the machine's free memory. Does not know: how any of it is used. Measured values (a
prefill rate) come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toque.errors import ConfigError
from toque.options import EngineOptions
from toque.slo import slo_classes
from toque.types import ModelSpec, Slo

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_STEP_S = 0.5  # a step of pure prefill takes about this long
MIN_BATCHED_TOKENS, MAX_BATCHED_TOKENS = 64, 8192
DEFAULT_KV_SHARE = 0.25  # of the memory that is free once the weights are loaded
DEFAULT_KV_BYTES_MAX = 4 << 30
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What this machine was found to have and to do, after the weights were loaded."""

    free_memory_bytes: int
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs with: complete, consistent, never changed."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    kv_cache_dtype: str
    kv_bytes_per_token: int
    block_size: int
    total_pages: int
    scheduling_policy: str = "fcfs"
    slo_classes: tuple[Slo, ...] = ()
    max_queue_requests: int | None = None
    max_queue_tokens: int | None = None
    queue_timeout_s: float | None = None
    record: str | None = None
    record_bytes: int = 0
    record_prompts: bool = False
    watched_pages_share: float = 0.0  # whose lives are measured; 0 = none
    prefill_tokens_per_s: float = 100.0  # as measured at start: the cost model begins with it

    @property
    def kv_cache_memory_bytes(self) -> int:
        return self.total_pages * self.block_size * self.kv_bytes_per_token

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)


def kv_dtype(options: EngineOptions) -> str:
    """The type that pages have: `auto` and `fp8` are other names."""
    return {"auto": "float16", "fp8": "fp8_e4m3"}.get(
        options.kv_cache_dtype, options.kv_cache_dtype
    )


def resolve(
    options: EngineOptions, model: ModelSpec, kv_bytes_per_token: int, measured: Measured
) -> EngineConfig:
    """Fill in what was left open; refuse what cannot work (ConfigError)."""
    check_ranges(options, model)
    page_bytes = options.block_size * kv_bytes_per_token
    given_bytes = options.kv_cache_memory_bytes
    total_pages = (given_bytes or _default_pool_bytes(measured)) // page_bytes
    max_model_len = _model_len(options, model, total_pages, page_bytes)
    max_num_seqs = options.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    if given_bytes is None:  # all rows at full length, and as much again to remember prefixes
        full_pages = max_num_seqs * -(-max_model_len // options.block_size)
        total_pages = min(total_pages, 2 * full_pages)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_step_tokens(options, max_num_seqs, max_model_len, measured),
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=options.enable_prefix_caching,
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        kv_cache_dtype=kv_dtype(options),
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=options.block_size,
        total_pages=total_pages,
        scheduling_policy=options.scheduling_policy,
        slo_classes=slo_classes(options.slo, options.slo_file),
        max_queue_requests=options.max_queue_requests,
        max_queue_tokens=options.max_queue_tokens,
        queue_timeout_s=options.queue_timeout,
        record=options.record,
        record_bytes=options.record_bytes,
        record_prompts=options.record_prompts,
        watched_pages_share=options.kv_cache_metrics_sample if options.kv_cache_metrics else 0.0,
    )


def check_ranges(options: EngineOptions, model: ModelSpec) -> None:
    """Each value by itself. Raises ConfigError."""
    counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "threads")
    queue = ("max_queue_requests", "max_queue_tokens", "record_bytes")
    for name in (*counts, *queue, "kv_cache_memory_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    if options.queue_timeout is not None and options.queue_timeout <= 0:
        raise ConfigError("--queue-timeout must be above 0 seconds")
    _check_watched(options)
    slo_classes(options.slo, options.slo_file)
    if options.block_size > 1024:
        raise ConfigError(f"--block-size is {options.block_size}: at most 1024 tokens per page")
    longest = reachable_context(model)
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {options.max_model_len} is beyond the {longest} tokens that "
            f"the model was made for: lower it to at most {longest}"
        )


def _check_watched(options: EngineOptions) -> None:
    share = options.kv_cache_metrics_sample
    if not 0 < share <= 1:
        raise ConfigError("--kv-cache-metrics-sample must be above 0 and at most 1")
    if share != EngineOptions().kv_cache_metrics_sample and not options.kv_cache_metrics:
        raise ConfigError("--kv-cache-metrics-sample does nothing without --kv-cache-metrics")


def reachable_context(model: ModelSpec) -> int:
    """Tokens. `context` is what is used unless told otherwise; linear and dynamic rotary scaling
    reach further by their factor, at some cost in quality, so only on demand."""
    if model.rope.kind in ("linear", "dynamic"):
        return int(model.context * model.rope.parameters.get("factor", 1.0))
    return model.context


def _default_pool_bytes(measured: Measured) -> int:
    return min(int(measured.free_memory_bytes * DEFAULT_KV_SHARE), DEFAULT_KV_BYTES_MAX)


def _model_len(options: EngineOptions, model: ModelSpec, total_pages: int, page_bytes: int) -> int:
    """The longest sequence; one of that length always fits the pool."""
    fits_tokens = total_pages * options.block_size
    if fits_tokens < 2:
        raise ConfigError(
            f"the KV pool of {total_pages * page_bytes:,} bytes does not hold one page of "
            f"{page_bytes:,} bytes: raise --kv-cache-memory-bytes"
        )
    wanted = options.max_model_len
    if wanted is None:
        return min(model.context, fits_tokens)
    if wanted > fits_tokens:
        needed_bytes = -(-wanted // options.block_size) * page_bytes
        raise ConfigError(
            f"one sequence of --max-model-len {wanted} needs {needed_bytes:,} bytes of KV and the "
            f"pool has {total_pages * page_bytes:,}: raise --kv-cache-memory-bytes or lower "
            f"--max-model-len to at most {fits_tokens}"
        )
    return wanted


def _step_tokens(
    options: EngineOptions, max_num_seqs: int, max_model_len: int, measured: Measured
) -> int:
    """The token budget of a step."""
    given = options.max_num_batched_tokens
    if given is not None and given < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {given} is below --max-num-seqs {max_num_seqs}: a step "
            f"could not give every running sequence its token; raise the former or lower the latter"
        )
    if given is not None and not options.enable_chunked_prefill and given < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs a step that holds a whole prompt: raise "
            f"--max-num-batched-tokens from {given} to at least {max_model_len}, or lower "
            f"--max-model-len"
        )
    if given is not None:
        return given
    if not options.enable_chunked_prefill:
        return max(max_model_len, max_num_seqs)
    budget = int(measured.prefill_tokens_per_s * DEFAULT_STEP_S) // 16 * 16
    return max(max_num_seqs, min(max(budget, MIN_BATCHED_TOKENS), MAX_BATCHED_TOKENS))


def free_memory_bytes() -> int:
    """What this process may still take: MemAvailable, or what its control group leaves. Cached
    files count as used in a group's figure, though they make room when memory is asked for."""
    available = _meminfo_bytes("MemAvailable")
    limit = _read_int(CGROUP / "memory.max")
    used = _read_int(CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used + _cgroup_cache_bytes(), 0))
    return available


def _cgroup_cache_bytes() -> int:
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(maxsplit=1) for line in lines)
    return int(stat.get("inactive_file", 0))


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo has no {key}: give --kv-cache-memory-bytes")


def _read_int(path: Path) -> int | None:
    """The number in a one-line file; None where there is no file or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
