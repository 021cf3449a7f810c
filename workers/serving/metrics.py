"""Prometheus metrics of the decoding side.

Fidelity is measured for one layer and one row of a step, taken in turn from one watched step to the next.
Names of contexts come from users, so only the first MAX_CONTEXTS have a label of their own; the others share `other`.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from offload.blocks import BlockCounts
from workers.serving.build_queue import BuildCounts
from workers.serving.step_engine import EngineCounts, Fidelity

MAX_CONTEXTS = 64
MAX_FORGOTTEN = 1024  # names of deleted contexts that are remembered, for requests that still run
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "timeout", "failed", "refused")
_WORDS = {  # help texts of the fields of `EngineCounts` and `ContextCounts`
    "search_s": "Time spent in searches on the CPU.",
    "attend_s": "Time spent in attention to chosen rows on the CPU.",
    "slot_lookups": "Chosen rows that were looked up in the device's cache of rows.",
    "slot_hits": "Chosen rows that were found in the device's cache of rows.",
    "kv_bytes": "Bytes of KV of the loaded contexts, on host and device.",
    "index_bytes": "Bytes of indexes of the loaded contexts.",
    "device_bytes": "Bytes of GPU memory in use.",
    "loaded_context_bytes": "Bytes of contexts that are loaded, being loaded or being unloaded.",
    "loaded_context_budget_bytes": "Most bytes of these contexts: engine.context_bytes.",
    "kept_context_bytes": "Bytes of contexts from prompts on disk, when the last one was built.",
    "kept_context_budget_bytes": "Most bytes of these contexts: kept.context_bytes, or less if the disk is too full.",
}
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """Counts of a service's contexts and builds; all are known anyway, without any work."""

    builds: Mapping[str, BuildCounts] = field(default_factory=dict)  # by origin: "registered" or "prompt"
    loaded_context_bytes: int = 0
    loaded_context_budget_bytes: int | None = None  # None: limited only by memory
    kept_context_bytes: int | None = None  # on disk, from prompts; None: unknown until one has been built
    kept_context_budget_bytes: int = 0


class Metrics:
    """The metrics of one service, in their own registry, so that several services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that have ended, by outcome.", ["outcome"])
        self.ttft = self._histogram("ttft_seconds", "Time from a request's arrival to its first token.", _SECONDS)
        self.tpot = self._histogram("tpot_seconds", "A request's mean time per token after the first.", _SECONDS)
        self.queue_s = self._histogram("queue_seconds", "Time from a request's arrival to its admission.", _SECONDS)
        self.queue_length = Gauge("csattn_queue_length", "Requests in the queue.", registry=self.registry)
        self.running = Gauge("csattn_running_requests", "Requests that are being decoded.", registry=self.registry)
        self.step_s = self._histogram("step_seconds", "Time of one engine step.", _SECONDS)
        self.batch_rows = self._histogram("batch_rows", "Tokens in one step, over all requests.", _ROWS)
        self.question_tokens = self._counter("question_tokens", "Tokens of questions that were computed.")
        self.new_tokens = self._counter("new_tokens", "Tokens of answers that were generated.")
        self.drafted_tokens = self._counter("drafted_tokens", "Tokens of answers that were guessed.")
        self.accepted_tokens = self._counter("accepted_tokens", "Tokens of answers that were guessed right.")
        self.context_tokens = self._counter("context_tokens", "Tokens of the prefilled contexts that requests used.")
        self.context_requests = self._counter(
            "context_requests", "Requests by where their context was found, in memory or in the store.", ["found"]
        )
        for counter, labels in ((self.requests, _OUTCOMES), (self.context_requests, ("memory", "store"))):
            for label in labels:
                counter.labels(label)  # creates it at 0, so that an alert sees the first increment
        self.restored_tokens = self._counter(
            "restored_tokens", "Tokens of prompts whose rows were restored from kept turns."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter("cached_tokens", "Tokens of prompts that did not have to be computed.")
        self._recall = self._histogram(
            "fidelity_recall", "Share of the exact top-k rows that were chosen.", _SHARES, ["context"]
        )
        self._mass = self._histogram(
            "fidelity_mass", "Share of exact attention's weight on the rows read.", _SHARES, ["context"]
        )
        self._contexts: set[str] = set()
        self._forgotten: dict[str, float] = {}  # by name: when, by time.monotonic(); newest last
        self._labels_lock = Lock()  # `forget_context` is called on another thread than the scheduler's
        self.engine_counts = EngineCounts()  # the last that were read
        self.kept_counts: Callable[[], BlockCounts] = lambda: BlockCounts(0, 0, 0, 0, 0)
        self.context_counts: Callable[[], ContextCounts] = ContextCounts

    def observe_fidelity(self, context: str, arrived_at: float, fidelity: Fidelity) -> None:
        """Record a fidelity. arrived_at: the request's arrival, by time.monotonic(); if its context has been forgotten
        since, the label is `other`."""
        with self._labels_lock:
            if arrived_at <= self._forgotten.get(context, -math.inf):
                context = "other"
            elif len(self._contexts) < MAX_CONTEXTS:
                self._contexts.add(context)
            label = context if context in self._contexts else "other"
            self._recall.labels(label).observe(fidelity.recall)
            self._mass.labels(label).observe(fidelity.mass)

    def forget_context(self, context: str) -> None:
        """Remove a deleted context's label, which makes room for another."""
        with self._labels_lock:
            self._forgotten.pop(context, None)
            self._forgotten[context] = time.monotonic()
            if len(self._forgotten) > MAX_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
            if context in self._contexts:
                self._contexts.discard(context)
                self._recall.remove(context)
                self._mass.remove(context)

    def collect(self) -> list[Metric]:
        """Return all metrics, with the counts of the engine, of kept rows and of contexts."""
        contexts, kept = self.context_counts(), _kept_metrics(self.kept_counts())
        counts = [*_metrics_of(self.engine_counts), *kept, *_build_metrics(contexts.builds), *_metrics_of(contexts)]
        return [*self.registry.collect(), *counts]

    def _counter(self, name: str, what: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"csattn_{name}", what, labels or [], registry=self.registry)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(f"csattn_{name}", what, labels or [], buckets=buckets, registry=self.registry)


def _metrics_of(counts: EngineCounts | ContextCounts) -> Iterator[Metric]:
    """A metric of each field in `_WORDS`, unless it is None: a gauge of bytes, or a counter."""
    for item in fields(counts):
        name, value = f"csattn_{re.sub('_s$', '_seconds', item.name)}", getattr(counts, item.name)
        if item.name in _WORDS and value is not None:
            family = GaugeMetricFamily if name.endswith("_bytes") else CounterMetricFamily
            yield family(name, _WORDS[item.name], value)


def _kept_metrics(counts: BlockCounts) -> Iterator[Metric]:
    for what in ("blocks", "bytes"):
        words = f"{what.capitalize()} of rows that are kept of turns, by place: memory or disk."
        family = GaugeMetricFamily(f"csattn_kept_{what}", words, labels=["place"])
        for place in ("memory", "disk"):
            family.add_metric([place], getattr(counts, f"{place}_{what}"))
        yield family
    yield CounterMetricFamily("csattn_kept_refused", "Blocks of rows that were not kept.", counts.refused)


def _build_metrics(builds: Mapping[str, BuildCounts]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "csattn_context_builds", "Contexts that are being built or wait for it, by origin.", labels=["of", "state"]
    )
    failed = CounterMetricFamily(
        "csattn_context_builds_failed", "Contexts that could not be built, by origin.", labels=["of"]
    )
    for of, counts in builds.items():
        states.add_metric([of, "waiting"], counts.num_waiting)
        states.add_metric([of, "building"], counts.num_building)
        failed.add_metric([of], counts.num_failed)
    yield from (states, failed)
