"""vLLM's names over the same values, for dashboards that exist (`--metrics-compat vllm`).

Owns: nothing. Knows: which of our metrics vLLM has, under which name and labels.
Does not know: values; it reads those of the table's collectors at every exposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from toque.metrics.table import PREFIX, TABLE, Row

Relabel = Callable[[Mapping[str, str]], dict[str, str] | None]  # None: it has no such sample
VLLM_PREFIX = "vllm:"
ENGINE = "0"  # vLLM numbers its engines
# Our values of a label -> vLLM's; what is not listed becomes the default under "".
_RENAMED = {
    "num_requests_waiting_by_reason": {"shared_page": "deferred", "": "capacity"},
    "admission_rejections": {
        "queue_requests": "max_num_queued_reqs",
        "queue_tokens": "max_num_queued_tokens",
    },
}

# Of these vLLM has the samples with one value of a label, summed up over all other labels.
_ONLY = {"engine_leases_ended": ("end", "expired")}

# Ours -> what its HTTP server exports beside them, without prefix, model and engine.
_HTTP = {
    "http_requests": "http_requests",
    "http_request_duration_seconds": "http_request_duration_seconds",
    "http_request_size_bytes": "http_request_size_bytes",
    "http_response_size_bytes": "http_response_size_bytes",
}
_WHOLE = "http_request_duration_highr_seconds"  # the durations over all routes


class VllmNames(Collector):
    """`vllm:…{…, model_name, engine}` for every row that has a vLLM name, and the plain names of
    its HTTP server."""

    def __init__(self, collectors: Mapping[str, Collector]) -> None:
        """`collectors`: of the table's rows, by name."""
        self._collectors = collectors
        self.model_name = ""

    def describe(self) -> Iterable[Metric]:
        return []  # its names are checked against no other collector's

    def collect(self) -> Iterable[Metric]:
        for row in TABLE:
            if row.vllm is not None:
                theirs = VLLM_PREFIX + (row.vllm or row.name)
                yield from self._renamed(row.name, theirs, partial(self._labels, row))
        for ours, theirs in _HTTP.items():
            yield from self._renamed(ours, theirs, _http_labels)
        yield from self._renamed(_HTTP["http_request_duration_seconds"], _WHOLE, _only_bounds)

    def _renamed(self, name: str, theirs: str, labels: Relabel) -> Iterable[Metric]:
        """The row's metrics; samples whose labels become the same are added up."""
        for metric in self._collectors[name].collect():
            renamed = Metric(theirs, metric.documentation, metric.type)
            values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            for sample in metric.samples:
                relabelled = labels(sample.labels)
                if relabelled is not None and not sample.name.endswith("_created"):
                    key = theirs + sample.name.removeprefix(PREFIX + name)
                    of = tuple(relabelled.items())
                    values[key, of] = values.get((key, of), 0.0) + sample.value
            renamed.samples = [Sample(key, dict(of), v) for (key, of), v in values.items()]
            yield renamed

    def _labels(self, row: Row, labels: Mapping[str, str]) -> dict[str, str] | None:
        if row.name in _ONLY:
            label, wanted = _ONLY[row.name]
            if labels[label] != wanted:
                return None
            labels = {}
        words = _RENAMED.get(row.name, {})
        renamed = {name: words.get(v, words.get("", v)) for name, v in labels.items()}
        return {**renamed, "model_name": self.model_name, "engine": ENGINE}


def _http_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """A route is its handler, a status its class."""
    renamed = {"handler" if name == "route" else name: value for name, value in labels.items()}
    if "status" in renamed:
        renamed["status"] = renamed["status"][0] + "xx"
    return renamed


def _only_bounds(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name == "le"}
