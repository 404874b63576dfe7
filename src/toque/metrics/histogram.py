"""A histogram that observes one value many times at once.

Owns: its counts. Knows: the Prometheus data model. Does not know: what it counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from toque.metrics.table import PREFIX, Row


class Histogram(Collector):
    """Counts per bucket.

    prometheus_client's own takes a lock per bucket and observation: at a thousand streams, whose
    gaps are all equal in a step, one weighted observation replaces a thousand of them.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not row.labels:
            self._start(())

    def _start(self, labels: tuple[str, ...]) -> list[int]:
        self._sums[labels] = 0.0
        return self._counts.setdefault(labels, [0] * (len(self._row.buckets) + 1))

    def observe(self, value: float, times: int = 1, labels: tuple[str, ...] = ()) -> None:
        counts = self._counts.get(labels) or self._start(labels)
        counts[bisect_left(self._row.buckets, value)] += times
        self._sums[labels] += value * times

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [self._family()]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = self._family()
        bounds = [*map(str, self._row.buckets), "+Inf"]
        for labels, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric(labels, buckets, self._sums[labels])
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(
            PREFIX + self._row.name, self._row.help, labels=self._row.labels
        )
