"""The page with several engines: each is shown, one is chosen, one that is lost is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.browsing import PHONE, Visit, chromium, needed
from tests.serve.fakes import FakeEngine, serving
from tests.serve.live import Live
from tests.serve.live import serving as serving_live
from toque.types import Branch, EngineState, FleetReport, Kept, Load, Look, Snapshot, Transfers

pytestmark = needed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class TwoEngines(FakeEngine):
    """Says that it is two: the second one's pool has other sizes, and a tree of three branches."""

    def send(self, message: Any) -> None:
        if isinstance(message, Look) and message.engine == 1:
            self.got.append(message)
            tree = (Branch(pages=4), Branch(parent=0, pages=2), Branch(parent=0, pages=3))
            pages = bytes([2] * 12 + [1] * 18 + [0] * 10)
            self.outbox.append(Snapshot(step=5, pages=pages, tree=tree, branches=3, engine=1))
        else:
            super().send(message)

    def tell(self, second: EngineState, **transfers: Any) -> None:
        first = EngineState(
            index=0,
            role="prefill",
            alive=True,
            open_requests=3,
            kept=Kept(leases=2, oldest_lease_s=1.5, expired=1),
            load=Load(total_pages=100, free_pages=90, held_pages=10),
        )
        report = FleetReport(engines=(first, second), transfers=Transfers(**transfers))
        self.outbox.append(report)


NUMBERS = """['held', 'shared', 'cached', 'free']
    .map((state) => document.getElementById('n-' + state).textContent).join()"""
BRANCHES = "document.querySelectorAll('#tree rect').length"
ALIVE = EngineState(
    index=1,
    role="decode",
    alive=True,
    open_requests=1,
    load=Load(total_pages=40, free_pages=10, cached_pages=18, held_pages=12),
)
LOST = EngineState(index=1, role="decode", alive=False, restarts=1)
STARTING = EngineState(index=1, role="decode", alive=False, starting=True, restarts=1)


def card(visit: Visit, index: int) -> str:
    text: str = visit.page.locator("#engines .engine").nth(index).inner_text()
    return " ".join(text.split())


def transfers(visit: Visit) -> dict[str, str]:
    rows = "[...document.querySelectorAll('#transfers div')]"
    return dict(
        visit.page.evaluate(rows + ".map((row) => [...row.children].map((c) => c.textContent))")
    )


def shown_pill(index: int, text: str) -> str:
    return f"document.querySelectorAll('#engines .pill')[{index}]?.textContent === '{text}'"


def test_each_engine_is_shown_with_what_it_has(browser: Any) -> None:
    engine = TwoEngines()
    failed = {"corrupt": 2, "late": 1}
    engine.tell(ALIVE, moved_pages=70, moved_bytes=2_500_000, failed=failed, missing_pages=5,
                cached_pages=9, fetches=4, moves=6, seconds=0.2)  # fmt: skip
    with serving(engine) as server:
        visit = Visit(browser, server.url)
        visit.wait(shown_pill(1, "alive"))
        assert card(visit, 0).startswith("engine 0 prefill alive 3 open requests · no restart")
        assert "10\u202f% of 100 pages held" in visit.page.locator(".engine").nth(0).inner_text()
        assert card(visit, 1).startswith("engine 1 decode alive 1 open request · no restart")
        assert "30\u202f% of 40 pages held · 18 cached" in visit.page.locator(
            ".engine").nth(1).inner_text()  # fmt: skip
        told = transfers(visit)
        assert told["pages moved"] == "70" and told["bytes moved"] == "2.50\u202fMB"
        assert told["verification failures"] == "2" and told["pages recomputed"] == "5"
        assert told["pages there already"] == "9" and told["requests moved"] == "6"
        assert told["time of all"] == "200\u202fms" and told["time of one"] == "50\u202fms"
        assert told["pages not used"] == "2 corrupt, 1 late"
        assert told["leases · engine 0"] == "2" and told["leases expired · engine 0"] == "1"
        assert told["oldest lease · engine 0"] == "1.50\u202fs"
        assert visit.page.locator("#transfers .some").all_inner_texts() == [
            *("2", "2 corrupt, 1 late", "1"),
        ]
        visit.close()


def test_the_map_and_the_tree_are_those_of_the_chosen_engine(browser: Any) -> None:
    engine = TwoEngines()
    engine.tell(ALIVE)
    with serving(engine) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        visit.wait(f"{NUMBERS} === '9,1,0,90' && {BRANCHES} === 2")
        page.click("#engines .engine:nth-child(2)")
        visit.wait(f"{NUMBERS} === '12,0,18,10' && {BRANCHES} === 3")
        assert page.locator("#whose").inner_text() == "of engine 1, decode"
        page.keyboard.press("ArrowLeft")  # the other one of the group
        visit.wait(f"{NUMBERS} === '9,1,0,90' && {BRANCHES} === 2")
        assert (
            page.evaluate("getComputedStyle(document.activeElement.parentNode).outlineStyle")
            != "none"
        )
        engine.tell(LOST)
        page.keyboard.press("ArrowRight")
        visit.wait("document.getElementById('pages').hidden")
        assert "lost" in page.locator("#pages-empty").inner_text()
        assert page.locator("#n-free").inner_text() == "0"
        assert page.locator("#tree").is_hidden()
        visit.close()


def test_a_life_is_told_alive_lost_starting_and_alive_again(browser: Any) -> None:
    engine = TwoEngines()
    engine.tell(ALIVE)
    with serving(engine) as server:
        visit = Visit(browser, server.url)
        for state, word in (
            (ALIVE, "alive"),
            (LOST, "lost"),
            (STARTING, "starting"),
            (ALIVE, "alive"),
        ):
            engine.tell(state)
            visit.wait(shown_pill(1, word))
            assert ("1 restart" in card(visit, 1)) == bool(state.restarts)
            visit.wait(f"document.getElementById('fleet-note').textContent.startsWith("
                       f"'{2 if state.alive else 1} of 2')")  # fmt: skip
        visit.close()


def test_one_engine_has_no_box_of_engines(browser: Any) -> None:
    with serving() as server:
        visit = Visit(browser, server.url)
        visit.wait("document.getElementById('n-shared').textContent === '1'")
        assert visit.page.locator("#fleet").is_hidden() and visit.page.locator("#whose").is_hidden()
        visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_engines_fit_a_phone(browser: Any, scheme: str) -> None:
    engine = TwoEngines()
    engine.tell(ALIVE, moved_pages=10**7, moved_bytes=10**13, seconds=1e5, fetches=3)
    with serving(engine) as server:
        visit = Visit(browser, server.url, viewport=PHONE, color_scheme=scheme, has_touch=True)
        visit.wait(shown_pill(1, "alive"))
        visit.page.tap("#engines .engine:nth-child(2)")
        visit.wait(f"{BRANCHES} === 3")
        assert visit.too_wide_px() <= 0
        visit.close()


def test_a_killed_engine_is_lost_and_comes_back(
    browser: Any, tiny_config: Path, tmp_path: Path
) -> None:
    """The real thing: pages move and are counted, the map is the decoding engine's own."""
    flags = (
        "--load-format",
        "dummy",
        "--served-model-name",
        "tiny",
        "--prefill",
        "1",
        "--decode",
        "1",
    )
    with serving_live(str(tiny_config), tmp_path, *flags) as live:
        visit = Visit(browser, live.url)
        visit.wait(shown_pill(1, "alive"))
        visit.page.click("#engines .engine:nth-child(2)")
        ask(live)
        moved = int(live.metric("toque_kv_transfer_pages_total", fate="moved"))
        assert moved == 12  # of a prompt of 200 tokens, in pages of 16; the 13th is not full
        visit.wait(f"[...document.querySelectorAll('#transfers dd')][1]?.textContent === '{moved}'")
        visit.wait(f"{BRANCHES} >= 1")
        os.kill(live.engine_pids()[1], signal.SIGKILL)
        visit.wait(f"!({shown_pill(1, 'alive')})")
        visit.wait(f"{BRANCHES} === 0")
        visit.wait(shown_pill(1, "alive"))
        assert "1 restart" in card(visit, 1)
        ask(live)
        visit.wait(f"{BRANCHES} >= 1")
        visit.close()


def ask(live: Live) -> None:
    body = {"model": "tiny", "prompt": list(range(20, 220)), "max_tokens": 8, "ignore_eos": True}
    assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=120).status_code == 200
