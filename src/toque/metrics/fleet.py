"""Several engines in numbers: who is there, and what travelled between them.

Owns: what was reported last. Knows: FleetReport, names of metrics. Does not know: who sends it.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from toque.metrics.histogram import Histogram
from toque.types import FETCH_STAGES, Fetched, FleetReport, Kept, PageFault, Transfers

FATES = ("moved", "missing", "cached")


class FleetNumbers:
    def __init__(
        self,
        counters: Mapping[str, Counter],
        gauges: Mapping[str, Gauge],
        histograms: Mapping[str, Histogram],
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._seconds = histograms["kv_transfer_seconds"]
        self._restarts: dict[int, int] = {}  # by engine
        self._computed: dict[int, int] = {}  # by engine, tokens
        self._kept: dict[int, Kept] = {}  # by engine
        self._seen = Transfers()
        self._bytes = histograms["kv_transfer_size_bytes"]
        self._pages = histograms["kv_transfer_size_pages"]
        for fate in FATES:
            counters["kv_transfer_pages"].labels(fate)
        for stage in FETCH_STAGES:
            gauges["num_requests_kv_fetch_by_stage"].labels(stage)
        for fault in PageFault:
            counters["kv_transfer_failed_pages"].labels(fault)

    def report(self, report: FleetReport, block_size: int) -> None:
        for engine in report.engines:
            labels = (str(engine.index), engine.role)
            self._gauges["engine_up"].labels(*labels).set(engine.alive)
            self._gauges["engine_open_requests"].labels(*labels).set(engine.open_requests)
            self._gauges["engine_held_pages"].labels(*labels).set(engine.load.held_pages)
            computed = engine.computed_tokens - self._computed.get(engine.index, 0)
            self._computed[engine.index] = engine.computed_tokens
            self._counters["engine_computed_tokens"].labels(*labels).inc(computed)
            restarts = engine.restarts - self._restarts.get(engine.index, 0)
            self._restarts[engine.index] = engine.restarts
            self._counters["engine_restarts"].labels(*labels).inc(restarts)
            self._keeps(engine.index, labels, engine.kept)
        now, seen, self._seen = report.transfers, self._seen, report.transfers
        self._counters["moved_requests"].inc(now.moves - seen.moves)
        self._counters["kv_transfer_bytes"].inc(now.moved_bytes - seen.moved_bytes)
        for fate in FATES:
            grown = getattr(now, f"{fate}_pages") - getattr(seen, f"{fate}_pages")
            self._counters["kv_transfer_pages"].labels(fate).inc(grown)
        self._counters["kv_transfer_timeouts"].inc(now.timed_out - seen.timed_out)
        for fault in PageFault:
            grown = now.failed.get(fault, 0) - seen.failed.get(fault, 0)
            self._counters["kv_transfer_failed_pages"].labels(fault).inc(grown)
        for stage in FETCH_STAGES:
            waiting = report.stages.get(stage, 0)
            self._gauges["num_requests_kv_fetch_by_stage"].labels(stage).set(waiting)
        if report.last is not None:
            self._fetched(report.last, block_size)

    def _keeps(self, index: int, labels: tuple[str, str], kept: Kept) -> None:
        """What an engine keeps for others; its totals never decrease."""
        seen, self._kept[index] = self._kept.get(index, Kept()), kept
        self._gauges["engine_leases"].labels(*labels).set(kept.leases)
        self._gauges["engine_oldest_lease_seconds"].labels(*labels).set(kept.oldest_lease_s)
        ended = self._counters["engine_leases_ended"]
        ended.labels(*labels, "released").inc(kept.released - seen.released)
        ended.labels(*labels, "expired").inc(kept.expired - seen.expired)
        discarded = kept.discarded_pages - seen.discarded_pages
        self._counters["kv_transfer_discarded_pages"].inc(discarded)
        rejected = kept.rejected_peers - seen.rejected_peers
        self._counters["engine_rejected_peers"].labels(*labels).inc(rejected)

    def _fetched(self, fetched: Fetched, block_size: int) -> None:
        self._seconds.observe(fetched.seconds)
        self._bytes.observe(fetched.moved_bytes)
        self._pages.observe(fetched.moved_pages)
        asked_pages = fetched.moved_pages + fetched.missing_pages
        self._counters["external_prefix_cache_queries"].inc(asked_pages * block_size)
        self._counters["external_prefix_cache_hits"].inc(fetched.moved_pages * block_size)
        failed = any(fetched.failed.values()) or fetched.missing_pages > 0
        self._counters["kv_failed_transfers"].inc(failed)
