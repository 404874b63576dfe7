"""Every metric in one table, over prometheus_client with a registry of its own.

Owns: the registry and all values. Knows: the engine's reports and events, names, buckets.
Does not know: HTTP, where reports come from.

Names and meanings are vLLM's with the prefix `toque_`. The engine sends totals; they are exported
as counters by difference, so an exposition adds up at every moment. Times are seconds.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from toque.types import Counters, Finished, FinishReason, Hello, Load, StepReport, Times

OUTCOMES = ("success", "refused", "cancelled", "failed")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "toque_"

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
STEP_TOKENS = tuple(float(x) for x in (1, *(2**k for k in range(3, 15))))
LENGTH_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Row:
    kind: str  # counter, gauge or histogram
    name: str  # without the prefix; counters are exposed with _total
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE = (
    Row("gauge", "num_requests_running", "Sequences in the running batch."),
    Row("gauge", "num_requests_waiting", "Sequences in the queue."),
    Row("gauge", "open_requests", "Sequences sent to the engine and not finished."),
    Row("gauge", "kv_cache_usage_ratio", "Pages held by requests, share of all pages."),
    Row("gauge", "kv_cache_pages", "KV pages by state: free, cached, held.", ("state",)),
    Row("gauge", "step_predicted_seconds", "How long the engine expects its long step to take."),
    Row("gauge", "process_start_time_seconds", "Unix time at which the server started."),
    Row("gauge", "info", "1; what is served, as labels.", ("version", "model_name", "fingerprint")),
    Row("counter", "prompt_tokens", "Prompt tokens of admitted requests."),
    Row("counter", "generation_tokens", "Tokens generated."),
    Row("counter", "computed_tokens", "Tokens run through the model, recomputation included."),
    Row("counter", "recomputed_tokens", "Tokens computed again after a preemption."),
    Row("counter", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    Row("counter", "prefix_cache_hits", "Tokens found in the prefix cache."),
    Row("counter", "num_preemptions", "Preemptions."),
    Row("counter", "engine_steps", "Steps of the engine."),
    Row("counter", "request_success", "Sequences that ended, by reason.", ("finished_reason",)),
    Row("counter", "requests_refused", "Generation calls refused, by HTTP status.", ("status",)),
    Row("gauge", "calls_in_progress", "Generation calls that have not ended."),
    Row(
        "counter", "calls_received", "Generation calls that arrived; each counts once, whatever n."
    ),
    Row("counter", "calls_finished", "Generation calls that ended, by outcome.", ("outcome",)),
    Row("counter", "anomalies", "Reports of the engine whose totals went backwards."),
    Row("counter", "http_requests", "HTTP exchanges.", ("route", "method", "status")),
    Row("counter", "slow_readers", "Connections cut because the client did not read."),
    Row("counter", "slow_senders", "Connections cut because a request took too long to arrive."),
    Row(
        "histogram",
        "event_loop_delay_seconds",
        "How late the server's event loop wakes up.",
        buckets=STEP_S,
    ),
    Row(
        "histogram",
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        buckets=FIRST_TOKEN_S,
    ),
    Row(
        "histogram",
        "inter_token_latency_seconds",
        "Between two tokens of a request.",
        buckets=TOKEN_GAP_S,
    ),
    Row(
        "histogram",
        "e2e_request_latency_seconds",
        "From arrival to the end.",
        buckets=REQUEST_S,
    ),
    Row(
        "histogram",
        "request_queue_time_seconds",
        "From arrival to admission.",
        buckets=REQUEST_S,
    ),
    Row(
        "histogram",
        "request_prefill_time_seconds",
        "From admission to the first token.",
        buckets=REQUEST_S,
    ),
    Row(
        "histogram",
        "request_decode_time_seconds",
        "From the first token to the end.",
        buckets=REQUEST_S,
    ),
    Row("histogram", "step_time_seconds", "One step, by stage.", ("stage",), STEP_S),
    Row("histogram", "iteration_tokens_total", "Tokens computed in a step.", (), STEP_TOKENS),
    Row("histogram", "request_prompt_tokens", "Prompt length, tokens.", (), LENGTH_TOKENS),
    Row("histogram", "request_generation_tokens", "Output length, tokens.", (), LENGTH_TOKENS),
)

# Field of types.Counters -> counter of the table.
_TOTALS = {
    "steps": "engine_steps",
    "prompt_tokens": "prompt_tokens",
    "computed_tokens": "computed_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "recomputed_tokens": "recomputed_tokens",
}


class Histogram(Collector):
    """Counts per bucket that can observe one value many times at once.

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


class Metrics:
    """The values behind `/metrics`. All methods are quick and are called from one thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in TABLE:
            self._add(row)
        self._seen = Counters()
        self._gauges["process_start_time_seconds"].set(time.time())
        for reason in FinishReason:
            self._counters["request_success"].labels(reason.value)
        for outcome in OUTCOMES:
            self._counters["calls_finished"].labels(outcome)

    def _add(self, row: Row) -> None:
        name = PREFIX + row.name
        if row.kind == "counter":
            self._counters[row.name] = Counter(name, row.help, row.labels, registry=self.registry)
        elif row.kind == "gauge":
            self._gauges[row.name] = Gauge(name, row.help, row.labels, registry=self.registry)
        else:
            self._histograms[row.name] = Histogram(row)
            self.registry.register(self._histograms[row.name])

    def text(self) -> bytes:
        """The exposition, Prometheus text format 0.0.4."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ what the engine reports

    def hello(self, hello: Hello, version: str) -> None:
        labels = (version, hello.model_name, hello.fingerprint)
        self._gauges["info"].labels(*labels).set(1)
        self._load(Load(free_pages=hello.total_pages, total_pages=hello.total_pages))

    def heartbeat(self, predicted_ms: float) -> None:
        self._gauges["step_predicted_seconds"].set(predicted_ms / 1000)

    def step(self, report: StepReport) -> None:
        self._load(report.load)
        self._totals(report.counters)
        if report.times is None:
            return
        steps = self._histograms["step_time_seconds"]
        steps.observe(report.times.plan_ms / 1000, labels=("plan",))
        steps.observe(report.times.run_ms / 1000, labels=("run",))
        steps.observe(report.times.commit_ms / 1000, labels=("commit",))
        self._histograms["iteration_tokens_total"].observe(report.batch_tokens)

    def _load(self, load: Load) -> None:
        self._gauges["num_requests_running"].set(load.running)
        self._gauges["num_requests_waiting"].set(load.waiting)
        pages = self._gauges["kv_cache_pages"]
        pages.labels("free").set(load.free_pages)
        pages.labels("cached").set(load.cached_pages)
        pages.labels("held").set(load.held_pages)
        self._gauges["kv_cache_usage_ratio"].set(load.held_pages / max(1, load.total_pages))

    def _totals(self, now: Counters) -> None:
        for field, name in _TOTALS.items():
            grown = getattr(now, field) - getattr(self._seen, field)
            if grown > 0:
                self._counters[name].inc(grown)
            elif grown < 0:  # never an error of the request whose report it came with
                self._counters["anomalies"].inc()
        self._seen = now

    # --------------------------------------------------------------------- the life of requests

    def open_requests(self, sequences: int) -> None:
        self._gauges["open_requests"].set(sequences)

    def first_token(self, waited_s: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(waited_s)

    def token_gaps(self, gaps_s: Mapping[float, int]) -> None:
        """How many tokens followed their predecessor after each gap, seconds."""
        histogram = self._histograms["inter_token_latency_seconds"]
        for gap_s, tokens in gaps_s.items():
            histogram.observe(gap_s, tokens)

    def finished(self, event: Finished) -> None:
        self.ended(event.reason)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._durations(event.times)
        if event.times.admitted_s is not None:  # as in the totals: aborted ones were computed too
            self._histograms["request_prompt_tokens"].observe(event.usage.prompt_tokens)
            self._histograms["request_generation_tokens"].observe(event.usage.completion_tokens)

    def ended(self, reason: FinishReason, sequences: int = 1) -> None:
        self._counters["request_success"].labels(reason.value).inc(sequences)

    def _durations(self, times: Times) -> None:
        spans = (
            ("request_queue_time_seconds", times.arrived_s, times.admitted_s),
            ("request_prefill_time_seconds", times.admitted_s, times.first_token_s),
            ("request_decode_time_seconds", times.first_token_s, times.finished_s),
            ("e2e_request_latency_seconds", times.arrived_s, times.finished_s),
        )
        for name, start_s, end_s in spans:
            if start_s is not None and end_s is not None:
                self._histograms[name].observe(max(0.0, end_s - start_s))

    # -------------------------------------------------------------------------------- HTTP edge

    def call_received(self) -> None:
        self._counters["calls_received"].inc()
        self._gauges["calls_in_progress"].inc()

    def call_finished(self, outcome: str) -> None:
        """`outcome`: one of OUTCOMES. received = in progress + finished, at every moment."""
        self._counters["calls_finished"].labels(outcome).inc()
        self._gauges["calls_in_progress"].dec()

    def http(self, route: str, method: str, status: int) -> None:
        self._counters["http_requests"].labels(route, method, str(status)).inc()

    def refused(self, status: int) -> None:
        self._counters["requests_refused"].labels(str(status)).inc()

    def slow_senders(self, connections: int) -> None:
        self._counters["slow_senders"].inc(connections)

    def loop_delay(self, late_s: float) -> None:
        self._histograms["event_loop_delay_seconds"].observe(late_s)

    def slow_readers(self, connections: int) -> None:
        self._counters["slow_readers"].inc(connections)
