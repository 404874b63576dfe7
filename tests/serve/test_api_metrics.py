"""/metrics: parses, adds up, and stays bounded."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fakes import FakeEngine, ServerThread, bytes_then_end, serving, wait_for
from toque.metrics import TABLE, Histogram, Metrics, Row
from toque.types import Counters, StepReport


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
