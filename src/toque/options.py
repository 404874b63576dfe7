"""What the user said: the flags of the commands, and whether they can be meant.

Command-line flags, the `LLM` keywords and README's table all come from the fields here; None means:
decide for me. `config.resolve()` turns EngineOptions into an `EngineConfig`, frozen and complete.

Owns: names, defaults, words of help, which choices exclude each other.
Knows: nothing of models or machines. Does not know: how any of it is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from toque.errors import ConfigError


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
    kv_cache_metrics: bool = option(False, "measure how long KV pages live and lie unused")
    kv_cache_metrics_sample: float = option(
        0.01, "share of the KV pages that --kv-cache-metrics watches"
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
    custom_histogram_buckets: str | None = option(
        None, 'other buckets for histograms of /metrics, JSON: {"NAME": [0.1, 1, 10], …}'
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
    engines: str | None = option(None, "engines elsewhere, HOST:PORT,…: see `toque engine`")
    secret_file: str | None = option(
        None, "file with the secret shared with engines elsewhere (also TOQUE_SECRET)"
    )

    @property
    def local_engines(self) -> int:
        """How many engine processes this server starts."""
        if self.engines is not None:
            return 0
        return self.prefill + self.decode or self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Flags of `toque engine`: an engine that servers on other hosts use."""

    listen: str = option("127.0.0.1:8001", "HOST:PORT where servers find the engine")
    role: str = option(
        "both",
        "both, prefill (only computes prompts) or decode (takes computed prompts and goes on)",
        choices=("both", "prefill", "decode"),
    )
    secret_file: str | None = option(
        None, "file with the secret that servers and engines share (also TOQUE_SECRET)"
    )
    kv_transfer: str = option(
        "auto",
        "how pages travel between engines: auto (shm where it reaches, else tcp), shm or tcp",
        choices=("auto", "shm", "tcp"),
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
    if options.engines is not None:
        _check_elsewhere(options, engine)
    if options.local_engines > 1:
        check_sharing(engine)
    for name in ("max_body_bytes", "max_json_depth", "max_sequences"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")


def check_sharing(engine: EngineOptions) -> None:
    """What an engine cannot do that shares pages with others. Raises ConfigError."""
    if engine.record is not None:
        raise ConfigError("--record is of one engine: pages from others are not in a recording")


def _check_engines(options: ServeOptions) -> None:
    if options.data_parallel_size < 1 or min(options.prefill, options.decode) < 0:
        raise ConfigError("--data-parallel-size, --prefill and --decode count engines")
    if (options.prefill == 0) != (options.decode == 0):
        raise ConfigError("--prefill and --decode need each other: at least one engine of each")
    if options.prefill and options.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size counts engines that do both: give no --prefill")
    if options.local_engines > 1 and options.single_process:
        raise ConfigError("--single-process has one engine: give no number of engines")
    if options.engines is None and options.secret_file is not None:
        raise ConfigError("--secret-file is for --engines: what this server starts it trusts")


OF_SERVER = ("load_format",)  # engine options that the server's side reads, too
OF_LOCAL = ("data_parallel_size", "prefill", "decode", "kv_transfer", "single_process")


def _check_elsewhere(options: ServeOptions, engine: EngineOptions) -> None:
    """With --engines, what is an engine's choice is made where the engine is started."""
    engine_names = [f.name for f in fields(engine) if f.name not in OF_SERVER]
    given = _changed(engine, EngineOptions(), engine_names)
    given += _changed(options, ServeOptions(), OF_LOCAL)
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} does nothing with --engines: give it to `toque "
            "engine`, where they are started"
        )
    for address in options.engines.split(",") if options.engines is not None else ():
        parse_address(address)


def _changed(options: object, defaults: object, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(options, name) != getattr(defaults, name)]


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and host == bare):
        raise ConfigError(f"{text!r} is no HOST:PORT (an IPv6 address is written [::1]:8001)")
    return bare, int(port)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes: 1000000, 512MiB, 2GB, 2g. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|m|g|ki|mi|gi|)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])
