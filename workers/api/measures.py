"""Prometheus metrics of the HTTP side."""

from collections.abc import Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")  # whose failures are watched
STATUSES = (200, 429, 500, 503, 504)
STREAM_CODES = (
    *("internal_error", "worker_lost", "timeout", "overloaded", "invalid_request", "context_length_exceeded"),
    *("model_not_found", "context_not_ready"),
)


class Measures:
    """Metrics of one application, in a registry of their own: two applications in a process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "csattn_http_requests",
            "Requests answered, by route and status; 499: the client disconnected first.",
            ("route", "status"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "csattn_http_requests_in_flight",
            "Requests not yet answered, except those of /metrics.",
            registry=self.registry,
        )
        self.stream_errors = Counter(
            "csattn_http_stream_errors", "Streams that ended with an error event.", ("code",), registry=self.registry
        )
        for code in STREAM_CODES:  # exported at 0, so that an alert sees the first one
            self.stream_errors.labels(code)
        for route, status in product(ANSWERING, STATUSES):
            self.requests.labels(route, status)
        self.ttft = Histogram(
            "csattn_http_ttft_seconds",
            "Time from a request's arrival to its first piece of text.",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self.tpot = Histogram(
            "csattn_http_tpot_seconds",
            "Mean time between an answer's tokens.",
            buckets=TPOT_BUCKETS,
            registry=self.registry,
        )

    def text(self, more: Iterable[Metric]) -> bytes:
        """Return these metrics and `more` in Prometheus' text format."""
        return generate_latest(_Given([*self.registry.collect(), *more]))


class _Given(CollectorRegistry):
    """A registry of metrics that are collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
