"""What the build of a context gets of its node, and how many a cluster has room for."""

from dataclasses import dataclass

from csattn.errors import ConfigError
from index_build.inputs import DEVICES

MAX_DEFAULT_THREADS = 8  # larger nodes build several contexts at a time


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """What one task gets of its node."""

    device: str  # "cpu" or "cuda"
    num_threads: int

    def room(self, nodes: list[dict[str, float]]) -> int:
        """How many tasks run at once on nodes with these resources. One on a GPU asks for no CPUs."""
        kind, count = ("GPU", 1) if self.device == "cuda" else ("CPU", self.num_threads)
        return sum(int(node.get(kind, 0) // count) for node in nodes)


def choose_needs(nodes: list[dict[str, float]], device: str, num_threads: int | None) -> TaskNeeds:
    """What the build of a context asks of a cluster whose nodes have these resources: a GPU where there are any."""
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {num_threads}")
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
