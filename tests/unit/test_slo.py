"""How classes of service are written, and when one counts as kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.errors import ConfigError
from toque.serve.keys import SCOPES, parse_keys
from toque.slo import attained, parse_slo, slo_classes
from toque.types import Slo


def test_the_flag_s_grammar() -> None:
    assert parse_slo("chat:ttft=500ms,itl=60ms") == Slo(name="chat", ttft_s=0.5, itl_s=0.06)
    assert parse_slo("batch:deadline=1m,else=downgrade") == Slo(
        name="batch", deadline_s=60.0, downgrade=True
    )
    assert parse_slo("x:itl=1.5s,else=refuse") == Slo(name="x", itl_s=1.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("chat", "a name and a colon"),
        (":ttft=1s", "a name and a colon"),
        ("a b:ttft=1s", "a name and a colon"),
        ("chat:", "known are ttft"),
        ("chat:else=downgrade", "no target"),
        ("chat:ttft=5", "write a time as"),
        ("chat:ttft=0ms", "write a time as"),
        ("chat:ttft=1h", "write a time as"),
        ("chat:ttft=1s,ttft=2s", "twice"),
        ("chat:speed=9", "known are ttft"),
        ("chat:else=panic", "known are ttft"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_slo(text)


def test_flags_and_file_add_up_and_names_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("# ours\n\nbatch:deadline=60s\n")
    names = [slo.name for slo in slo_classes(["chat:ttft=1s"], str(path))]
    assert names == ["chat", "batch"]
    with pytest.raises(ConfigError, match="'batch' twice"):
        slo_classes(["batch:ttft=1s"], str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        slo_classes([], str(tmp_path / "none"))


@given(
    st.floats(0.01, 10),
    st.lists(st.floats(0, 0.2), max_size=300),
    st.floats(0.01, 100),
)
def test_kept_is_what_the_words_say(first_s: float, gaps_s: list[float], whole_s: float) -> None:
    slo = Slo(name="all", ttft_s=1.0, itl_s=0.1, deadline_s=20.0)
    late = sum(gap > 0.1 for gap in gaps_s)
    expected = first_s <= 1.0 and whole_s <= 20.0 and late * 100 <= len(gaps_s)
    assert attained(slo, first_s, gaps_s, whole_s) == expected
    assert not attained(slo, None, gaps_s, whole_s)


def test_a_key_names_the_class_of_its_requests() -> None:
    plain, only, both = parse_keys(
        ["secret-one", "secret-two:slo=batch", "secret-three:inference,slo=chat"]
    )
    assert (plain.slo, plain.scopes) == (None, SCOPES)
    assert (only.slo, only.scopes) == ("batch", SCOPES)
    assert (both.slo, both.scopes) == ("chat", {"inference"})
    with pytest.raises(ConfigError, match="scope"):
        parse_keys(["secret-four:chat"])
