"""How an ingress interprets an attention worker's silence, tested without Ray."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")

from ray.exceptions import ActorDiedError

from workers.service import ray_worker
from workers.service.ray_worker import RayWorker
from workers.serving.messages import WorkerLostError, WorkerStatus


async def never(*arguments: object) -> None:
    await asyncio.sleep(60.0)


async def dead(*arguments: object) -> None:
    raise ActorDiedError


def test_a_busy_worker_is_not_taken_for_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a long call, for example to load contexts, requests for its contexts still go to it."""
    monkeypatch.setattr(ray_worker, "_HEALTH_S", 0.01)
    status = WorkerStatus(since=1.0, num_running=0, max_requests=4)
    worker = RayWorker("attention-0", "csattn-0123")

    async def run() -> None:
        worker.status = status
        worker._actor = SimpleNamespace(**{name: SimpleNamespace(remote=never) for name in ("call", "heartbeat")})
        with pytest.raises(WorkerLostError, match=r"has not answered within 0\.01 s"):
            await worker._call_actor("call", "hold", timeout_s=0.01)
        assert worker.status is status
        await worker.heartbeat("i")
        assert worker.status is None, "it does not even hear that this process lives"
        worker.status, worker._actor = status, SimpleNamespace(call=SimpleNamespace(remote=dead))
        with pytest.raises(WorkerLostError, match="ended and is being started again"):
            await worker.call("hold")
        assert worker.status is None

    asyncio.run(run())
