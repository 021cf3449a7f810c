"""The object behind the status page: the service's state, and the few metrics that the page draws."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import Metric

from csattn import __version__
from workers.api.contexts import context_object
from workers.serving.messages import ContextInfo, Health, WorkerStatus

# the page's name -> the metric's; a metric that nobody exports is absent, and the page leaves it out
NUMBERS = {
    "open": "csattn_http_requests_in_flight",
    "running": "csattn_running_requests",
    "queued": "csattn_queue_length",
    "new_tokens": "csattn_new_tokens",
    "slot_hits": "csattn_slot_hits",
    "slot_lookups": "csattn_slot_lookups",
    "kv_bytes": "csattn_kv_bytes",
    "index_bytes": "csattn_index_bytes",
    "prompt_tokens": "csattn_prompt_tokens",
    "cached_tokens": "csattn_cached_tokens",
    "kept_bytes": "csattn_kept_bytes",
}
HISTOGRAMS = {
    "ttft": "csattn_http_ttft_seconds",
    "tpot": "csattn_http_tpot_seconds",
}
OF_CONTEXTS = {"recall": "csattn_fidelity_recall", "mass": "csattn_fidelity_mass"}  # histograms labelled by context


def status_object(
    model: str,
    health: Health,
    contexts: Sequence[ContextInfo],
    metrics: Iterable[Metric],
    workers: Mapping[str, WorkerStatus | None],
) -> dict[str, Any]:
    by_name = {metric.name: metric for metric in metrics}
    paths = {name: {held.path for held in status.held} if status else set() for name, status in workers.items()}
    fidelity = {key: _of_contexts(by_name[name]) for key, name in OF_CONTEXTS.items() if name in by_name}
    return {
        "version": __version__,
        "model": model,
        "ready": health.ready,
        "why": health.why,
        "numbers": {key: _sum_of(by_name[name], "", "_total") for key, name in NUMBERS.items() if name in by_name},
        "histograms": {key: _histogram(by_name[name]) for key, name in HISTOGRAMS.items() if name in by_name},
        "workers": [_worker_object(name, status) for name, status in workers.items()],
        "contexts": [
            {
                **context_object(info, model),
                # a registered context's path in the store is its artifact's id
                "held_by": [name for name, held in paths.items() if info.artifact_id in held],
                "fidelity": {key: values[info.name] for key, values in fidelity.items() if info.name in values},
            }
            for info in contexts
        ],
    }


def _worker_object(name: str, status: WorkerStatus | None) -> dict[str, Any]:
    """since: null while the worker does not answer."""
    return {
        "name": name,
        "since": status.since if status else None,
        "running": status.num_running if status else 0,
        "slots": status.max_requests if status else 0,
        "contexts": len(status.held) if status else 0,
        "held_bytes": status.held_bytes if status else 0,
        "budget_bytes": status.budget_bytes if status else None,
        "failed_builds": [asdict(failed) for failed in status.failed_builds] if status else [],
    }


def _histogram(metric: Metric) -> dict[str, Any]:
    """Return a histogram, summed over its labels; buckets: [le, how many were at most le], ascending, without +Inf."""
    buckets: dict[float, float] = {}
    for sample in metric.samples:
        if sample.name == f"{metric.name}_bucket":
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return {
        "count": _sum_of(metric, "_count"),
        "sum": _sum_of(metric, "_sum"),
        "buckets": [[bound, buckets[bound]] for bound in sorted(buckets) if bound != float("inf")],
    }


def _of_contexts(metric: Metric) -> dict[str, dict[str, float]]:
    """Return a histogram's sum and count for each context."""
    found: dict[str, dict[str, float]] = {}
    for sample in metric.samples:
        part = sample.name.removeprefix(f"{metric.name}_")
        if part in ("sum", "count"):
            of_context = found.setdefault(sample.labels.get("context", ""), {"sum": 0.0, "count": 0.0})
            of_context[part] += sample.value
    return found


def _sum_of(metric: Metric, *suffixes: str) -> float:
    """Return the samples with these ends of their names, summed over labels."""
    names = [metric.name + suffix for suffix in suffixes]
    return float(sum(sample.value for sample in metric.samples if sample.name in names))
