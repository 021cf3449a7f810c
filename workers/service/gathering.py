"""What several attention workers say, as one answer."""

from collections.abc import Mapping, Sequence

from prometheus_client import Metric

from workers.serving.messages import ContextInfo

_STATES = ("ready", "building", "failed")  # the first of them is what a user can count on


def join_contexts(told: Sequence[Sequence[ContextInfo]]) -> list[ContextInfo]:
    """Each context once, as the worker tells it that has got furthest with it; ordered by age, then name."""
    best: dict[str, ContextInfo] = {}
    for info in (info for infos in told for info in infos):
        best[info.name] = min(best.get(info.name, info), info, key=_from_done)
    return sorted(best.values(), key=lambda info: (info.created_at, info.name))


def join_metrics(told: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Each metric once, with every worker's samples; the label `worker` says whose. told: by name of the worker."""
    joined: dict[str, Metric] = {}
    for worker, metrics in told.items():
        for metric in metrics:
            one = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
            one.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in metric.samples]
    return list(joined.values())


def _from_done(info: ContextInfo) -> tuple[int, float]:
    return _STATES.index(info.state), -info.progress
