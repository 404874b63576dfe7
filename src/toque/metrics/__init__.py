"""Every metric in one table (`table.py`), its values (`values.py`), and vLLM's names for them."""

from toque.metrics.buckets import custom_buckets
from toque.metrics.histogram import Histogram
from toque.metrics.slo import Pace
from toque.metrics.table import CAUSES, OUTCOMES, TABLE, Row
from toque.metrics.values import CONTENT_TYPE, Metrics

__all__ = [
    "CAUSES",
    "CONTENT_TYPE",
    "OUTCOMES",
    "TABLE",
    "Histogram",
    "Metrics",
    "Pace",
    "Row",
    "custom_buckets",
]
