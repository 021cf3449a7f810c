"""The resources of a build on a Ray cluster, and how many builds the cluster has room for."""

from dataclasses import dataclass

from csattn.checks import require_num_threads, require_one_of
from csattn.errors import ConfigError
from index_build.inputs import DEVICES

MAX_DEFAULT_THREADS = 8  # larger nodes build several contexts at a time


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """The resources that one task takes on its node."""

    device: str  # "cpu" or "cuda"
    num_threads: int

    def room(self, nodes: list[dict[str, float]]) -> int:
        """Return how many tasks fit on nodes with these resources at once. A task on a GPU reserves no CPUs."""
        kind, count = ("GPU", 1) if self.device == "cuda" else ("CPU", self.num_threads)
        return sum(int(node.get(kind, 0) // count) for node in nodes)


def choose_needs(nodes: list[dict[str, float]], device: str, num_threads: int | None) -> TaskNeeds:
    """Choose the resources of a task for nodes with these resources: a GPU if any node has one. Raises ConfigError."""
    require_one_of("--device", device, DEVICES)
    if num_threads is not None:
        require_num_threads("--threads", num_threads)
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device == "cuda" and not with_gpu:
        raise ConfigError("--device cuda needs a node with a GPU, and the cluster has none; use cpu")
    if with_gpu and device != "cpu":
        fewest = min(int(node.get("CPU", 1) // node["GPU"]) for node in with_gpu)
        return TaskNeeds("cuda", num_threads or min(max(fewest, 1), MAX_DEFAULT_THREADS))
    smallest = min((int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1), default=1)
    needs = TaskNeeds("cpu", num_threads or min(smallest, MAX_DEFAULT_THREADS))
    if not needs.room(nodes):
        raise ConfigError(
            f"no node of the cluster has {needs.num_threads} CPU for a build; add one, or give fewer --threads"
        )
    return needs
