"""Verdicts that keep two numbers per stream agree with the definition that keeps every gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toque.metrics.slo import FAILED, LEFT, MET, MISSED, WINDOW_S, Attainment, Pace, verdict
from toque.slo import attained
from toque.types import Finished, FinishReason, Request, SamplingParams, Slo, Times, Usage

times_s = st.floats(0.0, 4.0, allow_nan=False).map(lambda t: round(t, 3))
targets = st.one_of(st.none(), st.floats(0.01, 4.0).map(lambda t: round(t, 3)))


def request(slo: Slo | None) -> Request:
    return Request(id="r", prompt=(1,), sampling=SamplingParams(seed=1), arrived_s=0.0, slo=slo)


def finished(reason: FinishReason, at_s: float) -> Finished:
    return Finished(id="r", reason=reason, usage=Usage(prompt_tokens=1),
                    times=Times(arrived_s=0.0, finished_s=at_s))  # fmt: skip


@given(targets, targets, targets, times_s, st.lists(times_s, max_size=250), times_s)
def test_a_verdict_is_the_definition(
    ttft_s: float | None, itl_s: float | None, deadline_s: float | None,
    first_s: float, gaps_s: list[float], rest_s: float,
) -> None:  # fmt: skip
    slo = Slo(name="c", ttft_s=ttft_s, itl_s=itl_s, deadline_s=deadline_s)
    pace = Pace(request(slo))
    now_s = first_s
    assert pace.came(1, now_s) is None
    seen_s = []
    for gap_s in gaps_s:
        seen_s.append(pace.came(1, now_s := now_s + gap_s))
    whole_s = now_s + rest_s
    word, missed = verdict(pace, finished(FinishReason.STOP, whole_s))
    kept = attained(slo, first_s, [gap for gap in seen_s if gap is not None], whole_s)
    assert (word == MET) == kept and (word == MISSED) == bool(missed) == (not kept)


def test_tokens_that_come_together_share_their_gap() -> None:
    pace = Pace(request(Slo(name="c", itl_s=0.1)))
    pace.came(3, 1.0)
    assert pace.came(4, 1.6) == (1.6 - 1.0) / 4
    assert pace.gaps == pace.late_gaps == 4


def test_one_gap_in_a_hundred_may_be_late() -> None:
    for gaps, kept in ((99, False), (100, True)):
        pace = Pace(request(Slo(name="c", itl_s=1.0)))
        pace.came(1, 0.0)
        for place in range(gaps):
            pace.came(1, pace.last_s + (2.0 if place == 5 else 0.5))
        assert (verdict(pace, finished(FinishReason.LENGTH, 200.0))[0] == MET) == kept


def test_who_left_or_failed_is_neither_met_nor_missed() -> None:
    pace = Pace(request(Slo(name="c", ttft_s=0.1)))
    pace.came(1, 9.0)
    assert verdict(pace, finished(FinishReason.ABORT, 9.0)) == (LEFT, ())
    assert verdict(pace, finished(FinishReason.ERROR, 9.0)) == (FAILED, ())


def test_attainment_forgets() -> None:
    window = Attainment()
    window.add("c", False, 0.0)
    window.add("c", True, 10.0)
    assert window.ratio("c", 20.0) == 0.5
    assert window.ratio("c", WINDOW_S + 5.0) == 1.0
    assert window.ratio("c", WINDOW_S + 50.0) is None and window.ratio("other", 0.0) is None
