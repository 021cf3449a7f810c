"""The page in a real browser."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.blocks import BlockCounts
from tests.workers.api.fake_backend import FakeBackend
from tests.workers.api.running import KEY, Running, serving
from workers.serving.messages import FailedBuild, Health, Held
from workers.serving.metrics import Metrics
from workers.serving.step_engine import Fidelity
from workers.settings import ModelSettings, Settings

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")

NASTY = "<img src=x onerror=alert(1)>"
SMALL = {"width": 360, "height": 740}  # pixels
HANGS_OVER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


def backend_with_figures() -> FakeBackend:
    decoding = Metrics()
    for _ in range(100):
        decoding.observe_fidelity("handbook", 0.0, Fidelity(recall=0.8, mass=0.97))
        decoding.step_s.observe(0.02)
    decoding.running.set(3)
    decoding.queue_length.set(2)
    decoding.prompt_tokens.inc(100)
    decoding.kept_counts = lambda: BlockCounts(3, 3 << 20, 3, 3 << 20, 0)  # the same blocks in memory and on disk
    held = (Held("a" * 64, ("handbook",), 3 << 20, 0),)
    failed = (FailedBuild(8192, 2, f"the disk is full {NASTY}", 9.5),)
    backend = FakeBackend(more_metrics=decoding.collect(), held=held, failed_builds=failed)
    backend.add("new", state="building", progress=0.43, num_tokens=None, what="layer 13 of 30")
    backend.add("bad", state="failed", num_tokens=None, what=NASTY)
    return backend


def opened(browser: Any, service: Running, faults: list[str], **options: Any) -> Any:
    page = browser.new_page(**options)
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda request: request.url.startswith((service.url, "data:")) or faults.append(request.url))
    page.goto(service.url)
    return page


def test_the_page_shows_state_contexts_and_charts(browser: Any) -> None:
    faults: list[str] = []
    with serving(backend_with_figures(), Settings()) as service:
        page = opened(browser, service, faults)
        page.wait_for_selector("main:not([hidden])")
        assert page.inner_text("#state") == "ready" and page.inner_text("#model") == "smollm2-135m"
        tiles = page.inner_text("#tiles").replace("\n", "\\n")
        assert "Running\\n3\\n2 waiting" in tiles and "kept in memory and on disk" in tiles and "blocks" not in tiles
        rows = {row.split("\t")[0].strip(): row for row in page.inner_text("#contexts").splitlines() if "@" in row}
        assert set(rows) == {"smollm2-135m@handbook", "smollm2-135m@new", "smollm2-135m@bad"}
        contexts = page.inner_text("#contexts")
        for text in ("80\u00a0%", "97\u00a0%", "43\u00a0%", "layer 13 of 30", "1,000", "this process", NASTY):
            assert text in contexts
        workers = page.inner_text("#workers")
        for text in (
            "this process",
            "answers",
            "0 of 4",
            "none",
            "tokens not built: the disk is full",
            "for 10 s",
            NASTY,
        ):
            assert text in workers
        assert page.locator("#contexts img, #workers img").count() == 0
        page.wait_for_selector("#charts path.curve[d*=L]", state="attached")  # a second answer has come
        service.backend.health_now = Health(False, "the worker starts")
        page.locator("#state", has_text="not ready").wait_for()
        assert page.inner_text("#why") == "the worker starts"
    page.locator("#state", has_text="no answer").wait_for()
    page.close()
    assert not faults


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(browser: Any) -> None:
    faults: list[str] = []
    with serving(backend_with_figures()) as service:
        page = opened(browser, service, faults)
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.is_hidden("main") and page.inner_text("#state") == "locked"
        page.fill("#key", "wrong")
        page.click("button")
        page.locator("#key-error", has_text="does not know").wait_for()
        page.fill("#key", KEY)
        page.click("button")
        page.wait_for_selector("main:not([hidden])")
        page.reload()
        page.wait_for_selector("main:not([hidden])")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        other = opened(browser, service, faults)  # another tab does not have the key
        other.wait_for_selector("#key-form:not([hidden])")
        page.close()
        other.close()
    assert not faults


def test_the_page_fits_a_small_screen(browser: Any) -> None:
    backend = backend_with_figures()
    backend.add("W" * 64, state="failed", num_tokens=None, what="/store/" + "q" * 150 + " is gone")
    with serving(backend, Settings(model=ModelSettings(name="m" * 90))) as service:
        page = opened(browser, service, [], viewport=SMALL)
        page.wait_for_selector("#contexts td")
        assert page.evaluate(HANGS_OVER) == 0
        letters = "text => text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)"
        assert page.locator("#charts svg text").first.evaluate(letters) >= 9, "pixels"
        page.keyboard.press("Tab")
        assert page.locator(":focus").get_attribute("aria-labelledby") == "contexts-title", "tables scroll by keyboard"
        page.close()
    with serving(backend_with_figures()) as service:
        page = opened(browser, service, [], viewport=SMALL)
        page.wait_for_selector("#key-form:not([hidden])")
        form, button = (page.locator(name).bounding_box() for name in ("#key-form", "#key-form button"))
        assert button["x"] + button["width"] <= form["x"] + form["width"] - 15
        page.close()


def answering(reply: dict[str, Any] | None) -> Callable[[Any], None]:
    return lambda route: route.fulfill(**reply) if reply else route.abort()


def test_the_page_explains_failed_replies_and_recovers(browser: Any) -> None:
    with serving(backend_with_figures(), Settings()) as service:
        page = opened(browser, service, [])
        page.wait_for_selector("#charts path.curve[d*=L]", state="attached")
        for reply, why in (
            ({"status": 502, "body": "<html>Bad Gateway</html>"}, r"The reply is not from csattn.*\(status 502\)\."),
            ({"status": 500, "body": '"of another program"'}, r"The reply is not from csattn.*\(status 500\)\."),
            (None, r"The service cannot be reached\."),
        ):
            page.route("**/v1/status", answering(reply))
            page.locator("#why", has_text=re.compile(rf"^{why} The figures below are from \d.*\.$")).wait_for()
            assert page.title() == "smollm2-135m, no answer – csattn"
            page.unroute("**/v1/status")
        page.locator("#state", has_text=re.compile("^ready$")).wait_for()
        page.wait_for_function("document.querySelectorAll('#charts .card:nth-child(3) path').length > 2")  # gaps in it
        page.close()


def test_the_page_ignores_a_reply_to_a_superseded_status_request(browser: Any) -> None:
    with serving(backend_with_figures(), Settings()) as service:
        page = opened(browser, service, [])
        page.wait_for_selector("main:not([hidden])")
        held: list[Any] = []
        page.route("**/v1/status", lambda route: route.continue_() if held else held.append(route))
        page.wait_for_function("performance.getEntriesByType('resource').length")
        with page.expect_request("**/v1/status"):
            pass
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as when the tab becomes visible again
        page.wait_for_timeout(500)
        held[0].fulfill(status=500, body='{"error": {"message": "older"}}')
        page.wait_for_timeout(500)
        assert page.inner_text("#state") == "ready"
        page.close()


def test_the_page_refuses_an_impossible_key_with_the_reason(browser: Any) -> None:
    with serving(backend_with_figures()) as service:
        page = opened(browser, service, [])
        for key in ("\u05e9\u05dc\u05d5\u05dd", "two words"):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            assert page.inner_text("#key-error").startswith("A key consists of printable ASCII characters")
        assert page.evaluate("sessionStorage.length") == 0
        page.close()


def test_selected_text_stays_selected_when_the_page_updates(browser: Any) -> None:
    with serving(backend_with_figures(), Settings()) as service:
        page = opened(browser, service, [])
        page.wait_for_selector("#contexts td.id")
        chosen = page.inner_text("#contexts tr:last-child td.id")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#contexts tr:last-child td.id'))")
        page.wait_for_selector("#charts path.curve[d*=L]", state="attached")  # a second answer has come
        assert page.evaluate("getSelection().toString()") == chosen
        page.close()
