"""`toque replay`: run a recording through the scheduler again and compare every plan."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from toque.build import load, schedule, worker_of
from toque.config import EngineConfig
from toque.engine import EngineCore
from toque.errors import ConfigError
from toque.options import EngineOptions
from toque.record.disguise import HIDDEN_VOCAB
from toque.record.replay import Difference, Replay
from toque.record.tape import Header, read
from toque.structured.grammars import Grammars
from toque.worker.worker import Worker


def replay(path: str, model: str | None) -> int:
    """0: the same plans (and tokens); 1: something differs, and the first difference is shown."""
    header, turns = read(Path(path))
    config = msgspec.convert(header.config, EngineConfig)
    device = _device(header, config, model) if model is not None else None
    vocab_size = header.vocab_size if header.prompts else HIDDEN_VOCAB
    scheduler, cost = schedule(config, vocab_size, header.end_token_ids)
    again = Replay(turns, device)
    core = EngineCore(scheduler, again, again, cost, again.clock)
    print(f"{path}: {header.fingerprint}, {'real' if header.prompts else 'disguised'} tokens")
    try:
        while not again.over:
            core.step()
            again.finish_turn()
    except Difference as difference:
        print(f"the plans differ at {difference}", file=sys.stderr)
        return 1
    counters = scheduler.counters()
    print(
        f"{again.turns} turns, {again.steps} steps: the same plans; {counters.generation_tokens} "
        f"tokens, {counters.preemptions} preemptions, cost model off by {cost.error:.1%}"
    )
    if device is None:
        return 0
    same = again.tokens - again.differing_tokens
    print(f"computed on {model}: {same} of {again.tokens} tokens are the same")
    return int(again.differing_tokens > 0)


def _device(header: Header, config: EngineConfig, model: str) -> Worker:
    if not header.prompts:
        raise ConfigError(
            "--model needs the real tokens: this recording has none, --record-prompts keeps them"
        )
    from toque.files.fetch import locate

    options = EngineOptions(
        max_model_len=config.max_model_len,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
    )
    loaded = load(locate(model).path, options)
    if loaded.model.spec.vocab_size != header.vocab_size:
        raise ConfigError(
            f"{model} has {loaded.model.spec.vocab_size} tokens, the recorded model had "
            f"{header.vocab_size}: it is another one"
        )
    return worker_of(loaded, config, Grammars())
