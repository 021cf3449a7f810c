"""Several devices of one host that compute the same steps, a process each: how they add up what each has.

All of them call the same functions in the same order.
"""

import gc
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from csattn.cuda import missing_for_kernels
from csattn.errors import ConfigError, DevicesError
from csattn.share import Share
from offload.errors import NoDeviceError
from workers.model.deadline import ends_within
from workers.model.ops import Exchange

MEET_S = 180.0  # for all to find each other, and each other's memory
_NOT_MET = "another device has not come to where this one waits for it"
# a process that is lost is noticed otherwise; others may pin memory, or compile, for minutes
_WAIT = timedelta(minutes=60)
# the network is not needed, and NVLink's multicast neither: a program that is killed while it uses it can do harm
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # weights are sent in turn as it is
}


class Devices:
    """This process's place among them. Sums are the same to the bit on all devices.

    GPUs read each other's memory by themselves (torch's symmetric memory); CPUs, to try it out, are joined by gloo.
    """

    _have_met: ClassVar[bool] = False  # GPUs, in this process: torch counts their meetings as long as it lives

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """meeting: a file that is not there yet, by which they find each other.

        This process ends where they do not. Raises NoDeviceError for GPUs that cannot read each other's memory.
        """
        if dist.is_initialized():
            raise ConfigError("this process computes with other devices already; close what does, then begin anew")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.share, self.device = share, device
        self._handles: dict[int, Any] = {}  # of rooms, by address
        self._name = f"csattn-{meeting}"  # of the group, for symmetric memory
        self._is_symmetric = is_gpu = device.type == "cuda"
        if is_gpu:
            _require_first_meeting()
            Devices._have_met = True
            torch.cuda.set_device(device)
        with ends_within(MEET_S, _NOT_MET):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
                init_method=f"file://{meeting}",
                rank=share.rank,
                world_size=share.num_devices,
                timeout=_WAIT,
                device_id=device if is_gpu else None,
            )
            reads = not is_gpu or self._all(self._reads_others())
        if not reads:
            self.close()
            raise NoDeviceError(
                "these GPUs cannot read each other's memory, and several were not tried in another way; choose one "
                "device"
            )

    def __repr__(self) -> str:
        how = "symmetric memory" if self._is_symmetric else dist.get_backend()
        return f"<Devices {self.share.rank} of {self.share.num_devices}, by {how}>"

    def close(self) -> None:
        """No step may be in flight. Graphs that nobody holds any more are freed first: they hold on to this."""
        gc.collect()
        with ends_within(MEET_S, _NOT_MET):
            dist.destroy_process_group()

    def room(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that all devices can reach, zeros. All ask for theirs at the same time."""
        if not self._is_symmetric:
            return torch.zeros(sizes, dtype=dtype, device=self.device)
        import torch.distributed._symmetric_memory as symmetric  # which takes long, and has needs of its own

        with self.together():
            room: Tensor = symmetric.empty(sizes, dtype=dtype, device=self.device).zero_()
            torch.cuda.synchronize(self.device)  # from the meeting on others may write to it
        with ends_within(MEET_S, _NOT_MET):
            self._handles[room.data_ptr()] = symmetric.rendezvous(room, self._name)  # type: ignore[arg-type]
        return room

    def exchange(self, batch_size: int, width: int) -> Exchange | None:
        """By which GPUs' kernels add up rows of `width` numbers, of `batch_size` at a time; None for CPUs: see `add`.

        All ask for theirs at the same time.
        """
        if not self._is_symmetric:
            return None
        ranks = range(self.share.num_devices)
        own = self.room(2, len(ranks), batch_size, width, dtype=torch.int64)
        handle = self._handles[own.data_ptr()]
        inboxes = [handle.get_buffer(rank, own.shape, own.dtype).data_ptr() for rank in ranks]
        counts = torch.zeros(batch_size, dtype=torch.int32, device=self.device)
        return Exchange(torch.tensor(inboxes, device=self.device), counts, self.share.rank)

    def add(self, x: Tensor) -> None:
        """x becomes the sum of all devices' x, which are CPUs."""
        dist.all_reduce(x)

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Enqueue out = all devices' parts, side by side.

        part: [num_rows, columns of out // num_devices], which `room` gave, and may be written to again behind it.
        """
        columns = out.view(len(out), self.share.num_devices, -1).unbind(1)
        if not self._is_symmetric:
            parts = part.new_empty(self.share.num_devices, *part.shape)
            dist.all_gather(list(parts), part)
            for of_device, own in zip(columns, parts, strict=True):
                of_device.copy_(own)
            return
        handle = self._handles[part.data_ptr()]
        handle.barrier(channel=0)  # all have written theirs
        for rank, of_device in enumerate(columns):
            of_device.copy_(handle.get_buffer(rank, part.shape, part.dtype))
        handle.barrier(channel=1)  # all have read the others'

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done by all, or raises everywhere."""
        try:
            yield
        except Exception:
            self._all(False)
            raise
        if not self._all(True):
            raise DevicesError("another of the devices could not do what this one can; its own message says why")

    def send(self, what: Any, rank: int) -> None:
        """Data classes of tensors, to the process of that rank, which receives it. What shares memory does so there."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(what)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), rank)
        dist.send(data, rank)
        for memory in pickler.memories:
            dist.send(memory.to(self.device), rank)

    def receive(self, rank: int = 0) -> Any:
        """Its tensors are on this process's device."""

        def received(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            room = torch.empty(size, dtype=dtype, device=device)
            dist.recv(room, rank)
            return room

        cpu = torch.device("cpu")
        data = received(int(received(1, torch.int64, cpu)), torch.uint8, cpu)
        memory = partial(received, dtype=torch.uint8, device=self.device)
        return _Unpickler(io.BytesIO(data.numpy().tobytes()), memory).load()

    def least(self, number: int) -> int:
        """Of all devices' numbers."""
        told = torch.tensor([number])
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return int(told)

    def _all(self, is_so: bool) -> bool:
        """Whether it is so for all."""
        return bool(self.least(int(is_so)))

    def _reads_others(self) -> bool:
        """Whether this machine can, tried."""
        try:
            with self.together():
                self._name_group()
            ones = self.room(4, 8).fill_(1 + self.share.rank)
            torch.cuda.synchronize()
            parts = torch.zeros(4, 8 * self.share.num_devices, device=self.device)
            self.gather(ones, parts)
            ranks = torch.arange(1, self.share.num_devices + 1, device=self.device)
            return bool((parts == ranks.repeat_interleave(8)).all())
        except (RuntimeError, AttributeError, ImportError, DevicesError):  # for links and versions without it
            return False

    def _name_group(self) -> None:
        """Tell torch of it, by a name that no other has had."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore("symmetric", c10d._get_default_store())
        c10d._register_process_group(self._name, dist.group.WORLD)
        symmetric._group_name_to_store[self._name] = store
        _SymmetricMemory.set_group_info(self._name, self.share.rank, self.share.num_devices, store)


class _Pickler(pickle.Pickler):
    """The memory of tensors is put aside, in the order in which it comes up first."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.memories: list[Tensor] = []  # its bytes
        self._numbers: dict[tuple[int, int], int] = {}  # by address and size

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        storage = obj.untyped_storage()
        number = self._numbers.setdefault((storage.data_ptr(), storage.nbytes()), len(self.memories))
        if number == len(self.memories):
            self.memories.append(obj.new_empty(0, dtype=torch.uint8).set_(storage))
        return number, storage.nbytes(), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Callable[[int], Tensor]) -> None:
        super().__init__(file)
        self._memory, self._memories = memory, list[Tensor]()

    def persistent_load(self, pid: Any) -> Tensor:
        number, num_bytes, dtype, offset, sizes, strides = pid
        if number == len(self._memories):
            self._memories.append(self._memory(num_bytes))
        of = self._memories[number]
        found: Tensor = of.new_empty(0, dtype=dtype).set_(of.untyped_storage(), offset, sizes, strides)
        return found


def require_device() -> None:
    """Raise NoDeviceError where there is no GPU that the engine's kernels run on, or nothing to compile them by."""
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "this machine has no CUDA device, or torch is a build without CUDA; leave out the placement to decode on "
            "the CPU"
        )
    if (missing := missing_for_kernels(torch.cuda.current_device())) is not None:
        raise NoDeviceError(
            f"kernels of the GPU engine need {missing}; decode on another GPU, such as an H100, or leave out the "
            "placement to decode on the CPU"
        )
    if find_spec("cupy") is None:
        raise NoDeviceError(
            "the GPU engine needs CuPy, which is not installed: pip install -e '.[gpu]', or '.[gpu-cu13]' for CUDA 13"
        )


def require_devices(num_devices: int) -> None:
    """Raise a sentence where there are not so many, or where this process cannot meet them any more."""
    _require_first_meeting()
    found = torch.cuda.device_count()
    if num_devices > found:
        raise NoDeviceError(f"{num_devices} devices are asked for, and this process sees {found}; ask for no more")


def _require_first_meeting() -> None:
    """Keys by which torch's processes find each other's memory are counted in each for as long as it lives, whatever
    group they are of: a process that has met others and one that has not would wait for each other for ever."""
    if Devices._have_met:
        raise ConfigError(
            "this process has computed with several GPUs already, which a process can begin once; start another"
        )
