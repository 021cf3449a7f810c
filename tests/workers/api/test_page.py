"""The page in a real browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.api.fake_backend import FakeBackend
from tests.workers.api.running import KEY, Running, serving
from workers.serving.messages import FailedBuild, Health, Held
from workers.serving.metrics import Metrics
from workers.serving.step_engine import Fidelity
from workers.settings import Settings

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page in a browser")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


def backend_with_figures() -> FakeBackend:
    decoding = Metrics()
    for _ in range(100):
        decoding.saw_fidelity("handbook", 0.0, Fidelity(recall=0.8, mass=0.97))
        decoding.step_s.observe(0.02)
    decoding.running.set(3)
    decoding.queue_length.set(2)
    held = (Held("a" * 64, ("handbook",), 3 << 20, 0),)
    failed = (FailedBuild(8192, 2, f"the disk is full {NASTY}", 9.5),)
    backend = FakeBackend(more_metrics=decoding.collect(), held=held, failed_builds=failed)
    backend.add("new", state="building", progress=0.43, num_tokens=None, what="layer 13 of 30")
    backend.add("bad", state="failed", num_tokens=None, what=NASTY)
    return backend


def opened(browser: Any, service: Running, faults: list[str]) -> Any:
    page = browser.new_page()
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
        assert "Running\\n3\\n2 waiting" in page.inner_text("#tiles").replace("\n", "\\n")
        rows = {row.split("\t")[0].strip(): row for row in page.inner_text("#contexts").splitlines() if "@" in row}
        assert set(rows) == {"smollm2-135m@handbook", "smollm2-135m@new", "smollm2-135m@bad"}
        contexts = page.inner_text("#contexts")
        for text in ("80\u00a0%", "97\u00a0%", "43\u00a0%", "layer 13 of 30", "1,000", "this process", NASTY):
            assert text in contexts
        workers = page.inner_text("#workers")
        for text in ("this process", "answers", "0 of 4", "none", "8,192 tokens: the disk is full", "for 10 s", NASTY):
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
        other = opened(browser, service, faults)  # another tab does not have it
        other.wait_for_selector("#key-form:not([hidden])")
        page.close()
        other.close()
    assert not faults
