"""Where the concrete classes meet: a checkpoint and options become an engine.

Everything else takes its collaborators as arguments. Used by the command line and by `LLM`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from toque import __version__
from toque.config import EngineConfig, Measured, check_ranges, free_memory_bytes, kv_dtype, resolve
from toque.engine import EngineCore, Executor
from toque.errors import ConfigError
from toque.files.checkpoint import Checkpoint, open_checkpoint
from toque.files.end_tokens import end_token_ids
from toque.files.known_tokens import known_tokens
from toque.files.progress import Meter, passing_progress
from toque.files.rates import RememberedRate
from toque.files.source_hash import SourceHash, source_files
from toque.files.weight_cache import WeightCache
from toque.ipc import EnginePort
from toque.kernels import machine, physical_cores, select
from toque.kernels.api import LayerKV, Ops, WeightSource
from toque.memory.manager import CacheManager
from toque.memory.pool import Epochs
from toque.memory.watch import PageWatch
from toque.model.cached_weights import CachedWeights
from toque.model.dense import DenseDecoder
from toque.model.quantize import QuantizedWeights, refuse_quantized
from toque.model.registry import load_model, model_spec
from toque.model.watched import Watched
from toque.model.weights import never_four_bits
from toque.options import EngineOptions
from toque.record.disguise import Disguise
from toque.record.recorder import RecordedExecutor, RecordedPort, Recorder, recorded_clock
from toque.record.tape import FORMAT, Header, Tape
from toque.scheduler.cost import StepCost
from toque.scheduler.policy import ByPriority, Fcfs, Policy
from toque.scheduler.queue import QueueLimits
from toque.scheduler.scheduler import Scheduler
from toque.scheduler.slo import BySlo
from toque.scheduler.step import Limits
from toque.structured.budgets import Budgets
from toque.structured.gate import Gate
from toque.structured.grammars import Grammars
from toque.structured.masks import Masks
from toque.types import Hello
from toque.worker.program import Program
from toque.worker.state import DeviceState
from toque.worker.worker import Worker, measure_prefill

if TYPE_CHECKING:
    from toque.disagg.order import Sharing
    from toque.disagg.sharing import SharedEngine

log = logging.getLogger(__name__)

PROBE_TOKENS = 32  # length of the prompt that measures the prefill rate


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is ready to step, and what it says of itself."""

    core: EngineCore
    hello: Hello
    config: EngineConfig
    model: DenseDecoder


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, before its KV pool exists."""

    checkpoint: Checkpoint
    model: DenseDecoder
    ops: Ops
    quantization: str = ""  # what --quantization did; "" = nothing
    cached: CachedWeights | None = None  # where the weights came from, if there is a cache
    rate: RememberedRate | None = None  # its prefill's on this machine, if anything is kept


def load(path: Path, options: EngineOptions) -> Loaded:
    """Read a checkpoint and pack its weights. Raises ModelError or ConfigError."""
    began_s = time.monotonic()
    hashed = _source_hash(path, options)  # before the files are opened
    checkpoint = open_checkpoint(path, options.load_format)
    ops = select(options.kernels, options.threads)
    spec = model_spec(checkpoint)
    check_ranges(options, spec)  # before anything is sized by them
    packer, quantization = _packer(checkpoint, ops, options)
    cached = None
    if hashed is not None and ops.packing is not None:
        cached = CachedWeights(packer, ops.packing, hashed, WeightCache(), quantization)
    longest = options.max_model_len or spec.context
    total_bytes = sum(tensor.stored.nbytes for tensor in checkpoint.tensors.values())
    with Meter(passing_progress(), total_bytes, "loading weights") as meter:
        source = Watched(cached or packer, meter.reach)
        model = load_model(checkpoint, spec, ops, longest, source)
    log.info(
        "weights: %s, %d layers, %.2f GB, %s, kernels %s, %.1f s",
        spec.architecture,
        spec.layers,
        model.weight_bytes / 1e9,
        "mapped as packed before" if cached and cached.is_found else "packed now",
        ops.name,
        time.monotonic() - began_s,
    )
    loaded = Loaded(checkpoint, model, ops, quantization, cached)
    return replace(loaded, rate=_remembered_rate(loaded, options))


def _source_hash(path: Path, options: EngineOptions) -> SourceHash | None:
    """None where packed weights are not kept."""
    if not options.weight_cache or options.load_format == "dummy":
        return None
    try:
        return SourceHash(source_files(path), WeightCache().sources)
    except OSError:
        return None  # opening the model says better what is wrong


def _packer(checkpoint: Checkpoint, ops: Ops, options: EngineOptions) -> tuple[WeightSource, str]:
    """What makes weights of tensors, and the name of what it does to them on the way."""
    if options.quantization is None:
        return ops, ""
    tensors = checkpoint.tensors.values()
    refuse_quantized(tensors, options.quantization, str(checkpoint.path))
    return QuantizedWeights(ops, options.quantization, never_four_bits()), options.quantization


def configure(loaded: Loaded, options: EngineOptions, memory_share: float = 1.0) -> EngineConfig:
    """Measure, then resolve."""
    spec, model = loaded.model.spec, loaded.model
    kv_specs = model.kv_specs(kv_dtype(options))
    bytes_per_token = sum(layer.bytes_per_token() for layer in kv_specs)
    measured = Measured(
        free_memory_bytes=int(_free_bytes(loaded) * memory_share),
        prefill_tokens_per_s=_prefill_rate(loaded, options),
    )
    config = resolve(options, spec, bytes_per_token, measured)
    log.info(
        "KV pool: %d pages of %d tokens, %s, %.2f GB of %.1f GB free; longest sequence %d tokens",
        config.total_pages,
        config.block_size,
        config.kv_cache_dtype,
        config.kv_cache_memory_bytes / 1e9,
        measured.free_memory_bytes / 1e9,
        config.max_model_len,
    )
    log.info(
        "step: up to %d tokens of up to %d sequences; prefill measured at %.0f tokens/s",
        config.max_num_batched_tokens,
        config.max_num_seqs,
        measured.prefill_tokens_per_s,
    )
    return config


def _free_bytes(loaded: Loaded) -> int:
    """The system calls the pages of a mapped file free, but each step reads them."""
    mapped_bytes = loaded.cached.mapped_bytes if loaded.cached else 0
    return max(0, free_memory_bytes() - mapped_bytes)


def _remembered_rate(loaded: Loaded, options: EngineOptions) -> RememberedRate | None:
    if not options.weight_cache or options.load_format == "dummy":
        return None
    threads = options.threads or physical_cores()
    what = (loaded.checkpoint.identity, loaded.quantization, loaded.ops.name, kv_dtype(options))
    return RememberedRate(WeightCache().rates, (machine(), str(threads), *what))


def _prefill_rate(loaded: Loaded, options: EngineOptions) -> float:
    """Tokens per second: as known from an earlier start of the same model on this machine, or
    measured now."""
    rate = loaded.rate
    if rate is None:
        return _measured_rate(loaded, options)
    return rate.known() or rate.remember(_measured_rate(loaded, options))


def correct_rate(rate: RememberedRate | None, cost: StepCost) -> None:
    """A first start beside other work measures too little; real prompts tell the next one."""
    seen = cost.prefill_tokens_per_s
    if rate is not None and seen is not None and rate.raise_to(seen):
        log.info("prefill was %.0f tokens/s of late: remembered for the next start", seen)


def _measured_rate(loaded: Loaded, options: EngineOptions) -> float:
    """Over a scratch pool that is dropped afterwards."""
    longest = options.max_model_len or loaded.model.spec.context
    tokens = min(PROBE_TOKENS, longest)
    pages = -(-tokens // options.block_size)
    specs = loaded.model.kv_specs(kv_dtype(options))
    kv = loaded.ops.kv_pages(specs, pages, options.block_size)
    worker = Worker(Program(loaded.model), DeviceState(1, pages, kv, loaded.ops.sampler(1)))
    return measure_prefill(worker, tokens, options.block_size)


def assemble(
    loaded: Loaded,
    config: EngineConfig,
    model_name: str,
    port: EnginePort,
    sharing: Sharing | None = None,
) -> Engine:
    """Put the boxes together."""
    spec = loaded.model.spec
    end_ids = end_token_ids(loaded.checkpoint)
    hello = _hello(loaded, config, model_name, end_ids)
    shared = None if sharing is None else _share(loaded, config, hello, sharing)
    epochs = None if shared is None else shared.pool.epochs
    scheduler, cost = schedule(config, spec.vocab_size, end_ids, epochs, _watch(config))
    grammars = Grammars()
    worker = worker_of(loaded, config, grammars, shared)
    if sharing is not None and shared is not None:
        port = shared.port(port, scheduler.cache)
        hello = structs.replace(hello, source=shared.source, role=sharing.role)
    openings = Openings(Gate(port, grammars), worker, time.monotonic)
    if config.record is not None:
        openings = recorded(openings, config, hello)
    at_rest = partial(correct_rate, loaded.rate, cost)
    core = EngineCore(scheduler, openings.executor, openings.port, cost, openings.clock, at_rest)
    if loaded.cached is not None:
        loaded.cached.keep()
    log.info("end of generation: token ids %s", ", ".join(map(str, end_ids)) or "none")
    return Engine(core, hello, config, loaded.model)


def worker_of(
    loaded: Loaded, config: EngineConfig, grammars: Grammars, shared: SharedEngine | None = None
) -> Worker:
    """The device's side of an engine, with its KV pages, which other engines may read."""
    kv_specs = loaded.model.kv_specs(config.kv_cache_dtype)
    if shared is None:
        kv = loaded.ops.kv_pages(kv_specs, config.total_pages, config.block_size)
    else:
        kv = [
            LayerKV(pages, layer, config.block_size)
            for pages, layer in zip(shared.pool.layers, kv_specs, strict=True)
        ]
    sampler = loaded.ops.sampler(config.max_num_seqs)
    state = DeviceState(config.max_num_seqs, config.max_pages_per_row, kv, sampler)
    known = known_tokens(loaded.checkpoint, loaded.model.spec.vocab_size)
    return Worker(Program(loaded.model), state, known, Budgets(Masks(grammars), grammars))


@dataclass(frozen=True, slots=True)
class Openings:
    """Where an engine meets the world: requests, a device, time."""

    port: EnginePort
    executor: Executor
    clock: Callable[[], float]


def recorded(inner: Openings, config: EngineConfig, hello: Hello) -> Openings:
    """The same, with all that passes through them written down. Raises ConfigError."""
    assert config.record is not None
    header = Header(
        format=FORMAT,
        model_name=hello.model_name,
        fingerprint=hello.fingerprint,
        vocab_size=hello.vocab_size,
        end_token_ids=hello.end_token_ids,
        config=msgspec.to_builtins(config),
        prompts=config.record_prompts,
    )
    tape = Tape(Path(config.record), config.record_bytes, header)
    words = "the tokens of prompts and answers too" if header.prompts else "no words"
    log.info("recording to %s, up to %.1f GB, %s", config.record, config.record_bytes / 1e9, words)
    disguise = None if header.prompts else Disguise(hello.vocab_size, hello.end_token_ids)
    recorder = Recorder(tape, disguise)
    return Openings(
        RecordedPort(inner.port, recorder, tape),
        RecordedExecutor(inner.executor, recorder),
        recorded_clock(recorder, inner.clock),
    )


def _share(loaded: Loaded, config: EngineConfig, hello: Hello, sharing: Sharing) -> SharedEngine:
    """Raises ConfigError: pages travel as parts of the prefix tree."""
    from toque.disagg.sharing import SharedEngine  # an engine alone needs none of it

    if not config.enable_prefix_caching:
        raise ConfigError("engines that share pages need --enable-prefix-caching")
    layers = [
        config.block_size * layer.bytes_per_token()
        for layer in loaded.model.kv_specs(config.kv_cache_dtype)
    ]
    layout = f"{hello.fingerprint}, pages of {config.block_size} tokens"
    return SharedEngine(sharing, layers, config.total_pages, layout)


def _watch(config: EngineConfig) -> PageWatch | None:
    """With a clock of its own: a recording has the moments that a plan depends on, not these."""
    share = config.watched_pages_share
    return PageWatch(time.monotonic, share) if share else None


def schedule(
    config: EngineConfig,
    vocab_size: int,
    end_ids: tuple[int, ...],
    epochs: Epochs | None = None,
    watch: PageWatch | None = None,
) -> tuple[Scheduler, StepCost]:
    """All of an engine that needs no model; the cost model is the scheduler's and the loop's."""
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        chunked_prefill=config.enable_chunked_prefill,
        end_token_ids=frozenset(end_ids),
        queue=QueueLimits(
            config.max_queue_requests, config.max_queue_tokens, config.queue_timeout_s
        ),
    )
    cost = StepCost(config.prefill_tokens_per_s)
    page_worth = partial(cost.page_worth, block_size=config.block_size)
    cache = CacheManager(
        config.total_pages,
        config.block_size,
        config.enable_prefix_caching,
        page_worth,
        epochs,
        watch,
    )
    policy = policy_named(config.scheduling_policy, cost)
    return Scheduler(limits, cache, policy, cost), cost


def policy_named(name: str, cost: StepCost) -> Policy:
    """The policy of `--scheduling-policy`."""
    if name == "slo":
        return BySlo(cost.prompt_ms, lambda: cost.error)
    return ByPriority() if name == "priority" else Fcfs()


def _hello(
    loaded: Loaded, config: EngineConfig, model_name: str, end_ids: tuple[int, ...]
) -> Hello:
    model = "-".join(filter(None, (loaded.checkpoint.identity[:12], loaded.quantization)))
    return Hello(
        model_name=model_name,
        vocab_size=loaded.model.spec.vocab_size,
        max_model_len=config.max_model_len,
        end_token_ids=end_ids,
        block_size=config.block_size,
        total_pages=config.total_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
        scheduling_policy=config.scheduling_policy,
        slo_classes=config.slo_classes,
        model_identity=loaded.checkpoint.identity,
        prefill_tokens_per_s=config.prefill_tokens_per_s,
        fingerprint=f"toque-{__version__}-{model}-{loaded.ops.name}-{config.kv_cache_dtype}",
    )


def build_engine(
    path: Path,
    model_name: str,
    options: EngineOptions,
    port: EnginePort,
    sharing: Sharing | None = None,
    memory_share: float = 1.0,
) -> Engine:
    """Checkpoint to engine in one go; its hello says how long each phase took. `memory_share`: of
    the free memory, for this engine."""
    moments_s = [time.monotonic()]
    loaded = load(path, options)
    moments_s.append(time.monotonic())
    config = configure(loaded, options, memory_share)
    moments_s.append(time.monotonic())
    engine = assemble(loaded, config, model_name, port, sharing)
    moments_s.append(time.monotonic())
    took_s = [end - start for start, end in pairwise(moments_s)]
    startup_s = dict(zip(("weights", "measure", "kv_pool"), took_s, strict=True))
    return replace(
        engine, hello=structs.replace(engine.hello, startup_s=startup_s, pid=os.getpid())
    )
