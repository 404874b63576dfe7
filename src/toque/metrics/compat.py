"""vLLM's names over the same values, for dashboards that exist (`--metrics-compat vllm`).

Owns: nothing. Knows: which of our metrics vLLM has, under which name and labels.
Does not know: values; it reads those of the table's collectors at every exposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from toque.metrics.table import PREFIX, TABLE, Row

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


class VllmNames(Collector):
    """`vllm:…{…, model_name, engine}` for every row that has a vLLM name."""

    def __init__(self, collectors: Mapping[str, Collector]) -> None:
        """`collectors`: of the table's rows, by name."""
        self._collectors = collectors
        self.model_name = ""

    def describe(self) -> Iterable[Metric]:
        return []  # its names are checked against no other collector's

    def collect(self) -> Iterable[Metric]:
        for row in TABLE:
            if row.vllm is not None:
                for metric in self._collectors[row.name].collect():
                    yield self._renamed(row, metric)

    def _renamed(self, row: Row, metric: Metric) -> Metric:
        ours, theirs = PREFIX + row.name, VLLM_PREFIX + (row.vllm or row.name)
        renamed = Metric(theirs, metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                name = theirs + sample.name.removeprefix(ours)
                labels = tuple(self._labels(row, sample.labels).items())
                values[name, labels] = values.get((name, labels), 0.0) + sample.value
        renamed.samples = [Sample(name, dict(of), v) for (name, of), v in values.items()]
        return renamed

    def _labels(self, row: Row, labels: Mapping[str, str]) -> dict[str, str]:
        words = _RENAMED.get(row.name, {})
        renamed = {name: words.get(v, words.get("", v)) for name, v in labels.items()}
        return {**renamed, "model_name": self.model_name, "engine": ENGINE}
