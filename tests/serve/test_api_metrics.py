"""/metrics: parses, adds up, and stays bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fakes import FakeEngine, ServerThread, bytes_then_end, serving, wait_for
from toque.metrics import TABLE, Histogram, Metrics, Row
from toque.metrics.values import MOST_KEYS
from toque.scheduler.policy import Fcfs
from toque.sim.engine import Simulation, Sizes
from toque.types import (
    Counters,
    EngineState,
    Fetched,
    FleetReport,
    FromEngine,
    Kept,
    Load,
    RefusalCause,
    Refused,
    Request,
    SamplingParams,
    Slo,
    StepReport,
    StepTimes,
    Transfers,
)


def scrape(server: ServerThread) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name.removeprefix("toque_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Any, name: str, **labels: str) -> float:
    found: float = samples[name, tuple(sorted(labels.items()))]
    return found


def test_counters_and_histograms_add_up() -> None:
    """After mixed calls: started = finished by reason, tokens = what clients were told."""
    engine = FakeEngine(reply=lambda r: bytes_then_end("abcdefgh"))
    with serving(engine) as server:
        answers = [
            server.complete(prompt=["a", "bb"], n=2),  # four sequences, to their end
            server.complete(max_tokens=3),  # cut by length
            server.chat(max_tokens=4),
        ]
        server.http.post("/v1/completions", json={"prompt": ""})
        server.http.post("/v1/completions", json={"prompt": "x", "model": "no"})
        wait_for(lambda: server.server.client.open_requests == 0)
        samples = scrape(server)
    sequences = 6
    reasons = {"stop": 4, "length": 2, "abort": 0, "error": 0}
    for reason, count in reasons.items():
        assert value(samples, "request_success_total", finished_reason=reason) == count
    told = sum(a["usage"]["completion_tokens"] for a in answers)
    assert value(samples, "generation_tokens_total") == told
    first = value(samples, "time_to_first_token_seconds_count")
    gaps = value(samples, "inter_token_latency_seconds_count")
    assert first == sequences and first + gaps == told
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time"):  # fmt: skip
        assert value(samples, f"{name}_seconds_count") == sequences
    assert value(samples, "request_generation_tokens_sum") == told
    prompt_tokens = 2 * 2 + 2 * 3 + 2 + answers[2]["usage"]["prompt_tokens"]
    assert value(samples, "prompt_tokens_total") == prompt_tokens
    assert value(samples, "request_prompt_tokens_sum") == prompt_tokens
    assert value(samples, "prefix_cache_queries_total") == prompt_tokens
    assert value(samples, "prefix_cache_hits_total") == 3 * sequences
    steps = value(samples, "engine_steps_total")
    for stage, ms in (("plan", 1), ("run", 20), ("commit", 2)):
        assert value(samples, "step_time_seconds_count", stage=stage) == steps
        total_s = value(samples, "step_time_seconds_sum", stage=stage)
        assert total_s == pytest.approx(steps * ms / 1000)
    assert value(samples, "iteration_tokens_total_count") == steps
    assert value(samples, "requests_refused_total", status="400") == 1
    assert value(samples, "requests_refused_total", status="404") == 1
    pages = [value(samples, "kv_cache_pages", state=s) for s in ("free", "cached", "held")]
    assert sum(pages) == 100 and value(samples, "kv_cache_usage_ratio") == 0.04
    assert value(samples, "open_requests") == 0
    for name in ("request_inference_time_seconds", "request_params_max_tokens",
                 "request_prefill_kv_computed_tokens", "request_num_preemptions",
                 "request_time_per_output_token_seconds"):  # fmt: skip
        assert value(samples, f"{name}_count") == sequences
    assert value(samples, "request_params_n_count") == 3
    assert value(samples, "request_params_n_sum") == sequences
    assert value(samples, "request_max_num_generation_tokens_sum") == 9 + 3 + 4
    assert value(samples, "key_generation_tokens_total", key="none") == told
    assert value(samples, "key_prompt_tokens_total", key="none") == prompt_tokens
    sources = [value(samples, "prompt_tokens_by_source_total", source=s)
               for s in ("local_compute", "local_cache_hit")]  # fmt: skip
    assert sum(sources) == prompt_tokens
    assert value(samples, "errors_total", cause="validation") == 1
    assert value(samples, "errors_total", cause="not_found") == 1
    assert value(samples, "startup_seconds", phase="weights") == 1.5
    assert value(samples, "startup_seconds", phase="ready") > 0
    assert value(samples, "engine_silence_seconds") == 0
    posts = {"method": "POST", "route": "/v1/completions"}
    assert value(samples, "http_requests_total", status="200", **posts) == 2
    assert value(samples, "http_requests_total", status="400", **posts) == 1


def test_http_labels_are_bounded() -> None:
    with serving() as server:
        for i in range(20):
            server.http.get(f"/nope/{i}")
            server.http.request(f"M{i}", "/version") if i == 0 else None
        labels = [key for name, key in scrape(server) if name == "http_requests_total"]
    routes = {dict(key)["route"] for key in labels}
    assert "other" in routes and not any(route.startswith("/nope") for route in routes)


def test_unknown_paths_add_next_to_no_series() -> None:
    """The histograms of `other` are there before the first one: what comes is one counter."""
    with serving() as server:
        before = len(scrape(server))
        for i in range(30):
            server.http.get(f"/nope/{i}")
        assert len(scrape(server)) <= before + 5


def test_every_row_is_exposed_before_anything_happened() -> None:
    text = Metrics().text().decode()
    for row in TABLE:
        assert f"# HELP toque_{row.name}" in text, row.name


def test_totals_become_counters_by_difference() -> None:
    metrics = Metrics()
    for total in (5, 5, 12):
        metrics.step(StepReport(counters=Counters(generation_tokens=total)))
    assert b"toque_generation_tokens_total 12.0" in metrics.text()


def test_weighted_histogram_equals_repeated_observation() -> None:
    """Buckets are upper bounds, inclusive, and cumulative."""
    once, many = (Histogram(Row("histogram", "h", "", buckets=(1.0, 2.0))) for _ in range(2))
    for v, times in ((0.5, 3), (1.0, 2), (1.5, 1), (9.0, 4)):
        many.observe(v, times)
        for _ in range(times):
            once.observe(v)
    samples = [list(next(iter(h.collect())).samples) for h in (once, many)]
    assert samples[0] == samples[1]
    by_bound = {s.labels.get("le"): s.value for s in samples[0] if s.name.endswith("_bucket")}
    assert by_bound == {"1.0": 5.0, "2.0": 6.0, "+Inf": 10.0}


# ------------------------------------------------------------------------------------- promises


def test_every_sequence_with_a_class_gets_one_verdict() -> None:
    slos = (Slo(name="easy", ttft_s=60.0), Slo(name="hard", ttft_s=1e-9, itl_s=1e-9))
    engine = FakeEngine(slos=slos, reply=lambda r: bytes_then_end("abcd"))
    with serving(engine) as server:
        server.complete(slo="easy", n=2)
        server.complete(slo="hard")
        server.complete()
        engine.refuse = Refused(id="", message="no", status=429, cause=RefusalCause.SLO)
        assert server.http.post("/v1/completions", json={"prompt": "x", "slo": "hard"}).is_error
        samples = scrape(server)
    verdicts = {
        (dict(labels)["slo_class"], dict(labels)["verdict"]): count
        for (name, labels), count in samples.items()
        if name == "slo_requests_total" and count
    }
    assert verdicts == {("easy", "met"): 2, ("hard", "missed"): 1, ("hard", "refused"): 1}
    for target in ("ttft", "itl"):
        assert value(samples, "slo_misses_total", slo_class="hard", target=target) == 1
    assert value(samples, "slo_goodput_tokens_total", slo_class="easy") == 2 * 5
    assert value(samples, "slo_attainment_ratio", slo_class="easy") == 1.0
    assert value(samples, "slo_attainment_ratio", slo_class="hard") == 0.0
    assert value(samples, "errors_total", cause="overload") == 1


def test_each_failed_call_has_one_cause() -> None:
    """Also those that fail after their status line, or whose client goes away."""
    engine = FakeEngine(step_s=0.005, reply=lambda r: bytes_then_end("x" * 200))
    with serving(engine, api_key=("key-for-tests",)) as server:
        assert server.http.post("/v1/completions", json={}).status_code == 401
        server.http.headers["authorization"] = "Bearer key-for-tests"
        assert server.http.post("/v1/completions", content=b"{").status_code == 400
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 200}
        ) as answer:
            next(answer.iter_lines())
        wait_for(lambda: value(scrape(server), "calls_in_progress") == 0)
        samples = scrape(server)
        label = server.http.get("/metrics").text.split('key_calls_total{key="')
    causes = {c: value(samples, "errors_total", cause=c)
              for c in ("unauthorized", "validation", "cancelled")}  # fmt: skip
    assert causes == {"unauthorized": 1, "validation": 1, "cancelled": 1}
    assert sum(v for (name, _), v in samples.items() if name == "errors_total") == 3
    ended = [v for (name, _), v in samples.items() if name == "calls_finished_total"]
    assert sum(ended) == 3 == value(samples, "calls_received_total")
    assert value(samples, "calls_finished_total", outcome="success") == 0
    assert not any("key-for-tests" in part for part in label)
    assert value(samples, "key_calls_total", key="none") == 1
    assert sum(v for (name, _), v in samples.items() if name == "key_calls_total") == 3


def test_keys_are_few_whatever_comes() -> None:
    metrics = Metrics()
    for number in range(3 * MOST_KEYS):
        metrics.call_received()
        metrics.call_finished("success", None, f"k{number}")
    lines = [line for line in metrics.text().decode().splitlines()
             if line.startswith("toque_key_calls_total{")]  # fmt: skip
    assert len(lines) == MOST_KEYS + 1
    assert f'toque_key_calls_total{{key="other"}} {2.0 * MOST_KEYS}' in lines
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 3 * MOST_KEYS


# ---------------------------------------------------------------------------- the engine's words


def test_waste_waiting_and_prediction_are_what_the_engine_said() -> None:
    now = [0.0]
    metrics = Metrics(clock=lambda: now[0])
    counters = Counters(wasted_aborted_tokens=3, wasted_evicted_tokens=4, recomputed_tokens=5,
                        refused_slo=2, downgraded=1)  # fmt: skip
    load = Load(waiting=2, queue_age_s=1.5, waiting_tokens=90, backlog_s=0.75, held_pages=2,
                empty_places=1, total_pages=4,
                waiting_by_reason={"pages": 1, "shared_page": 1})  # fmt: skip
    metrics.step(StepReport(counters=counters, load=load, times=StepTimes(run_ms=10.0),
                            predicted_ms=15.0))  # fmt: skip
    now[0] = 2.0
    text = metrics.text().decode()
    for line in (
        'wasted_tokens_total{cause="aborted"} 3.0', 'wasted_tokens_total{cause="evicted"} 4.0',
        'wasted_tokens_total{cause="preempted"} 5.0',
        'admission_rejections_total{reason="slo"} 2.0',
        "slo_downgraded_total 1.0", "queue_age_seconds 3.5", "queue_tokens 90.0",
        "queue_backlog_seconds 0.75", "kv_cache_fragmentation_ratio 0.5",
        'num_requests_waiting_by_reason{reason="pages"} 1.0',
        "step_prediction_error_ratio_sum 0.5",
    ):  # fmt: skip
        assert f"toque_{line}\n" in text, line


# ---------------------------------------------------------------------------------- vLLM's names

# Names of vLLM 0.32 that its dashboards and autoscalers use, with their types.
VLLM = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge", "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge", "prompt_tokens": "counter", "generation_tokens": "counter",
    "prompt_tokens_by_source": "counter", "prompt_tokens_cached": "counter",
    "prefix_cache_queries": "counter", "prefix_cache_hits": "counter",
    "num_preemptions": "counter", "request_success": "counter",
    "admission_rejections": "counter", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram", "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "iteration_tokens_total": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram", "request_params_max_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram", "request_params_n": "histogram",
    "request_num_preemptions": "histogram",
    "prompt_tokens_cached_by_source": "counter", "corrupted_requests": "counter",
    "external_prefix_cache_queries": "counter", "external_prefix_cache_hits": "counter",
    "tool_call_parser_invocations": "counter", "num_requests_kv_fetch_by_stage": "gauge",
    "nixl_xfer_time_seconds": "histogram", "nixl_bytes_transferred": "histogram",
    "kv_block_lifetime_seconds": "histogram", "kv_block_idle_before_evict_seconds": "histogram",
    "kv_block_reuse_gap_seconds": "histogram",
    "nixl_num_kv_expired_reqs": "counter",
    "nixl_num_descriptors": "histogram", "nixl_num_failed_transfers": "counter",
}  # fmt: skip


def test_vllm_names_are_there_when_asked_for_and_say_the_same() -> None:
    with serving(metrics_compat="vllm") as server:
        server.complete(n=2)
        text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, kind in VLLM.items():
        assert families[f"vllm:{name}"].type == kind, name
        for sample in families[f"vllm:{name}"].samples:
            assert sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0"
    ours, theirs = families["toque_request_success"], families["vllm:request_success"]
    for mine, sample in zip(ours.samples, theirs.samples, strict=True):
        assert sample.name == "vllm:request_success_total" and sample.value == mine.value
        assert sample.labels["finished_reason"] == mine.labels["finished_reason"]
    reasons = {s.labels["reason"] for s in families["vllm:num_requests_waiting_by_reason"].samples}
    assert reasons == {"capacity", "deferred"}
    assert {row.vllm or row.name for row in TABLE if row.vllm is not None} == set(VLLM)


def test_reasons_to_wait_become_vllms_two() -> None:
    metrics = Metrics("vllm")
    reasons = {"pages": 2, "rows": 3, "shared_page": 4}
    metrics.step(StepReport(load=Load(waiting=9, waiting_by_reason=reasons)))
    text = metrics.text().decode()
    for reason, count in (("capacity", 5.0), ("deferred", 4.0)):
        labels = f'{{engine="0",model_name="",reason="{reason}"}}'
        assert f"vllm:num_requests_waiting_by_reason{labels} {count}\n" in text


def test_vllm_names_are_absent_unless_asked_for() -> None:
    with serving() as server:
        assert "vllm:" not in server.http.get("/metrics").text


def test_the_plain_names_of_vllms_http_server_add_up() -> None:
    """Handlers for routes, classes of statuses, one histogram over all routes, the process."""
    with serving(metrics_compat="vllm") as server:
        server.complete()
        server.complete()
        server.http.post("/v1/completions", json={"prompt": ""})
        server.http.post("/v1/completions", json={"prompt": "x", "model": "no"})
        server.http.get("/version")
        text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    posts = {
        sample.labels["status"]: sample.value
        for sample in families["http_requests"].samples
        if sample.labels["handler"] == "/v1/completions" and sample.labels["method"] == "POST"
    }
    assert posts == {"2xx": 2.0, "4xx": 2.0}
    for name in ("http_request_duration_seconds", "http_request_size_bytes",
                 "http_response_size_bytes"):  # fmt: skip
        counts = {s.labels["handler"]: s.value for s in families[name].samples
                  if s.name.endswith("_count")}  # fmt: skip
        assert counts["/v1/completions"] == 4 and counts["/version"] == 1
    whole = {s.name: s.value for s in families["http_request_duration_highr_seconds"].samples
             if not s.name.endswith("_bucket")}  # fmt: skip
    exchanges = sum(sample.value for sample in families["toque_http_requests"].samples)
    assert whole["http_request_duration_highr_seconds_count"] == exchanges >= 5
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert "python_info" in families and "python_gc_objects_collected" in families


def test_the_flag_for_buckets_reaches_the_exposition() -> None:
    with serving(custom_histogram_buckets='{"vllm:request_params_n": [2, 3]}') as server:
        server.complete(n=2)
        samples = scrape(server)
    found = {dict(labels)["le"]: count for (name, labels), count in samples.items()
             if name == "request_params_n_bucket"}  # fmt: skip
    assert found == {"2.0": 1, "3.0": 1, "+Inf": 1}


# ------------------------------------------------------------------------------ watched KV pages


def lives_by_hand() -> list[StepReport]:
    """An engine of four pages of four tokens and a step a second; what it reported.

    A prompt of two pages comes at 0, 10 and 30 s: its first page is found twice; its second one is
    computed each time, for the sake of one token. One of three pages at 60 s needs the place of
    the second (lived 30 s), one of four at 70 s that of the first (lived 70, idle 40, gap 20) and
    of the three (lived 10 each)."""
    prompts = {0.0: [1] * 8, 10.0: [1] * 8, 30.0: [1] * 8, 60.0: [2] * 12, 70.0: [3] * 15}
    sent = [
        Request(id=str(at_s), prompt=tuple(prompt), arrived_s=at_s,
                sampling=SamplingParams(seed=1, max_tokens=1))
        for at_s, prompt in prompts.items()
    ]  # fmt: skip
    sizes = Sizes(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16, total_pages=4,
                  block_size=4, watched_pages_share=1.0)  # fmt: skip
    arrivals = ((request.arrived_s, request) for request in sent)
    made = Simulation(sizes, lambda cost: Fcfs(), lambda work: 1000.0, arrivals)
    send, reports = made.port.send, list[StepReport]()

    def kept(message: FromEngine) -> None:
        send(message)
        if isinstance(message, StepReport):
            reports.append(message)

    made.port.send = kept  # type: ignore[method-assign]
    made.run()
    return reports


def test_lives_of_pages_travel_from_the_manager_to_the_exposition() -> None:
    engine = FakeEngine()
    with serving(engine, metrics_compat="vllm") as server:
        for report in lives_by_hand():
            told = msgspec.msgpack.encode(StepReport(page_lives=report.page_lives))
            engine.outbox.append(msgspec.msgpack.decode(told, type=StepReport))
        wait_for(lambda: not engine.outbox)
        server.complete()
        samples = scrape(server)
    theirs = {"model_name": "fake", "engine": "0"}
    for name, count, total in (
        ("kv_block_lifetime_seconds", 5, 30 + 70 + 3 * 10),
        ("kv_block_idle_before_evict_seconds", 5, 30 + 40 + 3 * 10),
        ("kv_block_reuse_gap_seconds", 1, 20),
    ):
        assert value(samples, f"{name}_count") == count
        assert value(samples, f"{name}_sum") == total
        assert value(samples, f"vllm:{name}_sum", **theirs) == total
    bounds = {"5.0": 0, "10.0": 3, "20.0": 3, "30.0": 4, "60.0": 4, "120.0": 5, "+Inf": 5}
    for bound, count in bounds.items():
        assert value(samples, "kv_block_lifetime_seconds_bucket", le=bound) == count


def test_pages_have_no_lives_unless_they_are_watched() -> None:
    made = Simulation(Sizes(), lambda cost: Fcfs(), lambda work: 1.0, iter(()))
    assert made.cache.watch is None and made.scheduler.page_lives() == ()


# -------------------------------------------------------------------------- several engines, tools


def test_prompts_by_source_are_the_whole_prompts() -> None:
    """Of 100 tokens 32 were found and 48 moved; of 10 more none: what is left was computed."""
    metrics = Metrics("vllm")
    first = Counters(prompt_tokens=100, prefix_queries=100, prefix_hits=32, moved_tokens=48)
    metrics.step(StepReport(counters=first))
    metrics.step(StepReport(counters=structs.replace(first, prompt_tokens=110, prefix_queries=110)))
    text = metrics.text().decode()
    for labels, tokens in (
        ('prompt_tokens_by_source_total{source="local_compute"', 30),
        ('prompt_tokens_by_source_total{source="local_cache_hit"', 32),
        ('prompt_tokens_by_source_total{source="external_kv_transfer"', 48),
        ('prompt_tokens_cached_by_source_total{source="device"', 32),
        ('prompt_tokens_cached_by_source_total{source="p2p"', 48),
    ):
        assert f"toque_{labels}}} {tokens}.0\n" in text, labels
    assert "toque_prompt_tokens_cached_total 80.0\n" in text


def test_transfers_are_told_per_hand_over() -> None:
    metrics = Metrics()
    metrics.hello(hello := FakeEngine().outbox[0], "v")
    assert hello.block_size == 16
    fetches = (Fetched(id="a", moved_pages=5, moved_bytes=5000, seconds=0.5),
               Fetched(id="b", moved_pages=1, missing_pages=2, moved_bytes=1000, seconds=0.25),
               Fetched(id="c", cached_pages=4))  # fmt: skip
    for fetched in fetches:
        metrics.fleet(FleetReport(engines=(), transfers=Transfers(), last=fetched,
                                  stages={"in_progress": 3}))  # fmt: skip
    metrics.fleet(FleetReport(engines=(), transfers=Transfers(), stages={"completed_waiting": 1}))
    text = metrics.text().decode()
    for line in (
        "kv_transfer_seconds_count 3.0", "kv_transfer_seconds_sum 0.75",
        "kv_transfer_size_bytes_sum 6000.0", "kv_transfer_size_pages_sum 6.0",
        "kv_failed_transfers_total 1.0", "external_prefix_cache_queries_total 128.0",
        "external_prefix_cache_hits_total 96.0",
        'num_requests_kv_fetch_by_stage{stage="in_progress"} 0.0',
        'num_requests_kv_fetch_by_stage{stage="completed_waiting"} 1.0',
    ):  # fmt: skip
        assert f"toque_{line}\n" in text, line


def test_expired_leases_are_vllms_expired_requests_of_all_engines() -> None:
    metrics = Metrics("vllm")
    kept = ((Kept(released=7, expired=2), Kept(expired=3)),
            (Kept(released=9, expired=6), Kept(released=1, expired=3)))  # fmt: skip
    for each in kept:
        states = tuple(
            EngineState(index=index, role="prefill", alive=True, kept=now)
            for index, now in enumerate(each)
        )
        metrics.fleet(FleetReport(engines=states, transfers=Transfers()))
    lines = [line for line in metrics.text().decode().splitlines()
             if line.startswith("vllm:nixl_num_kv_expired_reqs_total")]  # fmt: skip
    assert lines == ['vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name=""} 9.0']
