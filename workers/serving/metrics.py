"""What the decoding side measures, as Prometheus has it.

| metric (all begin with `csattn_`) | kind, labels | what |
|---|---|---|
| `requests_total` | counter, `outcome` | requests that ended: stop, length, cancelled, timeout, failed, refused |
| `ttft_seconds` | histogram | from a request's arrival to its first token |
| `tpot_seconds` | histogram | a request's mean time per token after the first |
| `queue_seconds` | histogram | from a request's arrival to its admission |
| `queue_length` | gauge | requests that wait for a slot |
| `running_requests` | gauge | requests that have a slot |
| `step_seconds` | histogram | one step of the engine |
| `batch_rows` | histogram | tokens that a step took, of all requests |
| `question_tokens_total`, `new_tokens_total` | counter | tokens fed of questions, and tokens told |
| `context_tokens_total` | counter | prefilled tokens that answers stood on, counted once for each request |
| `context_requests_total` | counter, `found` | requests whose context was loaded (`memory`), or was not (`store`) |
| `restored_tokens_total` | counter | tokens of prompts whose rows were kept from a request before |
| `prompt_tokens_total`, `cached_tokens_total` | counter | tokens of prompts, and those of them that were there |
| `kept_blocks`, `kept_bytes` | gauge, `place` | kept rows in `memory` and on `disk` |
| `kept_refused_total` | counter | blocks of rows that found no room, or that the disk did not take |
| `search_seconds_total`, `gather_seconds_total`, `attend_seconds_total` | counter | the engine's time in each part |
| `slot_lookups_total`, `slot_hits_total` | counter | rows asked of the device's slot cache, and found in it |
| `kv_bytes`, `index_bytes`, `device_bytes` | gauge | of loaded contexts, and of the device |
| `fidelity_recall` | histogram, `context` | share of the exact top-k that was chosen, in one of a hundred steps |
| `fidelity_mass` | histogram, `context` | share of exact attention's weight on the rows that were read, likewise |

Fidelity is that of one layer and one row of a step, which go round from one watched step to the next.
Names of contexts come from users, so only the first MAX_CONTEXTS have a label of their own; the others share `other`.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from offload.blocks import BlockCounts
from workers.serving.step_engine import EngineCounts, Fidelity

MAX_CONTEXTS = 64
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_OF_ENGINE = {  # fields of EngineCounts: what each is, and the names of those that only grow
    "search_s": "search_seconds",
    "gather_s": "gather_seconds",
    "attend_s": "attend_seconds",
    "slot_lookups": "slot_lookups",
    "slot_hits": "slot_hits",
    "kv_bytes": "kv_bytes",
    "index_bytes": "index_bytes",
    "device_bytes": "device_bytes",
}


class Metrics:
    """A registry of its own: several services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that ended.", ["outcome"])
        self.ttft = self._histogram("ttft_seconds", "From arrival to the first token.", _SECONDS)
        self.tpot = self._histogram("tpot_seconds", "Mean time per token after the first.", _SECONDS)
        self.queue_s = self._histogram("queue_seconds", "From arrival to admission.", _SECONDS)
        self.queue_length = Gauge("csattn_queue_length", "Requests that wait for a slot.", registry=self.registry)
        self.running = Gauge("csattn_running_requests", "Requests that have a slot.", registry=self.registry)
        self.step_s = self._histogram("step_seconds", "One step of the engine.", _SECONDS)
        self.batch_rows = self._histogram("batch_rows", "Tokens that a step took.", _ROWS)
        self.question_tokens = self._counter("question_tokens", "Tokens fed of questions.")
        self.new_tokens = self._counter("new_tokens", "Tokens of answers.")
        self.context_tokens = self._counter("context_tokens", "Prefilled tokens that answers stood on.")
        self.context_requests = self._counter("context_requests", "Requests by where their context was.", ["found"])
        self.restored_tokens = self._counter("restored_tokens", "Tokens whose rows were kept from before.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.cached_tokens = self._counter("cached_tokens", "Those of them that were there.")
        self._recall = self._histogram("fidelity_recall", "Share of the exact top-k chosen.", _SHARES, ["context"])
        self._mass = self._histogram("fidelity_mass", "Share of exact attention on rows read.", _SHARES, ["context"])
        self._contexts: set[str] = set()
        self.engine_counts = EngineCounts()  # as the scheduler last saw them
        self.kept_counts: Callable[[], BlockCounts] = lambda: BlockCounts(0, 0, 0, 0, 0)
        self.registry.register(_EngineCollector(self))

    def saw_fidelity(self, context: str, fidelity: Fidelity) -> None:
        if len(self._contexts) < MAX_CONTEXTS:
            self._contexts.add(context)
        label = context if context in self._contexts else "other"
        self._recall.labels(label).observe(fidelity.recall)
        self._mass.labels(label).observe(fidelity.mass)

    def forget_context(self, context: str) -> None:
        """Its label is free for another."""
        if context in self._contexts:
            self._contexts.discard(context)
            self._recall.remove(context)
            self._mass.remove(context)

    def collect(self) -> list[Metric]:
        return list(self.registry.collect())

    def _counter(self, name: str, what: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"csattn_{name}", what, labels or [], registry=self.registry)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(f"csattn_{name}", what, labels or [], buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """The engine's own counts, told when they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        counts = self._metrics.engine_counts
        for item in fields(counts):
            name, value = f"csattn_{_OF_ENGINE[item.name]}", getattr(counts, item.name)
            if name.endswith("_bytes"):
                yield GaugeMetricFamily(name, f"{item.name} of the engine", value)
            else:
                yield CounterMetricFamily(name, f"{item.name} of the engine", value)
        yield from _kept_metrics(self._metrics.kept_counts())


def _kept_metrics(counts: BlockCounts) -> Iterator[Metric]:
    for what in ("blocks", "bytes"):
        family = GaugeMetricFamily(f"csattn_kept_{what}", f"{what} of kept rows", labels=["place"])
        for place in ("memory", "disk"):
            family.add_metric([place], getattr(counts, f"{place}_{what}"))
        yield family
    yield CounterMetricFamily("csattn_kept_refused", "Blocks of rows that were not kept.", counts.refused)
