"""`python -m bench.structured URL`: what structured output costs a server.

The same closed loop with and without a JSON schema, in turn, so that both see the same machine;
then the time to the first token with a schema of 100 kB: new, and known already. A table on
standard error, one JSON line on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.client import Address, complete, parse_url, request_body
from bench.load import closed_loop, run_loop, served_model
from bench.machine import describe_machine
from bench.summary import Run, summarize
from bench.workloads import DEFAULT_VOCAB_SIZE, Workload, make_prompts

SCHEMA_BYTES = 100_000
# Never complete within an answer's tokens: both kinds of answers are equally long.
RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["id", "name", "kind", "score", "tags"],
        "additionalProperties": False,
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    address = parse_url(options.url)
    model = options.model or served_model(address)
    result = {
        "throughput": throughput(address, model, options),
        "first_token_ms": first_tokens(address, model, options.seed),
    }
    line = {"bench": "structured", "model": model, "result": result, "machine": describe_machine()}
    print(json.dumps(line), flush=True)
    return int(any(run["errors"] for run in result["throughput"]["runs"]))


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    out.add_argument("url", help="e.g. http://127.0.0.1:8000")
    out.add_argument("--model", help="name in the request [the first of /v1/models]")
    out.add_argument("--clients", type=int, default=16)
    out.add_argument("--requests", type=int, default=16, help="per round [16]")
    out.add_argument("--rounds", type=int, default=3, help="of each kind, in turn [3]")
    out.add_argument("--output-tokens", type=int, default=64)
    out.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    return out


def body_of(model: str, prompt: Sequence[int], tokens: int, schema: Any) -> bytes:
    """Greedy and streamed; bound by `schema` where there is one."""
    plain = request_body(model, prompt, tokens, seed=0)
    if schema is None:
        return plain
    body = {**json.loads(plain), "ignore_eos": False, "structured_outputs": {"json": schema}}
    return msgspec.json.encode(body)


def throughput(address: Address, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of each kind, medians over the rounds, and their ratio."""
    workload = Workload(
        "structured", options.requests, options.clients, 64, output_tokens=options.output_tokens
    )
    runs: list[dict[str, Any]] = []
    for number in range(-1, 2 * options.rounds):  # the first one warms up
        schema = RECORDS if number % 2 else None
        seed = options.seed + 100 + number  # no round finds another's prompts in the cache
        prompts = make_prompts(workload, seed, DEFAULT_VOCAB_SIZE)
        bodies = [body_of(model, prompt, options.output_tokens, schema) for prompt in prompts]
        cpu_s, t0 = time.process_time(), time.perf_counter()
        replies = run_loop(closed_loop(address, bodies, options.clients, 900.0))
        wall_s, cpu_s = time.perf_counter() - t0, time.process_time() - cpu_s
        found = summarize(Run(workload, replies, wall_s, cpu_s)) | {"schema": schema is not None}
        if number >= 0:
            runs.append(found)
            show(found)
    bound, free = (
        statistics.median(run["out_tok_per_s"] for run in runs if run["schema"] is kind)
        for kind in (True, False)
    )
    print(f"with a schema {bound / free:.3f} of without, medians", file=sys.stderr)
    return {"ratio": bound / free, "bound_tok_per_s": bound, "free_tok_per_s": free, "runs": runs}


def show(run: dict[str, Any]) -> None:
    kind = "schema" if run["schema"] else "free"
    figures = f"{run['out_tok_per_s']:7.1f} tok/s, errors {run['errors']}/{run['requests']}"
    print(f"{kind:7} {figures} {run['error_messages'] or ''}", file=sys.stderr)


def first_tokens(address: Address, model: str, seed: int) -> dict[str, float]:
    """Milliseconds to the first token, one request at a time: free, then with a large schema
    that is new and that is known. Raises RuntimeError for a request that failed."""
    schema, out = large_schema(seed), {}
    for name, given in (("free", None), ("new schema", schema), ("known schema", schema)):
        prompt = make_prompts(Workload(name, 1, 1, 32, 4), seed + 7, DEFAULT_VOCAB_SIZE)[0]
        reply = run_loop(complete(address, body_of(model, prompt, 4, given), 120.0))
        if reply.error is not None or reply.first_s is None:
            raise RuntimeError(f"{name}: {reply.error}")
        out[name] = (reply.first_s - reply.sent_s) * 1e3
        print(f"first token, {name}: {out[name]:.0f} ms", file=sys.stderr)
    out["schema_bytes"] = float(len(json.dumps(schema)))
    return out


def large_schema(seed: int) -> dict[str, Any]:
    """A form of sections and fields, described as people do, of SCHEMA_BYTES or a little more."""
    sections: dict[str, Any] = {}
    while len(json.dumps(sections)) < SCHEMA_BYTES:
        fields = {
            f"field_{seed}_{len(sections)}_{number}": {
                "type": ("string", "integer", "boolean")[number % 3],
                "description": f"The field number {number} of a form that is filled in by hand",
            }
            for number in range(20)
        }
        sections[f"section_{len(sections)}"] = {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    return {
        "type": "object",
        "properties": sections,
        "required": list(sections),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    sys.exit(main())
