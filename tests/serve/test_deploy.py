"""What `deploy/` asks for exists: every metric and every label, in what a server really exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.serve.fakes import serving
from toque.metrics import TABLE

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def expressions(name: str) -> list[str]:
    text = (DEPLOY / name).read_text()
    if name.endswith(".json"):
        panels = json.loads(text)["panels"]
        found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    else:
        found = re.findall(r"expr: (?:>\s+)?((?:.|\n)+?)\n\s+(?:for|labels):", text)
    assert len(found) > 8
    return found


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Names of series as Prometheus would store them."""
    with serving() as server:
        server.complete()
        lines = server.http.get("/metrics").text.splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    return {name + suffix for name, kind in kinds.items() for suffix in SUFFIXES[kind]}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_every_metric_named_in_deploy_is_exposed(name: str, exposed: set[str]) -> None:
    asked = {word for expr in expressions(name) for word in re.findall(r"toque_\w+", expr)}
    assert asked and asked <= exposed, sorted(asked - exposed)


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_every_label_named_in_deploy_exists(name: str) -> None:
    known = {label for row in TABLE for label in row.labels} | {"le", "job", "instance"}
    for expr in expressions(name):
        listed = re.findall(r"by \(([^)]*)\)", expr)
        labels = {label.strip() for part in listed for label in part.split(",")}
        labels |= set(re.findall(r"(\w+)(?:=~|!=|=)\"", expr))
        assert labels <= known, expr


def test_boxes_of_the_table_are_all_on_the_dashboard() -> None:
    """At least what has no other home: promises, waste, errors, silence."""
    text = " ".join(expressions("grafana.json"))
    for name in ("slo_attainment_ratio", "wasted_tokens", "errors", "engine_silence_seconds",
                 "kv_cache_fragmentation_ratio", "step_prediction_error_ratio"):  # fmt: skip
        assert f"toque_{name}" in text
    for row in TABLE:  # and what goes wrong between engines
        wrong = row.name.startswith(("engine_leases", "engine_oldest", "engine_rejected"))
        if wrong or (row.name.startswith("kv_transfer_") and row.kind == "counter"):
            assert f"toque_{row.name}" in text
