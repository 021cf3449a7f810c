"""Tensor parallelism: steps on several GPUs, each with its heads, by the engine in the first one's process.

The scheduler calls this process. It sends every call that changes something to the other processes (followers), which
do the same with their heads. What each device adds to the residual stream is summed over all devices (all-reduce),
inside their graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, DevicesError
from csattn.models import LoadedModel
from csattn.models.module_weights import weights_of
from csattn.models.share import require_shares, require_shares_of_quantized
from csattn.selector_names import SelectorName
from csattn.share import Share
from workers.engine.checks import require_new_context
from workers.engine.gpu.engine import GpuEngine
from workers.engine.gpu.follower import EXPECTED, FollowerSpec
from workers.engine.gpu.followers import GRACE_S, MODULE, STEP_S, Followers
from workers.engine.gpu.memory import Placement
from workers.engine.gpu.step_model import first_share, handed_share, step_model
from workers.model.deadline import ends_within
from workers.model.devices import Devices, require_device, require_devices
from workers.serving.step_engine import EngineCounts, Fidelity, Reading, StepEngine, StepResult, StepRow

LOAD_S = 1800.0  # more than loading a context takes, or loading the weights and capturing steps


class SplitEngine(StepEngine):
    """The `StepEngine` of several GPUs. Its tokens are those of `GpuEngine` on one device, up to the order of sums.

    If another device's process is lost, this process logs why and exits too: a supervisor has to restart it.
    """

    draws = True

    def __init__(
        self,
        loaded: LoadedModel,
        config: SearchConfig,
        placement: Placement | str,
        num_devices: int,
        *,
        device: torch.device | None = None,  # only its type counts: GPUs from number 0 on, or the CPU to try it out
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        module: str = MODULE,  # whose `main` the other processes run
        **options: Any,  # of `GpuEngine`, except searcher; num_threads is divided among the processes
    ) -> None:
        if options.pop("searcher", None) is not None:
            raise ConfigError(
                "search workers support only one device; leave them out, and threads of each process search"
            )
        require_device()
        require_shares(step_model(loaded).spec, num_devices)
        require_shares_of_quantized(weights_of(loaded.model), num_devices)
        kind = "cuda" if device is None else device.type
        if kind == "cuda":
            require_devices(num_devices)
        places = [torch.device(kind, rank) if kind == "cuda" else torch.device(kind) for rank in range(num_devices)]
        model = handed_share(loaded, num_devices)
        options["num_threads"] = max(1, (options.get("num_threads") or available_cpus()) // num_devices)
        # made before any other process starts, because it refuses what the others would
        self._engine = GpuEngine(model, config, placement, device=places[0], on_progress=on_progress, **options)
        # decided once for all, because the free memory may differ between processes
        options |= {"tail_capacity": self._engine.tail_capacity, "own_on_host": self._engine.own_on_host}
        with ExitStack() as undo, ExitStack() as failed:
            failed.callback(self._engine.close)
            rendezvous = Path(undo.enter_context(TemporaryDirectory(prefix="csattn-devices-"))) / "meeting"
            specs = [
                FollowerSpec(
                    share=Share(rank, num_devices),
                    device=places[rank],
                    rendezvous=rendezvous,
                    model=model,
                    config=config,
                    placement=str(placement),
                    options=options,
                )
                for rank in range(1, num_devices)
            ]
            self._followers = Followers(specs, module)
            undo.callback(self._followers.close)
            self._devices = Devices(Share(0, num_devices), places[0], rendezvous)
            undo.callback(self._devices.close)
            self._engine.model = first_share(model, loaded, self._devices)
            self._undo = undo.pop_all()
            failed.pop_all()
        self.max_rows, self.alike_rows = self._engine.max_rows, self._engine.alike_rows
        self.max_requests = self._engine.max_requests
        self.tail_capacity, self.max_positions = self._engine.tail_capacity, self._engine.max_positions
        self.num_layers = self._engine.num_layers

    def __repr__(self) -> str:
        return f"<SplitEngine {self._devices!r}, {self._engine!r}>"

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Load a context in all processes at the same time. `meanwhile` is not called."""
        require_new_context(context_id, self._engine.placed_ids, artifact, self.max_positions)
        with self._all_at_once("add_context", context_id, artifact.path):
            with self._devices.all_or_none():
                pass  # returns when all have opened it
            self._engine.add_context(context_id, artifact)

    def remove_context(self, context_id: int) -> None:
        self._engine.remove_context(context_id)
        self._followers.send("remove_context", context_id)

    def open(self, request_slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        if self._engine.is_started:
            self._engine.open(request_slot, context_id, config, selector)
            self._followers.send("open", request_slot, context_id, config, selector)
            return
        with self._all_at_once("open", request_slot, context_id, config, selector):
            self._engine.open(request_slot, context_id, config, selector)

    def write_rows(self, request_slot: int, rows: Tensor) -> None:
        num_devices = self._devices.share.num_devices
        parts = [rows[:, Share(rank, num_devices).of(rows.shape[1])].clone() for rank in range(num_devices)]
        self._engine.write_rows(request_slot, parts[0])
        self._followers.send_each("write_rows", [(request_slot, part) for part in parts[1:]])

    def read_rows(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        own = self._engine.read_rows(request_slot, start, stop)
        others = self._followers.call("read_rows", request_slot, start, stop)
        return lambda: torch.cat([own(), *(rows.result() for rows in others)], dim=1)

    def close_request(self, request_slot: int) -> None:
        self._engine.close_request(request_slot)
        self._followers.send("close_request", request_slot)

    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        self._engine.requests.seen_lens(rows)  # raises for rows that cannot be run, before the others begin
        fed = [(row.request_slot, row.token_id, row.is_draft) for row in rows]
        others: list[Future[Any]] = []
        if watch is None:
            self._followers.send("step", fed, None)
        else:
            others = self._followers.call("step", fed, watch)
        try:
            with self._followers.within(STEP_S):
                result = self._engine.step(rows, want_logits, watch)
                seen = [each for each in (result.fidelity, *(other.result() for other in others)) if each is not None]
        except Exception as error:
            self._followers.end_all(f"the first device failed at a step ({error!r})")
            raise
        return replace(result, fidelity=_mean(seen)) if seen else result

    @contextmanager
    def _all_at_once(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have the other processes do the same while the body runs. All of them succeed, or all raise."""
        answers, own = self._followers.call(name, *arguments), None
        try:
            with ends_within(LOAD_S, "the devices did not finish loading together in time"):
                yield
        except EXPECTED as error:
            own = error
        except Exception as error:
            self._followers.end_all(f"the first device failed at {name} ({error!r})")
        with self._followers.within(GRACE_S):
            errors = [error for error in (own, *(answer.exception() for answer in answers)) if error is not None]
        if errors:  # prefer the cause: a DevicesError may only say that another device failed
            raise min(errors, key=lambda error: isinstance(error, DevicesError))

    def takes_drafts(self, artifact: Artifact | None, config: SearchConfig, selector: SelectorName) -> bool:
        return self._engine.takes_drafts(artifact, config, selector)

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        self._engine.drop_rows(request_slot, num_rows)
        self._followers.send("drop_rows", request_slot, num_rows)

    def reading(self, request_slot: int) -> Reading:
        return self._engine.reading(request_slot)

    def counts(self) -> EngineCounts:
        others = [answer.result() for answer in self._followers.call("counts")]
        counts = [self._engine.counts(), *others]
        return EngineCounts(**{x.name: sum(getattr(of, x.name) for of in counts) for x in fields(EngineCounts)})

    def close(self) -> None:
        """Close the engine and end the other processes. No step may be in flight."""
        with self._undo:
            self._followers.shut_down()
            self._engine.close()  # before the `Devices` that its graphs were captured with


def _mean(seen: Sequence[Fidelity]) -> Fidelity:
    """Return the mean over devices, which have the same number of heads."""
    return Fidelity(sum(x.recall for x in seen) / len(seen), sum(x.mass for x in seen) / len(seen))
