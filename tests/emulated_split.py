"""Run `bench.split`'s processes of two devices on the CPU, with its kernels compiled for the CPU.

Prints the results of both as JSON, each for memory that suffices, that has no room for the whole model, and that has no
room for the second device's share.
"""

import gc
import json
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import split
from bench.decode import placements, workload
from bench.decode.prepared import TooLargeError
from bench.shapes import config_named
from csattn.attention import device as attention
from csattn.attention import every_row
from csattn.search.device import compiling
from csattn.share import Share
from offload import gather, slot_cache, step_mail
from offload.pinned import PinnedRows
from tests.cuda_on_cpu.emulated import Emulator
from tests.workers.engine.emulated_engine import ignore
from workers.model.devices import Devices

CEILINGS = {"read_gbps": 2.0, "h2d_gbps": 1e9}
ADD_US, STEP_US = 7.0, 5e4


def main(*places: str) -> None:
    """Fork the second device's process: importing what both need takes longer than their steps."""
    gc.freeze()  # the bench collects garbage after each measurement
    fork = multiprocessing.get_context("fork")  # no thread has started yet
    receiver, sender = fork.Pipe(duplex=False)
    second = fork.Process(target=lambda: sender.send(measure(*places, rank=1)), daemon=True)
    second.start()
    sender.close()
    found = measure(*places, rank=0)
    print(json.dumps([found, receiver.recv()]))
    second.join()


def measure(kernels: str, recording: str, meeting: str, *, rank: int) -> list[Any]:
    torch.set_num_threads(1)  # the other process uses the other cores
    patch = pytest.MonkeyPatch()
    _emulate(Emulator(Path(kernels)), patch)
    devices = Devices(Share(rank, 2), torch.device("cpu"), Path(meeting))
    arguments = Namespace(
        shape="llama-3.1-70b",
        recording=Path(recording),
        contexts="300",
        batches="2",
        placements="device,hybrid,host",
        variant="default",
        steps=1,
    )
    bench = split._Bench(arguments, devices)
    with torch.no_grad():
        found = [bench.run([1, 2])]
        arguments.placements = "device"
        patch.setattr(split, "require_memory", partial(_refuse, "the whole model"))
        found.append(bench.run([1, 2]))
        if rank:
            patch.setattr(split, "require_memory", partial(_refuse, "each device's share of the weights"))
        found.append(bench.run([2]))
    devices.close()
    return found


def _emulate(emulator: Emulator, patch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(patch, compiling, attention, every_row, gather, slot_cache, step_mail)
    for module in (workload, placements, split):
        patch.setattr(module, "DTYPE", torch.float32)
    for module in (placements, split):
        patch.setattr(module, "require_memory", ignore)
    patch.setattr(placements, "PinnedRows", partial(PinnedRows, register=ignore, unregister=ignore))
    patch.setattr(split, "ceilings", lambda: CEILINGS)
    patch.setattr(split, "WARM_UP_STEPS", 1)
    patch.setattr(split, "time_steps", _time_steps)
    patch.setattr(split, "_graph_us", _graph_us)
    patch.setattr(split, "config_named", _few_heads)


def _few_heads(name: str) -> Any:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    return config_named(name, num_hidden_layers=2, hidden_size=64, intermediate_size=48, vocab_size=130, **heads)


def _time_steps(step: Callable[[], None], num_steps: int) -> list[float]:
    for _ in range(num_steps):
        step()
    return [STEP_US] * num_steps


def _graph_us(run: Callable[[], None], others_us: Iterator[float] = cycle([4.0, 0.0])) -> float:  # noqa: B008 (shared)
    """An addition takes 7 µs with an exchange, which is timed first, and 6 without."""
    run()
    return 4 * (ADD_US - 1.0) + next(others_us)


def _refuse(this: str, num_bytes: int, what: str) -> None:
    if what == this:
        raise TooLargeError(f"{what} needs {num_bytes} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
