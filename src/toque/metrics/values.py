"""The values behind `/metrics`.

Owns: the registry and all values. Knows: the engine's reports and events, the table's names.
Does not know: HTTP, where reports come from.

The engine sends totals; they are exported as counters by difference, so an exposition adds up at
every moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from toque.metrics.buckets import Buckets
from toque.metrics.compat import VllmNames
from toque.metrics.fleet import FleetNumbers
from toque.metrics.histogram import Histogram
from toque.metrics.slo import LEFT, MET, REFUSED, Attainment, Pace, verdict
from toque.metrics.table import CAUSES, OUTCOMES, PREFIX, TABLE, Row
from toque.metrics.totals import EngineTotals
from toque.types import (
    Counters,
    Finished,
    FinishReason,
    FleetReport,
    Hello,
    Load,
    NoteKind,
    PageLife,
    RefusalCause,
    Refused,
    Request,
    StepReport,
    Times,
    WaitReason,
)

# A second series per counter, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]
MOST_KEYS = 32  # API keys with a label of their own
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_TYPES = {"chatcmpl": "chat_completions", "resp": "responses"}
EXCHANGES = (
    "http_request_duration_seconds",
    "http_request_size_bytes",
    "http_response_size_bytes",
)
# Seen by whoever scrapes and whoever probes: their first visit must not look like growth.
STARTED_ROUTES = ("/metrics", "other")


class Metrics:
    """All methods are quick and are called from one thread."""

    def __init__(
        self,
        compat: str = "",
        clock: Callable[[], float] = time.monotonic,
        buckets: Buckets = MappingProxyType({}),
    ) -> None:
        """`buckets`: of histograms that shall have others than the table's."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.attainment = Attainment()
        self._clock = clock
        self._began_s = clock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in TABLE:
            self._add(replace(row, buckets=buckets.get(row.name, row.buckets)))
        self._vllm = VllmNames({**self._counters, **self._gauges, **self._histograms})
        if compat == "vllm":
            self.registry.register(self._vllm)
            for plain in (ProcessCollector, PlatformCollector, GCCollector):  # process_, python_
                plain(registry=self.registry)
        ProcessCollector(namespace="toque_server", registry=self.registry)
        self._engine_pid = 0
        self._totals = EngineTotals(self._counters)
        self._keys: set[str] = set()
        self._load_at_s = clock()
        self._last_load = Load()
        self._block_size = 1
        self._fleet = FleetNumbers(self._counters, self._gauges, self._histograms)
        self._start_labels()

    def _add(self, row: Row) -> None:
        name = PREFIX + row.name
        if row.kind == "counter":
            self._counters[row.name] = Counter(name, row.help, row.labels, registry=self.registry)
        elif row.kind == "gauge":
            self._gauges[row.name] = Gauge(name, row.help, row.labels, registry=self.registry)
        else:
            self._histograms[row.name] = Histogram(row)
            self.registry.register(self._histograms[row.name])

    def _start_labels(self) -> None:
        """Every series that is known beforehand is there from the first exposition on."""
        self._gauges["process_start_time_seconds"].set(time.time())
        known: dict[str, tuple[str, ...]] = {
            "request_success": tuple(FinishReason),
            "calls_finished": OUTCOMES,
            "errors": CAUSES,
        }
        for name, values in known.items():
            for value in values:
                self._counters[name].labels(value)
        for reason in WaitReason:
            self._gauges["num_requests_waiting_by_reason"].labels(reason)
        for route in STARTED_ROUTES:
            for name in EXCHANGES:
                self._histograms[name].observe(0, 0, (route,))
        self._gauges["queue_age_seconds"].set_function(self._queue_age_s)

    def text(self) -> bytes:
        """The exposition, Prometheus text format 0.0.4."""
        now_s = self._clock()
        for slo_class in self.attainment.recent:
            ratio = self.attainment.ratio(slo_class, now_s)
            share = float("nan") if ratio is None else ratio
            self._gauges["slo_attainment_ratio"].labels(slo_class).set(share)
        return generate_latest(self.registry)

    def counts(self, name: str) -> dict[tuple[str, ...], int]:
        """A counter's values by its labels' values."""
        samples = next(iter(self._counters[name].collect())).samples
        return {
            tuple(sample.labels.values()): int(sample.value)
            for sample in samples
            if sample.name.endswith("_total")
        }

    @property
    def totals(self) -> Counters:
        """The engine's, as last reported."""
        return self._totals.seen

    def probe(self, name: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for at every exposition."""
        self._gauges[name].set_function(value)

    # ------------------------------------------------------------------ what the engine reports

    def fleet(self, report: FleetReport) -> None:
        self._fleet.report(report, self._block_size)

    def hello(self, hello: Hello, version: str) -> None:
        labels = (version, hello.model_name, hello.fingerprint)
        self._gauges["info"].labels(*labels).set(1)
        self._vllm.model_name = hello.model_name
        self._block_size = hello.block_size
        settings = (hello.block_size, hello.total_pages, hello.kv_cache_dtype)
        self._gauges["cache_config_info"].labels(*map(str, settings)).set(1)
        self._load(Load(free_pages=hello.total_pages, total_pages=hello.total_pages))
        if hello.pid and not self._engine_pid:
            self._engine_pid = hello.pid
            ProcessCollector("toque_engine", lambda: self._engine_pid, registry=self.registry)
        for phase, took_s in hello.startup_s.items():
            self.started(phase, took_s)
        for slo in hello.slo_classes:
            self._counters["slo_requests"].labels(slo.name, MET)

    def heartbeat(self, predicted_ms: float) -> None:
        self._gauges["step_predicted_seconds"].set(predicted_ms / 1000)

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[], float]]:
        """Times a phase of the start; what it yields tells how long it has taken."""
        began_s = self._clock()
        yield lambda: self._clock() - began_s
        self.started(name, self._clock() - began_s)

    def started(self, phase: str, took_s: float) -> None:
        self._gauges["startup_seconds"].labels(phase).set(took_s)

    def ready(self) -> float:
        """Everything is loaded; returns the seconds since these metrics were made."""
        took_s = self._clock() - self._began_s
        self.started("ready", took_s)
        return took_s

    def step(self, report: StepReport) -> None:
        self._load(report.load)
        self._totals.report(report.counters)
        for life in report.page_lives:
            self._page_life(life)
        if report.times is None:
            return
        steps = self._histograms["step_time_seconds"]
        steps.observe(report.times.plan_ms / 1000, labels=("plan",))
        steps.observe(report.times.run_ms / 1000, labels=("run",))
        steps.observe(report.times.commit_ms / 1000, labels=("commit",))
        self._histograms["iteration_tokens_total"].observe(report.batch_tokens)
        if report.predicted_ms and report.times.run_ms:
            error = abs(report.predicted_ms / report.times.run_ms - 1)
            self._histograms["step_prediction_error_ratio"].observe(error)

    def _page_life(self, life: PageLife) -> None:
        self._histograms["kv_block_lifetime_seconds"].observe(life.lifetime_s)
        self._histograms["kv_block_idle_before_evict_seconds"].observe(life.idle_s)
        for gap_s in life.gaps_s:
            self._histograms["kv_block_reuse_gap_seconds"].observe(gap_s)

    def _load(self, load: Load) -> None:
        self._last_load, self._load_at_s = load, self._clock()
        self._gauges["num_requests_running"].set(load.running)
        self._gauges["num_requests_waiting"].set(load.waiting)
        reasons = self._gauges["num_requests_waiting_by_reason"]
        for reason in WaitReason:
            reasons.labels(reason).set(load.waiting_by_reason.get(reason, 0))
        self._gauges["queue_tokens"].set(load.waiting_tokens)
        self._gauges["queue_backlog_seconds"].set(load.backlog_s)
        pages = self._gauges["kv_cache_pages"]
        pages.labels("free").set(load.free_pages)
        pages.labels("cached").set(load.cached_pages)
        pages.labels("held").set(load.held_pages)
        self._gauges["kv_cache_usage_ratio"].set(load.held_pages / max(1, load.total_pages))
        places = max(1, load.held_pages * self._block_size)
        self._gauges["kv_cache_fragmentation_ratio"].set(load.empty_places / places)

    def _queue_age_s(self) -> float:
        """Of now: the queue goes on ageing while no report comes."""
        if not self._last_load.waiting:
            return 0.0
        return self._last_load.queue_age_s + self._clock() - self._load_at_s

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

    def finished(self, event: Finished, pace: Pace, key: str) -> bool | None:
        """A sequence ended; `key` is the label of the API key it came with. Returns whether its
        class was kept, None where nothing was promised or its client left."""
        self.ended(event.reason)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._durations(event)
        if event.times.admitted_s is not None:  # as in the totals: aborted ones were computed too
            self._lengths(event, pace.request)
            self._by_key("key_prompt_tokens", key, event.usage.prompt_tokens)
            self._by_key("key_generation_tokens", key, event.usage.completion_tokens)
        return self._judge(event, pace)

    def tools_read(self, stream: bool, kind: str, called: bool) -> None:
        """A choice of a call with tools is over. `kind`: the beginning of its id."""
        labels = ("streaming" if stream else "non_streaming", REQUEST_TYPES.get(kind, "other"))
        outcome = "tool_call" if called else "no_tool_call"
        self._counters["tool_call_parser_invocations"].labels(*labels, outcome).inc()

    def ended(self, reason: FinishReason, sequences: int = 1) -> None:
        self._counters["request_success"].labels(reason.value).inc(sequences)

    def refusal(self, event: Refused, request: Request) -> bool | None:
        """The engine did not take a sequence. Returns as `finished`."""
        if request.slo is None or event.cause is RefusalCause.INVALID:
            return None
        return self._promise(request.slo.name, REFUSED)

    def call_ended(self, sequences: int, longest_tokens: int) -> None:
        """All of a call's sequences have ended: how many they were, the longest output."""
        self._histograms["request_params_n"].observe(sequences)
        self._histograms["request_max_num_generation_tokens"].observe(longest_tokens)

    def _by_key(self, name: str, key: str, amount: int) -> None:
        """The keys used first have labels of their own; the series stay few whatever comes."""
        if len(self._keys) < MOST_KEYS:
            self._keys.add(key)
        self._counters[name].labels(key if key in self._keys else "other").inc(amount)

    def _judge(self, event: Finished, pace: Pace) -> bool | None:
        slo = pace.request.slo
        if slo is None:
            return None
        word, missed = verdict(pace, event)
        for target in missed:
            self._counters["slo_misses"].labels(slo.name, target).inc()
        goodput = self._counters["slo_goodput_tokens"].labels(slo.name)
        goodput.inc(event.usage.completion_tokens if word == MET else 0)
        return self._promise(slo.name, word)

    def _promise(self, slo_class: str, word: str) -> bool | None:
        self._counters["slo_requests"].labels(slo_class, word).inc()
        if word == LEFT:
            return None
        self.attainment.add(slo_class, word == MET, self._clock())
        return word == MET

    def _lengths(self, event: Finished, request: Request) -> None:
        usage, seen = event.usage, self._histograms
        seen["request_prompt_tokens"].observe(usage.prompt_tokens)
        seen["request_generation_tokens"].observe(usage.completion_tokens)
        computed = usage.prompt_tokens - usage.cached_tokens
        seen["request_prefill_kv_computed_tokens"].observe(computed)
        if request.sampling.max_tokens is not None:
            seen["request_params_max_tokens"].observe(request.sampling.max_tokens)
        lost = sum(note.kind is NoteKind.PREEMPTED for note in event.timeline)
        seen["request_num_preemptions"].observe(lost)

    def _durations(self, event: Finished) -> None:
        times: Times = event.times
        spans = (
            ("request_queue_time_seconds", times.arrived_s, times.admitted_s),
            ("request_inference_time_seconds", times.admitted_s, times.finished_s),
            ("request_prefill_time_seconds", times.admitted_s, times.first_token_s),
            ("request_decode_time_seconds", times.first_token_s, times.finished_s),
            ("e2e_request_latency_seconds", times.arrived_s, times.finished_s),
        )
        for name, start_s, end_s in spans:
            if start_s is not None and end_s is not None:
                self._histograms[name].observe(max(0.0, end_s - start_s))
        gaps = event.usage.completion_tokens - 1
        if gaps > 0 and times.first_token_s is not None and times.finished_s is not None:
            mean_s = max(0.0, times.finished_s - times.first_token_s) / gaps
            self._histograms["request_time_per_output_token_seconds"].observe(mean_s)

    # -------------------------------------------------------------------------------- HTTP edge

    def call_received(self) -> None:
        self._counters["calls_received"].inc()
        self._gauges["calls_in_progress"].inc()

    def call_finished(self, outcome: str, cause: str | None, key: str) -> None:
        """`outcome`: one of OUTCOMES; `cause`: one of CAUSES unless it is a success.
        received = in progress + finished, and errors = finished - success, at every moment."""
        self._counters["calls_finished"].labels(outcome).inc()
        self._by_key("key_calls", key, 1)
        if cause is not None:
            self._counters["errors"].labels(cause).inc()
        self._gauges["calls_in_progress"].dec()

    def http(self, route: str, method: str, status: int) -> None:
        self._counters["http_requests"].labels(route, method, str(status)).inc()

    def exchange(self, route: str, took_s: float, in_bytes: int, out_bytes: int) -> None:
        for name, value in zip(EXCHANGES, (took_s, in_bytes, out_bytes), strict=True):
            self._histograms[name].observe(value, labels=(route,))

    def refused(self, status: int) -> None:
        self._counters["requests_refused"].labels(str(status)).inc()

    def slow_senders(self, connections: int) -> None:
        self._counters["slow_senders"].inc(connections)

    def loop_delay(self, late_s: float) -> None:
        self._histograms["event_loop_delay_seconds"].observe(late_s)

    def slow_readers(self, connections: int) -> None:
        self._counters["slow_readers"].inc(connections)
