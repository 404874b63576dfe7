"""`--custom-histogram-buckets`: every histogram by all its names, and nothing that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from toque.cli import main
from toque.errors import ConfigError
from toque.metrics import Metrics, custom_buckets


def bounds(text: str) -> dict[str, set[str]]:
    """Of each histogram of an exposition, as Prometheus reads them."""
    return {
        family.name: {s.labels["le"] for s in family.samples if s.name.endswith("_bucket")}
        for family in text_string_to_metric_families(text)
        if family.type == "histogram"
    }


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        (f"{prefix}time_to_first_token_seconds", "time_to_first_token_seconds",
         "time_to_first_token_seconds")
        for prefix in ("", "toque_", "vllm:")
    ] + [
        (name, "kv_transfer_seconds", "nixl_xfer_time_seconds")
        for name in ("kv_transfer_seconds", "toque_kv_transfer_seconds", "nixl_xfer_time_seconds",
                     "vllm:nixl_xfer_time_seconds")
    ],
)  # fmt: skip
def test_a_histogram_has_the_buckets_it_was_given_under_each_name(
    name: str, ours: str, theirs: str
) -> None:
    given = custom_buckets(json.dumps({name: [0.5, 2, 7.25]}))
    metrics, plain = Metrics("vllm", buckets=given), Metrics("vllm")
    for each in (metrics, plain):
        each.exchange("/x", 0.1, 1, 1)
    changed, usual = bounds(metrics.text().decode()), bounds(plain.text().decode())
    asked = {f"toque_{ours}", f"vllm:{theirs}"}
    assert {name for name in usual if changed[name] != usual[name]} == asked
    for each in asked:
        assert changed[each] == {"0.5", "2.0", "7.25", "+Inf"}


def test_values_fall_into_the_buckets_that_were_given() -> None:
    metrics = Metrics(buckets=custom_buckets('{"time_to_first_token_seconds": [1, 3]}'))
    for waited_s in (0.5, 1.0, 2.0, 3.5):
        metrics.first_token(waited_s)
    text = metrics.text().decode()
    for bound, count in (("1.0", 2), ("3.0", 3), ("+Inf", 4)):
        assert f'toque_time_to_first_token_seconds_bucket{{le="{bound}"}} {count}.0\n' in text


NAME = "time_to_first_token_seconds"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "must be a JSON object"),
        ('[["a", [1]]]', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"no_such_seconds": [1]}', "no histogram 'no_such_seconds'"),
        ('{"prompt_tokens": [1]}', "no histogram 'prompt_tokens'"),  # a counter
        ('{"toque_nixl_xfer_time_seconds": [1]}', "no histogram 'toque_nixl_xfer"),
        ('{"vllm:step_time_seconds": [1]}', "no histogram 'vllm:step_time_seconds'"),
        (f'{{"{NAME}": [1], "vllm:{NAME}": [2]}}', f"'vllm:{NAME}'"),
        (f'{{"{NAME}": [1], "{NAME}": [2]}}', f"'{NAME}' twice"),
        *(
            (f'{{"{NAME}": {wrong}}}', f"the bounds of '{NAME}'")
            for wrong in ("[]", "[1, 1]", "[2, 1]", "[1, NaN]", "[NaN]", "[1, Infinity]", "[true]",
                          '["1"]', "1", "null", '{"1": 2}', "[1" + "0" * 400 + "]", "[1e400]",
                          "[9007199254740992, 9007199254740993]", "[[1]]")
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        custom_buckets(text)
    assert complaint in str(refused.value)


def test_nothing_said_changes_nothing() -> None:
    assert custom_buckets(None) == custom_buckets("{}") == {}


def test_a_server_with_an_unknown_name_does_not_start(capsys: Any) -> None:
    """Refused before the model, which is not there either, is looked for."""
    wrong = '{"no_such_seconds": [1]}'
    assert main(["serve", "/nowhere", "--custom-histogram-buckets", wrong]) != 0
    assert "no_such_seconds" in capsys.readouterr().err
