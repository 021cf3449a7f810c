"""The status and metrics endpoints, and the static page."""

import json
import re

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.workers.api.fake_backend import FakeBackend
from tests.workers.api.running import KEY, serving
from workers.api.app import PAGE_FILES, STATIC
from workers.api.measures import STREAM_CODES, Measures
from workers.api.status import HISTOGRAMS, NUMBERS, OF_CONTEXTS, status_object
from workers.serving.messages import (
    ContextInfo,
    ContextTooLongError,
    FailedBuild,
    Health,
    Held,
    OverloadedError,
    TimedOutError,
    WorkerLostError,
    WorkerStatus,
)
from workers.serving.metrics import Metrics
from workers.serving.step_engine import Fidelity


def test_status_has_every_number_and_histogram_of_the_page() -> None:
    decoding = Metrics()
    decoding.observe_fidelity("novel", 0.0, Fidelity(recall=0.5, mass=0.75))
    decoding.observe_fidelity("novel", 0.0, Fidelity(recall=1.0, mass=0.25))
    decoding.running.set(3)
    decoding.step_s.observe(0.02)
    http = Measures()
    http.ttft.observe(0.3)
    contexts = [
        ContextInfo(name="novel", state="ready", artifact_id="ab"),
        ContextInfo(name="new", state="building", progress=0.5),
    ]
    held, failed = (Held("ab", ("novel",), 7, 1),), (FailedBuild(512, 2, "the disk is full", 10.0),)
    here = WorkerStatus(since=1.0, num_running=2, max_requests=4, held=held, failed_builds=failed)
    workers = {"lost": None, "here": here}
    status = status_object("m", Health(True), contexts, [*http.registry.collect(), *decoding.collect()], workers)
    assert set(status["numbers"]) == set(NUMBERS) and set(status["histograms"]) == set(HISTOGRAMS)
    assert status["numbers"]["running"] == 3
    ttft = status["histograms"]["ttft"]
    assert (ttft["count"], ttft["sum"]) == (1, 0.3)
    assert [upto for bound, upto in ttft["buckets"] if bound in (0.25, 0.5)] == [0, 1]
    novel, new = status["contexts"]
    assert novel["fidelity"] == {"recall": {"sum": 1.5, "count": 2}, "mass": {"sum": 1.0, "count": 2}}
    assert novel["held_by"] == ["here"] and new["held_by"] == []
    lost, told = status["workers"]
    assert (lost["since"], lost["running"]) == (None, 0)
    assert (told["since"], told["running"], told["contexts"], told["held_bytes"]) == (1.0, 2, 1, 7)
    assert lost["failed_builds"] == [] and told["failed_builds"][0]["why"] == "the disk is full"
    assert new["fidelity"] == {} and new["progress"] == 0.5 and set(OF_CONTEXTS) == set(novel["fidelity"])
    json.dumps(status, allow_nan=False)


def test_status_without_backend_metrics_still_reports_readiness() -> None:
    status = status_object("m", Health(False, "starting"), [], [], {})
    assert (status["ready"], status["why"], status["numbers"], status["histograms"]) == (False, "starting", {}, {})


def test_metrics_endpoint_exports_http_and_backend_metrics() -> None:
    backend = FakeBackend(
        more_metrics=[metric for metric in Metrics().collect() if metric.name != "csattn_running_requests"]
    )
    with serving(backend) as service:
        reply = httpx2.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(reply.text)}
    assert "\ncsattn_http_requests_in_flight 0.0\n" in reply.text, "a scrape is no request of its own"
    assert {"csattn_http_requests", "csattn_http_ttft_seconds", "csattn_running_requests", "csattn_kv_bytes"} <= names


def test_http_error_counters_start_at_zero() -> None:
    value = Measures().registry.get_sample_value
    for route in ("/v1/completions", "/v1/messages"):
        assert value("csattn_http_requests_total", {"route": route, "status": "429"}) == 0
    assert all(value("csattn_http_stream_errors_total", {"code": code}) == 0 for code in STREAM_CODES)
    assert {error.code for error in (WorkerLostError, TimedOutError, OverloadedError, ContextTooLongError)} <= set(
        STREAM_CODES
    )


def test_the_page_loads_no_external_resources_or_inline_scripts() -> None:
    page = (STATIC / "index.html").read_text()
    script = "".join((STATIC / name).read_text() for name in PAGE_FILES if name.endswith(".js"))
    everything = page + script + (STATIC / "page.css").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|url\(", everything)
    assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src)|innerHTML|eval\(", page + script)
    assert set(re.findall(r"\$\(\"([\w-]+)\"\)", script)) <= set(re.findall(r'id="([\w-]+)"', page))


def test_the_page_is_sent_with_a_strict_content_security_policy() -> None:
    with serving() as service:
        for path, kind in {"/": "text/html", **{f"/static/{name}": kind for name, kind in PAGE_FILES.items()}}.items():
            reply = httpx2.get(service.url + path)
            assert reply.status_code == 200 and reply.headers["content-type"].startswith(kind)
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
