"""Steps by several devices, each with its heads: the engine of the first, whose process the scheduler calls.

The other processes are told every call that changes something, and do the same with their heads; what each device adds
to the residual stream is summed up over all of them, inside their graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError, DevicesError
from csattn.models import LoadedModel
from csattn.models.share import require_shares, require_shares_of_few_bits
from csattn.models.weights import weights_of
from csattn.share import Share
from workers.engine.follower import EXPECTED, FollowerSpec
from workers.engine.followers import GRACE_S, MODULE, STEP_S, Followers
from workers.engine.gpu_engine import GpuEngine
from workers.engine.memory import Placement
from workers.engine.slots import require_new_context
from workers.engine.step_model import first_share, handed_share, step_model
from workers.model.deadline import ends_within
from workers.model.devices import Devices, require_device, require_devices
from workers.serving.messages import Selector
from workers.serving.step_engine import EngineCounts, Fidelity, Reading, StepResult, StepRow

LOAD_S = 1800.0  # that no context takes, nor the weights and what is captured before the first


class SplitEngine:
    """A `StepEngine` as `GpuEngine` is. Tokens are those of one device, up to the order of sums.

    Where the process of a device is lost, this one ends as well, with a sentence: whoever watches it starts it again.
    """

    draws = True

    def __init__(
        self,
        loaded: LoadedModel,
        config: SearchConfig,
        placement: Placement | str,
        num_devices: int,
        *,
        device: torch.device | None = None,  # the first, the others are those after it; the CPU to try it out
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        module: str = MODULE,  # whose main the other processes run
        **options: Any,  # of `GpuEngine`, but for a searcher; the processes share out num_threads
    ) -> None:
        if options.pop("searcher", None) is not None:
            raise ConfigError(
                "search workers support only one device; leave them out, and threads of each process search"
            )
        require_device()
        require_shares(step_model(loaded).spec, num_devices)
        require_shares_of_few_bits(weights_of(loaded.model), num_devices)
        kind = "cuda" if device is None else device.type
        if kind == "cuda":
            require_devices(num_devices)
        places = [torch.device(kind, rank) if kind == "cuda" else torch.device(kind) for rank in range(num_devices)]
        model = handed_share(loaded, num_devices)
        options["num_threads"] = max(1, (options.get("num_threads") or available_cpus()) // num_devices)
        # before any process is there: this one refuses what the others would
        self._engine = GpuEngine(model, config, placement, device=places[0], on_progress=on_progress, **options)
        # which others may have other memory for
        options |= {"tail_capacity": self._engine.tail_capacity, "own_on_host": self._engine.own_on_host}
        with ExitStack() as undo, ExitStack() as failed:
            failed.callback(self._engine.close)
            meeting = Path(undo.enter_context(TemporaryDirectory(prefix="csattn-devices-"))) / "meeting"
            specs = [
                FollowerSpec(
                    share=Share(rank, num_devices),
                    device=places[rank],
                    meeting=meeting,
                    model=model,
                    config=config,
                    placement=str(placement),
                    options=options,
                )
                for rank in range(1, num_devices)
            ]
            self._followers = Followers(specs, module)
            undo.callback(self._followers.close)
            self._devices = Devices(Share(0, num_devices), places[0], meeting)
            undo.callback(self._devices.close)
            self._engine.model = first_share(model, loaded, self._devices)
            self._undo = undo.pop_all()
            failed.pop_all()
        self.max_rows, self.num_slots = self._engine.max_rows, self._engine.num_slots
        self.tail_capacity, self.max_positions = self._engine.tail_capacity, self._engine.max_positions
        self.num_layers = self._engine.num_layers
        self._context_ids: set[int] = set()

    def __repr__(self) -> str:
        return f"<SplitEngine {self._devices!r}, {self._engine!r}>"

    @property
    def pids(self) -> list[int]:
        """Of the other processes."""
        return self._followers.pids

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        """All processes load at the same time: no step is made meanwhile."""
        require_new_context(context_id, self._context_ids, artifact, self.max_positions)
        with self._all_at_once("add_context", context_id, artifact.path):
            with self._devices.together():
                pass  # all have opened it
            self._engine.add_context(context_id, artifact)
        self._context_ids.add(context_id)

    def remove_context(self, context_id: int) -> None:
        self._engine.remove_context(context_id)
        self._followers.tell("remove_context", context_id)
        self._context_ids.remove(context_id)

    def preparation(self, context_id: int, config: SearchConfig, selector: Selector) -> None:
        """Nothing: all that requests need of a context is there once it is loaded."""

    def open(self, slot: int, context_id: int, config: SearchConfig, selector: Selector) -> None:
        if self._engine.is_started:
            self._engine.open(slot, context_id, config, selector)
            self._followers.tell("open", slot, context_id, config, selector)
            return
        with self._all_at_once("open", slot, context_id, config, selector):
            self._engine.open(slot, context_id, config, selector)

    def write_rows(self, slot: int, rows: Tensor) -> None:
        num_devices = self._devices.share.num_devices
        parts = [rows[:, Share(rank, num_devices).of(rows.shape[1])].clone() for rank in range(num_devices)]
        self._engine.write_rows(slot, parts[0])
        self._followers.tell_each("write_rows", [(slot, part) for part in parts[1:]])

    def read_rows(self, slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        own = self._engine.read_rows(slot, start, stop)
        others = self._followers.ask("read_rows", slot, start, stop)
        return lambda: torch.cat([own(), *(rows.result() for rows in others)], dim=1)

    def close_slot(self, slot: int) -> None:
        self._engine.close_slot(slot)
        self._followers.tell("close_slot", slot)

    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        self._engine.require_rows(rows)  # whatever it refuses is refused before the others begin
        slots, token_ids = [row.slot for row in rows], [row.token_id for row in rows]
        others: list[Future[Any]] = []
        if watch is None:
            self._followers.tell("step", slots, token_ids, None)
        else:
            others = self._followers.ask("step", slots, token_ids, watch)
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
        """What is done inside, the others do meanwhile: all of them, or none."""
        answers, own = self._followers.ask(name, *arguments), None
        try:
            with ends_within(LOAD_S, "the devices did not finish loading together in time"):
                yield
        except EXPECTED as error:
            own = error
        except Exception as error:
            self._followers.end_all(f"the first device failed at {name} ({error!r})")
        with self._followers.within(GRACE_S):
            errors = [error for error in (own, *(answer.exception() for answer in answers)) if error is not None]
        if errors:  # of all: first those that say why
            raise min(errors, key=lambda error: isinstance(error, DevicesError))

    def reading(self, slot: int) -> Reading:
        return self._engine.reading(slot)

    def counts(self) -> EngineCounts:
        others = [answer.result() for answer in self._followers.ask("counts")]
        all_of = [self._engine.counts(), *others]
        return EngineCounts(**{x.name: sum(getattr(of, x.name) for of in all_of) for x in fields(EngineCounts)})

    def close(self) -> None:
        """No step may be in flight."""
        with self._undo:
            self._followers.let_go()
            self._engine.close()  # its graphs go before what they were captured with

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _mean(seen: Sequence[Fidelity]) -> Fidelity:
    """Of as many heads each."""
    return Fidelity(sum(x.recall for x in seen) / len(seen), sum(x.mass for x in seen) / len(seen))
