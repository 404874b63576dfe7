"""The page at `/` in a real browser: headless Chromium against the real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.browsing import PATIENCE_MS, PHONE, Visit, chromium, needed, sync_api
from tests.serve.fakes import FakeEngine, bytes_then_end, serving
from tests.serve.live import Live
from tests.serve.live import serving as serving_live
from toque.types import Refused, Slo

pytestmark = needed
WHERE = """(() => {
    const at = document.activeElement;
    return [at.id || at.className || at.tagName, getComputedStyle(at).outlineStyle];
})()"""


OVERLAPPING = """[...document.querySelectorAll('#queue .lane')].filter((lane) =>
    lane.querySelector('.why').getBoundingClientRect().right >
    lane.querySelector('.count').getBoundingClientRect().left).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def live(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "4",
             "--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", "4MB",
             "--slo", "default:ttft=60s")  # fmt: skip
    with serving_live(str(tiny_config), tmp_path_factory.mktemp("page"), *flags) as live:
        yield live


def slow_engine(**more: Any) -> FakeEngine:
    """Streams that last until the test has seen them."""
    return FakeEngine(reply=lambda request: [97] * 500, step_s=0.05, **more)


def test_the_playground_streams_an_answer_of_the_real_engine(browser: Any, live: Live) -> None:
    visit = Visit(browser, live.url)
    page = visit.page
    visit.state("ready")
    page.click("summary")
    page.fill("#p-max_tokens", "24")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant .facts")
    assert page.locator(".turn.user").inner_text().strip().endswith("hello")
    facts = page.locator(".turn.assistant .facts").inner_text()
    assert "tokens" in facts and "first token" in facts
    page.click(".turn .facts button")  # its timeline
    page.wait_for_selector("#timeline[open] .events tr")
    told = page.locator("#timeline .events").inner_text()
    assert "prompt chunk" in told and "first token" in told
    assert page.locator("#timeline .gantt .g-chunk").count() >= 1
    page.keyboard.press("Escape")
    visit.wait("!document.getElementById('timeline').open")
    visit.wait("document.getElementById('pages').clientHeight > 20")
    visit.wait("document.querySelector('#slos .slo b').textContent === 'default'")
    visit.close()


def test_lanes_pages_and_steps_are_drawn_under_load(browser: Any, live: Live) -> None:
    visit = Visit(browser, live.url)
    done = threading.Event()

    def crowd() -> None:
        body = {"prompt": [5] * 200, "max_tokens": 250, "ignore_eos": True, "n": 6}
        while not done.is_set():
            httpx.post(live.url + "/v1/completions", json=body, timeout=120)

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        visit.wait("document.querySelectorAll('#lanes .lane').length >= 2")
        visit.wait("document.querySelectorAll('#queue .lane .why').length >= 1")
        visit.wait("document.querySelectorAll('#tree rect').length >= 1")
        visit.wait("document.getElementById('n-held').textContent !== '0'")
        assert visit.too_wide_px() <= 0
        visit.page.set_viewport_size(PHONE)
        visit.wait("document.querySelectorAll('#queue .lane .why').length >= 1")
        assert visit.page.evaluate(OVERLAPPING) == 0 and visit.too_wide_px() <= 0
    finally:
        done.set()
        thread.join()
    visit.wait("document.querySelectorAll('#requests tr').length >= 6")
    visit.wait("document.querySelectorAll('#lanes .lane').length === 0")
    assert visit.page.locator("#lanes-empty").is_visible()
    visit.close()


def test_a_lane_opens_its_timeline_by_mouse_and_keyboard(browser: Any) -> None:
    with serving(slow_engine()) as server, httpx.stream(
        "POST", server.url + "/v1/completions", timeout=60,
        json={"prompt": "hello", "stream": True, "max_tokens": 500, "request_id": "shown"},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        visit = Visit(browser, server.url)
        page = visit.page
        page.click("#lanes .lane")
        page.wait_for_selector("#timeline[open] .facts-row")
        assert page.locator("#t-title").inner_text() == "Timeline of cmpl-shown"
        page.keyboard.press("Escape")
        visit.wait("!document.getElementById('timeline').open")
        visit.wait("document.activeElement.classList.contains('lane')")  # where one was before
        page.keyboard.press("Enter")
        page.wait_for_selector("#timeline[open] .facts-row")
        page.click("#t-close")
        visit.wait("!document.getElementById('timeline').open")
        visit.close()


def test_stop_ends_an_answer_and_keeps_what_came(browser: Any) -> None:
    engine = slow_engine()
    with serving(engine) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.fill("#message", "go on")
        page.click("#send")
        visit.wait("document.querySelector('.turn.assistant .text')?.textContent.length > 3")
        page.click("#stop")
        page.wait_for_selector(".turn.assistant .facts")
        assert page.locator(".turn.assistant .facts").inner_text().startswith("stopped")
        visit.wait("document.getElementById('stop').hidden")
        visit.wait("document.querySelectorAll('#lanes .lane').length === 0")  # the engine knows
        visit.close()


def test_errors_are_shown_and_the_next_message_works(browser: Any) -> None:
    engine = FakeEngine(slos=(Slo(name="fast", ttft_s=1.0),))
    engine.refuse = Refused(id="", message="come back later", status=429, retry_after_s=7.0)
    with serving(engine) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.fill("#message", "one")
        page.click("#send")
        page.wait_for_selector(".turn.failed")
        shown = page.locator(".turn.failed").inner_text()
        assert "come back later" in shown and "try again in 7 s" in shown
        visit.wait("document.querySelector('#losses .some')?.textContent === '1'")
        engine.refuse = None
        page.fill("#message", "two")
        page.click("#send")
        page.wait_for_selector(".turn.assistant .facts")
        assert "Hello" in page.locator(".turn.assistant").inner_text()
        assert engine.requests()[-1].slo is None  # no class was chosen
        page.click("summary")
        page.select_option("#p-slo", "fast")
        page.fill("#message", "three")
        page.click("#send")
        visit.wait("document.querySelectorAll('.turn.assistant .facts').length === 2")
        assert engine.requests()[-1].slo == Slo(name="fast", ttft_s=1.0)
        visit.close()


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Any) -> None:
    with serving(api_key=("the-right-key", "infer-key:inference")) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.wait_for_selector("#ask-key[open]")
        visit.state("key needed")
        page.fill("#k-input", "no-such-key")
        page.keyboard.press("Enter")
        wrong = page.locator("#k-wrong")
        sync_api.expect(wrong).to_contain_text("does not know", timeout=PATIENCE_MS)
        page.fill("#k-input", "infer-key")
        page.keyboard.press("Enter")
        visit.state("not allowed")
        sync_api.expect(wrong).to_contain_text("metrics", timeout=PATIENCE_MS)
        page.fill("#k-input", "the-right-key")
        page.keyboard.press("Enter")
        visit.state("ready")
        visit.wait("!document.getElementById('ask-key').open")
        page.fill("#message", "hi")
        page.click("#send")
        page.wait_for_selector(".turn.assistant .facts")
        page.reload()
        visit.state("ready")
        assert page.evaluate("Object.values(sessionStorage)") == ["the-right-key"]
        assert page.evaluate("Object.values(localStorage).join()").find("key") < 0
        visit.close()


def test_a_server_that_is_gone_is_said_and_one_that_is_back_too(browser: Any) -> None:
    with serving() as server:
        visit = Visit(browser, server.url)
        visit.state("ready")
        server.loop.call_soon_threadsafe(server.server.connections.cut_all)
        feed = server.url + "/dashboard/events"
        for _ in range(PATIENCE_MS // 50):
            if visit.asked.count(feed) >= 2:  # it begins again by itself
                break
            visit.page.wait_for_timeout(50)
        assert visit.asked.count(feed) >= 2
        visit.state("ready")
        server.stop()
        visit.state("disconnected")
        banner = visit.page.locator("#banner")
        sync_api.expect(banner).to_contain_text("What you see is from", timeout=PATIENCE_MS)
        assert "stale" in (visit.page.locator("body").get_attribute("class") or "")
        visit.close()


def test_every_control_is_reached_by_keyboard(browser: Any) -> None:
    with serving() as server:
        server.complete()
        visit = Visit(browser, server.url)
        visit.wait("document.querySelectorAll('#requests button').length === 1")
        reached = []
        for _ in range(30):
            visit.page.keyboard.press("Tab")
            reached.append(visit.page.evaluate(WHERE))
            if reached[-1][0] == "BODY":
                break
        names = [name for name, _ in reached]
        for name in ("skip", "raw", "theme", "message", "send", "clear", "SUMMARY", "BUTTON"):
            assert name in names, names
        assert all(outline != "none" for name, outline in reached if name != "BODY"), reached
        visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_sideways_scroll_in_either_theme(browser: Any, scheme: str) -> None:
    engine = slow_engine(slos=(Slo(name="interactive", ttft_s=0.5, itl_s=0.06),))
    with serving(engine) as server, httpx.stream(
        "POST", server.url + "/v1/completions", timeout=60,
        json={"prompt": "x" * 300, "stream": True, "max_tokens": 200, "slo": "interactive"},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        visit = Visit(browser, server.url, viewport=PHONE, color_scheme=scheme, has_touch=True)
        page = visit.page
        page.wait_for_selector("#lanes .lane")
        assert visit.too_wide_px() <= 0
        page.tap("#lanes .lane")
        page.wait_for_selector("#timeline[open] .facts-row")
        assert visit.too_wide_px() <= 0
        page.tap("#t-close")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        for expected in ("light", "dark", scheme):
            page.tap("#theme")
            assert page.evaluate("document.documentElement.dataset.theme") == expected
        visit.close()


def test_an_empty_page_explains_itself(browser: Any) -> None:
    with serving(FakeEngine(reply=lambda r: bytes_then_end("x"))) as server:
        visit = Visit(browser, server.url)
        visit.state("ready")
        for name in ("lanes-empty", "queue-empty", "slos-empty", "chat-empty", "requests-empty"):
            assert visit.page.locator(f"#{name}").is_visible(), name
        visit.close()
