"""Collective operations of several devices of one host that share a model's steps, with a process for each device.

All processes call the same functions in the same order.
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

MEET_S = 180.0  # the time limit for all processes to find each other, and each other's memory
_NOT_MET = "another device has not reached the point at which this one waits for it"
# A lost process is detected by other means; a live one may pin memory or compile for minutes.
_WAIT = timedelta(minutes=60)
# Neither the network nor NVLink multicast is needed, and a process that is killed while it uses multicast can do harm.
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # weights are sent one after another anyway
}


class Devices:
    """This process's membership of the group of devices. Sums are the same to the bit on all devices.

    GPUs read each other's memory directly (torch's symmetric memory); CPUs, for trials, communicate by gloo.
    """

    # whether this process has joined a group of GPUs: torch counts such groups for the life of the process
    _have_met: ClassVar[bool] = False

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """Join the other processes. meeting: a file that does not exist yet, by which they find each other.

        If they do not within MEET_S, this process is killed. Raises NoDeviceError for GPUs that cannot read each
        other's memory.
        """
        if dist.is_initialized():
            raise ConfigError(
                "this process computes with other devices already; close the engine that does, then begin again"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.share, self.device = share, device
        self._handles: dict[int, Any] = {}  # of symmetric memory, by address
        self._name = f"csattn-{meeting}"  # the group's name for symmetric memory
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
                "these GPUs cannot read each other's memory, which csattn needs for several; choose one device"
            )

    def __repr__(self) -> str:
        how = "symmetric memory" if self._is_symmetric else dist.get_backend()
        return f"<Devices {self.share.rank} of {self.share.num_devices}, by {how}>"

    def close(self) -> None:
        """Leave the group. No step may be in flight. Unowned CUDA graphs are freed first, because they refer to it."""
        gc.collect()
        with ends_within(MEET_S, _NOT_MET):
            dist.destroy_process_group()

    def shared_zeros(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate zeros that all devices can read and write. All processes call this at the same time."""
        if not self._is_symmetric:
            return torch.zeros(sizes, dtype=dtype, device=self.device)
        import torch.distributed._symmetric_memory as symmetric  # slow, and with requirements of its own

        with self.all_or_none():
            zeros: Tensor = symmetric.empty(sizes, dtype=dtype, device=self.device).zero_()
            torch.cuda.synchronize(self.device)  # after the rendezvous others may write to it
        with ends_within(MEET_S, _NOT_MET):
            self._handles[zeros.data_ptr()] = symmetric.rendezvous(zeros, self._name)  # type: ignore[arg-type]
        return zeros

    def exchange(self, batch_size: int, width: int) -> Exchange | None:
        """Allocate what GPU kernels need to sum [batch_size, width] numbers over all devices; None on CPUs: use `add`.

        At most `width` or `batch_size` programs take part. All processes call this at the same time.
        """
        if not self._is_symmetric:
            return None
        ranks = range(self.share.num_devices)
        own = self.shared_zeros(2, len(ranks), batch_size, width, dtype=torch.int64)
        handle = self._handles[own.data_ptr()]
        inboxes = tuple(handle.get_buffer(rank, own.shape, own.dtype).data_ptr() for rank in ranks)
        counts = torch.zeros(max(batch_size, width), dtype=torch.int32, device=self.device)
        return Exchange(own, inboxes, counts, self.share.rank)

    def add(self, x: Tensor) -> None:
        """Replace x, on CPUs, by the sum of all devices' x."""
        dist.all_reduce(x)

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Enqueue out = all devices' parts, side by side.

        part: [num_rows, columns of out // num_devices], from `shared_zeros`; work enqueued later may overwrite it.
        """
        columns = out.view(len(out), self.share.num_devices, -1).unbind(1)
        if not self._is_symmetric:
            parts = part.new_empty(self.share.num_devices, *part.shape)
            dist.all_gather(list(parts), part)
            for of_device, own in zip(columns, parts, strict=True):
                of_device.copy_(own)
            return
        handle = self._handles[part.data_ptr()]
        handle.barrier(channel=0)  # all have written their parts
        for rank, of_device in enumerate(columns):
            of_device.copy_(handle.get_buffer(rank, part.shape, part.dtype))
        handle.barrier(channel=1)  # all have read the others' parts

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Make the body succeed in all processes or raise in all."""
        try:
            yield
        except Exception:
            self._all(False)
            raise
        if not self._all(True):
            raise DevicesError("an operation failed on another device; the message of that device says why")

    def send(self, what: Any, rank: int) -> None:
        """Send data classes of tensors to process `rank`, which calls `receive`. Tensors that share memory share it
        there too."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(what)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), rank)
        dist.send(data, rank)
        for memory in pickler.memories:
            dist.send(memory.to(self.device), rank)

    def receive(self) -> Any:
        """Return what process 0 sends, with its tensors on this process's device."""

        def received(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            buffer = torch.empty(size, dtype=dtype, device=device)
            dist.recv(buffer, 0)
            return buffer

        cpu = torch.device("cpu")
        data = received(int(received(1, torch.int64, cpu)), torch.uint8, cpu)
        memory = partial(received, dtype=torch.uint8, device=self.device)
        return _Unpickler(io.BytesIO(data.numpy().tobytes()), memory).load()

    def least(self, number: int) -> int:
        """Return the minimum of all devices' numbers."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def _all(self, is_so: bool) -> bool:
        """Return whether `is_so` holds in all processes."""
        return bool(self.least(int(is_so)))

    def _reads_others(self) -> bool:
        """Try symmetric memory; return whether each device can read the others' on this machine."""
        try:
            with self.all_or_none():
                self._name_group()
            ones = self.shared_zeros(4, 8).fill_(1 + self.share.rank)
            torch.cuda.synchronize()
            parts = torch.zeros(4, 8 * self.share.num_devices, dtype=torch.float32, device=self.device)
            self.gather(ones, parts)
            ranks = torch.arange(1, self.share.num_devices + 1, device=self.device)
            return bool((parts == ranks.repeat_interleave(8)).all())
        except (RuntimeError, AttributeError, ImportError, DevicesError):  # links or torch versions without it
            return False

    def _name_group(self) -> None:
        """Register the group with torch's symmetric memory, under a name that no other group has had."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore("symmetric", c10d._get_default_store())
        c10d._register_process_group(self._name, dist.group.WORLD)
        symmetric._group_name_to_store[self._name] = store
        _SymmetricMemory.set_group_info(self._name, self.share.rank, self.share.num_devices, store)


class _Pickler(pickle.Pickler):
    """Collects the memory of tensors instead of pickling it, in the order of first use."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.memories: list[Tensor] = []  # uint8
        self._numbers: dict[tuple[int, int], int] = {}  # index in `memories`, by address and size

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
    """Raise NoDeviceError unless there is a GPU that runs the engine's kernels, and CuPy to compile them."""
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
    """Raise NoDeviceError if there are fewer GPUs, ConfigError if this process has joined a group of GPUs before."""
    _require_first_meeting()
    found = torch.cuda.device_count()
    if num_devices > found:
        raise NoDeviceError(
            f"{num_devices} devices were requested, and this process sees {found}; request no more than that"
        )


def _require_first_meeting() -> None:
    """Raise ConfigError if this process has joined a group of GPUs before.

    torch numbers the keys by which processes find each other's memory with a counter that lives as long as the process,
    whatever the group: a process that has been in a group and one that has not would wait for each other for ever.
    """
    if Devices._have_met:
        raise ConfigError(
            "this process has computed with several GPUs already, and a process can begin that only once; start "
            "another process"
        )
