"""From replies to figures: rates, percentiles, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.client import Reply
from bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, driven once."""

    workload: Workload
    replies: Sequence[Reply]
    wall_s: float
    client_cpu_s: float  # user and system time of this process while it drove


def summarize(run: Run) -> dict[str, Any]:
    """Rates count the tokens of good replies only, over the time of all.

    `ttft`: from sending (connecting included) to the first token. `itl`: between two successive
    events of a stream; a token whose text is held back comes with the next one.
    """
    workload = run.workload
    judged = [(reply, problem(reply, workload)) for reply in run.replies]
    good = [reply for reply, wrong in judged if wrong is None]
    wrong = [wrong for _, wrong in judged if wrong is not None]
    out_tokens = sum(reply.completion_tokens for reply in good)
    first_s = [reply.first_s - reply.sent_s for reply in good if reply.first_s is not None]
    gaps_s = [gap for reply in good for gap in np.diff(reply.token_s)]
    return {
        "requests": len(run.replies),
        "errors": len(wrong),
        "error_messages": sorted(set(wrong))[:5],
        "wall_s": run.wall_s,
        "out_tokens": out_tokens,
        "counted_by": "/".join(sorted({reply.counted_by for reply in good})),
        "out_tok_per_s": out_tokens / run.wall_s,
        "prompt_tok_per_s": workload.prompt_tokens * len(good) / run.wall_s,
        "requests_per_s": len(good) / run.wall_s,
        "ttft_p50_ms": percentile_ms(first_s, 50),
        "ttft_p99_ms": percentile_ms(first_s, 99),
        "itl_p50_ms": percentile_ms(gaps_s, 50),
        "itl_p99_ms": percentile_ms(gaps_s, 99),
        "client_cpu_s": run.client_cpu_s,
    }


def problem(reply: Reply, workload: Workload) -> str | None:
    """Why a reply does not count; None for a good one. Too short an answer is an error: the
    server would be faster for having done less."""
    if reply.error is not None:
        return reply.error
    if reply.first_s is None:
        return "no token came"
    # Without usage there are events only, of which a held-back token has none.
    if reply.usage is not None and reply.completion_tokens != workload.output_tokens:
        return f"{reply.completion_tokens} tokens came, {workload.output_tokens} were asked for"
    if reply.usage is not None and reply.usage.prompt_tokens != workload.prompt_tokens:
        return f"the prompt counted {reply.usage.prompt_tokens} tokens, not the sent ones"
    return None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """None where there is nothing to rank."""
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else None
