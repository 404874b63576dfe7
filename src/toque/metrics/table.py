"""Every metric in one table: kind, name, meaning, labels, buckets, and what vLLM calls it.

Owns: names. Knows: what each number means. Does not know: where numbers come from.

Names and meanings are vLLM's with the prefix `toque_`; docs/metrics.md lists what vLLM has and this
table lacks, and why. Times are seconds; counters are exposed with `_total`.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "toque_"
OUTCOMES = ("success", "refused", "cancelled", "failed")
CAUSES = (
    *("validation", "unauthorized", "forbidden", "not_found", "conflict", "too_large"),
    *("overload", "unavailable", "engine", "internal", "cancelled"),
)

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
BODY_BYTES = tuple(float(4**k) for k in range(3, 14))
TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TRANSFER_BYTES = tuple(float(2**k) for k in range(11, 34, 2))
TRANSFER_PAGES = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))
PAGE_LIFE_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
ERROR_SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
FEW = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Row:
    kind: str  # counter, gauge or histogram
    name: str  # without the prefix; counters are exposed with _total
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str | None = None  # vLLM's name where it has this metric; "" = the same


def gauge(name: str, help: str, *labels: str, vllm: str | None = None) -> Row:
    return Row("gauge", name, help, labels, vllm=vllm)


def counter(name: str, help: str, *labels: str, vllm: str | None = None) -> Row:
    return Row("counter", name, help, labels, vllm=vllm)


def spread(
    name: str, help: str, buckets: tuple[float, ...], *labels: str, vllm: str | None = None
) -> Row:
    return Row("histogram", name, help, labels, buckets, vllm)


SCHEDULER = (
    gauge("num_requests_running", "Sequences in the running batch.", vllm=""),
    gauge("num_requests_waiting", "Sequences in the queue.", vllm=""),
    gauge("open_requests", "Sequences sent to the engine and not finished."),
    gauge(
        "num_requests_waiting_by_reason",
        "The same, by the reason why nothing of them is computed.",
        "reason",
        vllm="",
    ),
    gauge("queue_age_seconds", "How long the oldest sequence has been in the queue."),
    gauge("queue_tokens", "Tokens to be computed before the queue is empty."),
    gauge("queue_backlog_seconds", "How long computing them is predicted to take."),
    counter("admission_rejections", "Sequences the engine refused, by cause.", "reason", vllm=""),
    counter("num_preemptions", "Preemptions.", vllm=""),
    counter("wasted_tokens", "Tokens computed for nothing, by cause.", "cause"),
    counter("engine_steps", "Steps of the engine."),
    spread("step_time_seconds", "One step, by stage.", STEP_S, "stage"),
    spread("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS, vllm=""),
    gauge("step_predicted_seconds", "How long the engine expects its long step to take."),
    spread(
        "step_prediction_error_ratio",
        "How far a step's predicted time was off, as a share of its real one.",
        ERROR_SHARE,
    ),
)
MEMORY = (
    gauge(
        "kv_cache_usage_ratio",
        "Pages held by requests, share of all pages.",
        vllm="kv_cache_usage_perc",
    ),
    gauge("kv_cache_pages", "KV pages by state: free, cached, held.", "state"),
    gauge(
        "kv_cache_fragmentation_ratio",
        "Share of the token places in held pages that hold no token.",
    ),
    counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", vllm=""),
    counter("prefix_cache_hits", "Tokens found in the prefix cache.", vllm=""),
    counter(
        "external_prefix_cache_queries", "Tokens asked of the engine that computes them.", vllm=""
    ),
    counter("external_prefix_cache_hits", "Tokens whose pages came from there.", vllm=""),
    gauge(
        "cache_config_info",
        "1; the settings of the KV cache, as labels.",
        *("block_size", "num_gpu_blocks", "cache_dtype"),
        vllm="",
    ),
    spread(
        "kv_block_lifetime_seconds",
        "From a KV page's allocation to its eviction, of the pages that are watched.",
        PAGE_LIFE_S,
        vllm="",
    ),
    spread(
        "kv_block_idle_before_evict_seconds",
        "From a request's last finding the page in the prefix cache to its eviction.",
        PAGE_LIFE_S,
        vllm="",
    ),
    spread(
        "kv_block_reuse_gap_seconds",
        "Between two requests that found the page there, of the last ones before its eviction.",
        PAGE_LIFE_S,
        vllm="",
    ),
)
TOKENS = (
    counter("prompt_tokens", "Prompt tokens of admitted requests.", vllm=""),
    counter(
        "prompt_tokens_by_source",
        "The same: computed here, found in the prefix cache, or computed by another engine.",
        "source",
        vllm="",
    ),
    counter("prompt_tokens_cached", "Prompt tokens that needed no computation here.", vllm=""),
    counter(
        "prompt_tokens_cached_by_source",
        "The same: device = in this engine's prefix cache, p2p = brought from another engine.",
        "source",
        vllm="",
    ),
    counter("generation_tokens", "Tokens generated.", vllm=""),
    counter("computed_tokens", "Tokens run through the model, recomputation included."),
    counter("recomputed_tokens", "Tokens computed again after a preemption."),
)
REQUESTS = (
    counter("corrupted_requests", "Sequences whose logits were not numbers.", vllm=""),
    counter(
        "tool_call_parser_invocations",
        "Choices that were read for tool calls, once each, by whether there were any.",
        *("mode", "request_type", "outcome"),
        vllm="",
    ),
    counter("request_success", "Sequences that ended, by reason.", "finished_reason", vllm=""),
    spread("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S,
           vllm=""),
    spread("inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_GAP_S,
           vllm=""),
    spread(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request, one observation per request.",
        TOKEN_GAP_S,
        vllm="",
    ),
    spread("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S, vllm=""),
    spread("request_queue_time_seconds", "From arrival to admission.", REQUEST_S, vllm=""),
    spread("request_inference_time_seconds", "From admission to the end.", REQUEST_S, vllm=""),
    spread("request_prefill_time_seconds", "From admission to the first token.", REQUEST_S,
           vllm=""),
    spread("request_decode_time_seconds", "From the first token to the end.", REQUEST_S, vllm=""),
    spread("request_prompt_tokens", "Prompt length, tokens.", LENGTH_TOKENS, vllm=""),
    spread("request_generation_tokens", "Output length, tokens.", LENGTH_TOKENS, vllm=""),
    spread(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens that the prefix cache did not have.",
        LENGTH_TOKENS,
        vllm="",
    ),
    spread("request_params_max_tokens", "max_tokens of a sequence.", LENGTH_TOKENS, vllm=""),
    spread("request_params_n", "Sequences of a call.", FEW, vllm=""),
    spread("request_num_preemptions", "Preemptions of a sequence.", (0.0, *FEW), vllm=""),
    spread(
        "request_max_num_generation_tokens",
        "The longest output of a call, tokens.",
        LENGTH_TOKENS,
        vllm="",
    ),
)  # fmt: skip
SLO = (
    counter(
        "slo_requests",
        "Sequences with a class that ended: met, missed, refused, failed, or left by the client.",
        *("slo_class", "verdict"),
    ),
    counter("slo_misses", "Targets that were missed.", "slo_class", "target"),
    counter("slo_goodput_tokens", "Output of the sequences that met their targets.", "slo_class"),
    counter("slo_downgraded", "Sequences that wait without their class's promise."),
    gauge(
        "slo_attainment_ratio",
        "Share of promises kept within the last 5 minutes; those whose client left do not count.",
        "slo_class",
    ),
)
CALLS = (
    gauge("calls_in_progress", "Generation calls that have not ended."),
    counter("calls_received", "Generation calls that arrived; each counts once, whatever n."),
    counter("calls_finished", "Generation calls that ended, by outcome.", "outcome"),
    counter("requests_refused", "Generation calls refused, by HTTP status.", "status"),
    counter("errors", "Generation calls that did not succeed, by cause.", "cause"),
    counter("key_calls", "Generation calls that ended, by API key.", "key"),
    counter("key_prompt_tokens", "Prompt tokens of admitted requests, by API key.", "key"),
    counter("key_generation_tokens", "Tokens generated, by API key.", "key"),
    counter("slow_readers", "Connections cut because the client did not read."),
    counter("slow_senders", "Connections cut because a request took too long to arrive."),
    counter("http_requests", "HTTP exchanges.", "route", "method", "status"),
    spread("http_request_duration_seconds", "From first byte in to last byte out.", REQUEST_S,
           "route"),
    spread("http_request_size_bytes", "Declared size of request bodies.", BODY_BYTES, "route"),
    spread("http_response_size_bytes", "Size of response bodies.", BODY_BYTES, "route"),
)  # fmt: skip
SERVER = (
    gauge("info", "1; what is served, as labels.", "version", "model_name", "fingerprint"),
    gauge("process_start_time_seconds", "Unix time at which the server started."),
    gauge("startup_seconds", "How long each phase of the start took.", "phase"),
    gauge("engine_silence_seconds", "Since the engine's last word, while it has work; else 0."),
    gauge("engine_up", "1 while this engine of several is there.", "engine", "role"),
    gauge("engine_open_requests", "Requests that an engine has.", "engine", "role"),
    gauge("engine_held_pages", "Pages that an engine's requests hold.", "engine", "role"),
    counter("engine_computed_tokens", "Tokens run through it.", "engine", "role"),
    counter("engine_restarts", "Engines that were started again.", "engine", "role"),
    spread("event_loop_delay_seconds", "How late the server's event loop wakes up.", STEP_S),
    counter("anomalies", "Reports of the engine whose totals went backwards."),
)
BETWEEN = (
    gauge(
        "num_requests_kv_fetch_by_stage",
        "Requests that take pages of another engine and have no token yet, by stage.",
        "stage",
        vllm="",
    ),
    counter("moved_requests", "Requests that went on at another engine."),
    gauge("engine_leases", "Prompts whose pages it keeps for others.", "engine", "role"),
    gauge("engine_oldest_lease_seconds", "Age of the oldest of these.", "engine", "role"),
    counter(
        "engine_leases_ended",
        "These when they end: released by the reader, or expired because it did not.",
        *("engine", "role", "end"),
        vllm="nixl_num_kv_expired_reqs",
    ),
    counter(
        "engine_rejected_peers",
        "Connections for pages without the secret, or with nonsense.",
        *("engine", "role"),
    ),
    counter(
        "kv_transfer_pages",
        "Pages of prompts handed over: moved, cached (no need to), missing (computed again).",
        "fate",
    ),
    counter(
        "kv_transfer_failed_pages",
        "Pages that were asked for and not used: corrupt, stale, late or lost; each try counts.",
        "cause",
    ),
    counter("kv_transfer_timeouts", "Hand-overs that were not complete at their deadline."),
    counter(
        "kv_transfer_discarded_pages", "Pages that came when their hand-over was over already."
    ),
    counter("kv_transfer_bytes", "Bytes of pages that travelled between engines."),
    counter(
        "kv_failed_transfers",
        "Hand-overs of which a page did not come, or was not what it should be.",
        vllm="nixl_num_failed_transfers",
    ),
    spread(
        "kv_transfer_seconds",
        "From the order to fetch a prompt's pages until its request could go on.",
        TRANSFER_S,
        vllm="nixl_xfer_time_seconds",
    ),
    spread(
        "kv_transfer_size_bytes",
        "Bytes that travelled for one prompt.",
        TRANSFER_BYTES,
        vllm="nixl_bytes_transferred",
    ),
    spread(
        "kv_transfer_size_pages",
        "Pages that travelled for one prompt.",
        TRANSFER_PAGES,
        vllm="nixl_num_descriptors",
    ),
)
TABLE = SCHEDULER + MEMORY + TOKENS + REQUESTS + SLO + CALLS + SERVER + BETWEEN
