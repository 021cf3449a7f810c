"""A few hundred hostile requests among permanently slow clients; `python -m bench.hostile` sends more."""

import socket

from bench.hostile import Outcome, judged, measured
from bench.hostile_requests import KINDS
from tests.workers.api.fake_backend import FakeBackend, Script
from tests.workers.api.running import KEY, eventually, serving, settings_with
from workers.settings import ServerSettings, Settings

MODEL = "smollm2-135m@handbook"


def test_the_service_withstands_hostile_clients() -> None:
    backend = FakeBackend(max_requests=8, max_queued=8, scripts={"Say one word.": Script(pause_s=0.01)})
    with serving(backend, settings_with(stall_timeout_s=2.0, body_timeout_s=3.0)) as service:
        report = measured(service.url, KEY, MODEL, num_requests=300, concurrency=8, num_slow=4)
        assert report["faults"] == []
        assert set(report["by_kind"]["bad key"]) == {"401"}
        assert report["biggest_refusal_bytes"] <= 4096
        assert set(report["by_kind"]) >= set(KINDS)
        assert report["health_p99_ms"] < 2000  # a loose bound for any machine; the benchmark measures the figure
        assert eventually(lambda: not backend.running and not backend.num_queued)


def test_a_service_that_requires_no_key_gets_no_wrong_ones() -> None:
    with serving(FakeBackend(), Settings(server=ServerSettings(port=0))) as service:
        report = measured(service.url, "", MODEL, num_requests=100, num_slow=0)
    assert report["faults"] == [] and "bad key" not in report["by_kind"]


def test_the_hostile_bench_measures_a_refusal_by_its_content_length() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nabc"
    assert judged(refusal + 9000 * b"x") == ("400", "")
    assert judged(refusal.replace(b": 3", b": 9000"))[1] == "a refusal of 9000 bytes"
    assert judged(b"HTTP/1.1 400 Bad Request\r\n\r\n" + 9000 * b"x")[1] == "a refusal of 9000 bytes"


def test_the_hostile_bench_counts_truncated_replies_and_admitted_wrong_keys_as_faults() -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    assert judged(good) == ("200", "")
    assert "broke off" in judged(good[:-1])[1]
    assert "broke off" in judged(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc")[1]
    assert judged(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nno HTTP") == ("400", "")
    outcome = Outcome()
    outcome.saw("one", "bad key", good, waits=True)
    assert outcome.faults == ["one: status 200 for a wrong key"]


def test_the_hostile_bench_reports_faults_of_an_unreachable_service() -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        report = measured(f"http://127.0.0.1:{taken.getsockname()[1]}", KEY, MODEL, num_requests=100, num_slow=0)
    assert report["num_faults"] > 50 and any("/health" in fault for fault in report["faults"])
