"""The engine's totals as counters.

Owns: what was reported last. Knows: the fields of types.Counters and the names they are told under.
Does not know: what the numbers mean, who reports.

Totals are exported by difference, so an exposition adds up at every moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from prometheus_client import Counter

from toque.types import Counters, RefusalCause

# Field of types.Counters -> counter of the table, and the value of its label.
NAMES = {
    "steps": ("engine_steps", ""),
    "prompt_tokens": ("prompt_tokens", ""),
    "computed_tokens": ("computed_tokens", ""),
    "generation_tokens": ("generation_tokens", ""),
    "prefix_queries": ("prefix_cache_queries", ""),
    "prefix_hits": ("prefix_cache_hits", ""),
    "preemptions": ("num_preemptions", ""),
    "recomputed_tokens": ("recomputed_tokens", ""),
    "wasted_aborted_tokens": ("wasted_tokens", "aborted"),
    "wasted_stopped_tokens": ("wasted_tokens", "stopped"),
    "wasted_evicted_tokens": ("wasted_tokens", "evicted"),
    "wasted_failed_tokens": ("wasted_tokens", "failed"),
    "refused_invalid": ("admission_rejections", RefusalCause.INVALID),
    "refused_queue_requests": ("admission_rejections", RefusalCause.QUEUE_REQUESTS),
    "refused_queue_tokens": ("admission_rejections", RefusalCause.QUEUE_TOKENS),
    "refused_queue_timeout": ("admission_rejections", RefusalCause.QUEUE_TIMEOUT),
    "refused_slo": ("admission_rejections", RefusalCause.SLO),
    "downgraded": ("slo_downgraded", ""),
    "corrupted": ("corrupted_requests", ""),
    "moved_tokens": ("prompt_tokens_cached_by_source", "p2p"),
}
# Counters that are also told under other names.
ALSO = {
    "recomputed_tokens": (("wasted_tokens", "preempted"),),
    "prefix_hits": (("prompt_tokens_cached", ""), ("prompt_tokens_cached_by_source", "device")),
    "moved_tokens": (("prompt_tokens_cached", ""),),
}
BY_SOURCE = "prompt_tokens_by_source"


class EngineTotals:
    def __init__(self, counters: Mapping[str, Counter]) -> None:
        self.seen = Counters()
        self._counters = counters
        names = (*NAMES.values(), *chain.from_iterable(ALSO.values()))
        sources = [
            (BY_SOURCE, source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ]
        for name, label in (*names, *sources):  # all are there before the first report
            if label:
                counters[name].labels(label)

    def report(self, now: Counters) -> None:
        for field, target in NAMES.items():
            grown = self._grown(now, field)
            if grown > 0:
                for name, label in (target, *ALSO.get(field, ())):
                    self._inc(name, label, grown)
            elif grown < 0:  # never an error of the request whose report it came with
                self._counters["anomalies"].inc()
        self._sources(now)
        self.seen = now

    def _sources(self, now: Counters) -> None:
        """Prompts are told apart by where their tokens came from; the parts are the whole."""
        prompts = self._grown(now, "prompt_tokens")
        hits = min(prompts, self._grown(now, "prefix_hits"))  # some of the prompts'
        moved = min(prompts - hits, self._grown(now, "moved_tokens"))
        if prompts > 0 and min(hits, moved) >= 0:
            self._inc(BY_SOURCE, "local_cache_hit", hits)
            self._inc(BY_SOURCE, "external_kv_transfer", moved)
            self._inc(BY_SOURCE, "local_compute", prompts - hits - moved)

    def _grown(self, now: Counters, field: str) -> int:
        grown: int = getattr(now, field) - getattr(self.seen, field)
        return grown

    def _inc(self, name: str, label: str, amount: int) -> None:
        counter = self._counters[name]
        (counter.labels(label) if label else counter).inc(amount)
