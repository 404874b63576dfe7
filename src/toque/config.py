"""What the user said, and what the engine runs with.

`EngineOptions` and `ServeOptions` hold what was said (None = decide for me); `resolve()` turns the
former into an `EngineConfig`, frozen and complete, or refuses with a sentence that says what to
change. Command-line flags, the `LLM` keywords and README's table all come from the fields here.

Owns: defaults and their limits. Knows: the model's structure and the machine's free memory.
Does not know: how any of it is used. Measured values (a prefill rate) come in as arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toque.errors import ConfigError
from toque.slo import slo_classes
from toque.types import ModelSpec, Slo


def option(default: Any, help: str, **extra: Any) -> Any:
    """A field that is also a flag: `max_num_seqs` is `--max-num-seqs`."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the user said about the engine. None means: decide for me."""

    max_model_len: int | None = option(
        None, "longest prompt + output, tokens (the model's context, or what fits the KV pool)"
    )
    max_num_seqs: int | None = option(None, "most sequences computed in one step (64)")
    max_num_batched_tokens: int | None = option(
        None, "most tokens computed in one step (about half a second of prefill, measured)"
    )
    enable_chunked_prefill: bool = option(True, "cut long prompts into chunks between decodes")
    enable_prefix_caching: bool = option(True, "share the KV pages of equal prompt beginnings")
    kv_cache_dtype: str = option(
        "auto",
        "auto (float16), float32, float16, bfloat16, int8, fp8_e4m3 or fp8 (the same)",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8"),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV pool, e.g. 2GiB (a share of the free memory)", size=True
    )
    block_size: int = option(16, "tokens per KV page")
    load_format: str = option(
        "auto", "auto, or dummy for random weights", choices=("auto", "dummy")
    )
    quantization: str | None = option(
        None,
        "int8 or int4: round the matrices of an unquantized model when it is loaded",
        choices=("int8", "int4"),
    )
    weight_cache: bool = option(True, "keep packed weights on disk for the next start")
    kernels: str = option(
        "auto", "auto (cpu), cpu (compiled) or ref (plain numpy)", choices=("auto", "cpu", "ref")
    )
    threads: int | None = option(None, "threads of the kernels (the physical cores)")
    scheduling_policy: str = option(
        "fcfs",
        "fcfs, priority (requests with a lower `priority` first) or slo (by classes of --slo)",
        choices=("fcfs", "priority", "slo"),
    )
    slo: tuple[str, ...] = option(
        (), "class of service, repeatable: NAME:ttft=500ms,itl=60ms,deadline=60s,else=downgrade"
    )
    slo_file: str | None = option(None, "file with one class of service a line, as in --slo")
    max_queue_requests: int | None = option(
        None, "most sequences that wait; more are refused with 429 (no limit)"
    )
    max_queue_tokens: int | None = option(
        None, "most prompt tokens that wait; more are refused with 429 (no limit)"
    )
    queue_timeout: float | None = option(
        None,
        "seconds a request may wait for its first step; then it gets 429 (no limit)",
    )
    record: str | None = option(None, "file for arrivals, step plans and times: `toque replay`")
    record_bytes: int = option(256 << 20, "size at which a recording ends, e.g. 1GiB", size=True)
    record_prompts: bool = option(False, "record the tokens of prompts and answers too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the user said about the HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    served_model_name: tuple[str, ...] = option(
        (), "name of the model in the API, repeatable (the name it was loaded by)"
    )
    seed: int | None = option(None, "seed of requests that bring none (a random one for each)")
    allowed_hosts: tuple[str, ...] = option(
        (), "further Host name that requests may carry, repeatable"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web origin that may call this server, repeatable"
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests get after SIGTERM")
    slow_reader_timeout: float = option(30.0, "seconds a client may leave its stream unread")
    read_timeout: float = option(60.0, "seconds a request may take to arrive, body included")
    api_key: tuple[str, ...] = option(
        (), "key(s) that clients must send, KEY or KEY:scope,… (also TOQUE_API_KEY)"
    )
    api_key_file: str | None = option(None, "file with one API key a line")
    ssl_certfile: str | None = option(None, "serve HTTPS with this certificate (chain), PEM")
    ssl_keyfile: str | None = option(None, "the certificate's private key, PEM")
    max_body_bytes: int = option(16 << 20, "largest request body, e.g. 16MiB", size=True)
    max_json_depth: int = option(64, "deepest nesting of a request body")
    max_sequences: int = option(1024, "most prompts x n of one request")
    max_stop_strings: int = option(16, "most stop strings of one request")
    max_logit_bias: int = option(1024, "most logit_bias entries of one request")
    metrics_compat: str = option(
        "none", "none, or vllm: /metrics has vLLM's names too", choices=("none", "vllm")
    )
    max_responses: int = option(4096, "most responses stored for /v1/responses")
    max_responses_bytes: int = option(
        256 << 20, "most memory of stored responses, e.g. 256MiB", size=True
    )
    allow_unknown_fields: bool = option(False, "ignore request fields that nobody knows")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: auto (told by its chat template), none, hermes, "
        "qwen3_coder, llama3_json or mistral",
        choices=("auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral"),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning: auto (told by its chat template), none, qwen3 or "
        "deepseek_r1 (both: <think>), or mistral ([THINK])",
        choices=("auto", "none", "qwen3", "deepseek_r1", "mistral"),
    )
    single_process: bool = option(False, "run the engine in the server's own process")
    data_parallel_size: int = option(1, "engines that share the requests, each with the model")
    prefill: int = option(0, "engines that only compute prompts; needs --decode")
    decode: int = option(0, "engines that take computed prompts and go on; needs --prefill")
    kv_transfer: str = option(
        "auto",
        "how pages travel between engines: auto (shm where it reaches, else tcp), shm or tcp",
        choices=("auto", "shm", "tcp"),
    )

    @property
    def engines(self) -> int:
        """How many engine processes."""
        return self.prefill + self.decode or self.data_parallel_size


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
    slo_classes(options.slo, options.slo_file)
    if options.block_size > 1024:
        raise ConfigError(f"--block-size is {options.block_size}: at most 1024 tokens per page")
    longest = reachable_context(model)
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {options.max_model_len} is beyond the {longest} tokens that "
            f"the model was made for: lower it to at most {longest}"
        )


def check_serve(options: ServeOptions, engine: EngineOptions) -> None:
    """Each value by itself. Raises ConfigError."""
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}: it must be between 0 and 65535")
    for name in ("slow_reader_timeout", "read_timeout"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0 seconds")
    if options.shutdown_timeout < 0:
        raise ConfigError("--shutdown-timeout must not be below 0 seconds")
    for name in ("max_responses", "max_responses_bytes"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be below 0")
    _check_engines(options)
    if options.engines > 1 and engine.record is not None:
        raise ConfigError("--record is of one engine: pages from others are not in a recording")
    for name in ("max_body_bytes", "max_json_depth", "max_sequences"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")


def _check_engines(options: ServeOptions) -> None:
    if options.data_parallel_size < 1 or min(options.prefill, options.decode) < 0:
        raise ConfigError("--data-parallel-size, --prefill and --decode count engines")
    if (options.prefill == 0) != (options.decode == 0):
        raise ConfigError("--prefill and --decode need each other: at least one engine of each")
    if options.prefill and options.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size counts engines that do both: give no --prefill")
    if options.engines > 1 and options.single_process:
        raise ConfigError("--single-process has one engine: give no number of engines")


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


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes: 1000000, 512MiB, 2GB, 2g. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi|)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])
