"""A search worker as a Ray actor: Ray places it, counts its CPU and notices its death. Only its client talks to it,
through shared memory, and starts another when it is lost."""

from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.searchers.worker import SearchWorker, WorkerSpec
from workers.words import last_line


class SearchActors:
    """Launches search workers for the actor that makes this object: on its node, in its placement group."""

    def __init__(self) -> None:
        self._room = ray.util.get_current_placement_group()

    def __call__(self, spec: WorkerSpec) -> "SearchActorHandle":
        strategy: Any = "DEFAULT"
        if self._room is not None:
            # bundle 0 is the client's own
            strategy = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=1 + spec.number)
        options = ray.remote(SearchWorker).options(
            num_cpus=1,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}},
        )
        return SearchActorHandle(options.remote(spec))


class SearchActorHandle:
    """A `WorkerHandle` of a Ray actor."""

    def __init__(self, actor: Any):
        self._actor, self._serving = actor, actor.serve.remote()

    def fault(self) -> str | None:
        """Why the worker has ended; None while it runs."""
        ended, _ = ray.wait([self._serving], timeout=0)
        if not ended:
            return None
        try:
            ray.get(self._serving)
        except RayError as error:
            return f"a search worker has ended: {last_line(error)}"
        return "a search worker has ended"

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
