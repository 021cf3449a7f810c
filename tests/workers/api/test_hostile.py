"""A few hundred hostile requests, beside clients that are slow all the while; `python -m bench.hostile` sends more."""

from bench.hostile import measured
from bench.hostile_requests import KINDS
from tests.workers.api.fake_backend import FakeBackend, Script
from tests.workers.api.running import KEY, eventually, serving, settings_with

MODEL = "smollm2-135m@handbook"


def test_the_service_stands_hostile_clients() -> None:
    backend = FakeBackend(num_slots=8, max_queued=8, scripts={"Say one word.": Script(pause_s=0.01)})
    with serving(backend, settings_with(stall_timeout_s=2.0, body_timeout_s=3.0)) as service:
        report = measured(service.url, KEY, MODEL, num_requests=300, concurrency=8, num_slow=4)
        assert report["faults"] == []
        assert report["biggest_refusal_bytes"] <= 4096
        assert set(report["by_kind"]) >= set(KINDS)
        assert report["health_p99_ms"] < 2000  # a sign of life on any machine; the figure is the benchmark's
        assert eventually(lambda: not backend.running and not backend.num_queued)
