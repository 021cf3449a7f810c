"""Times whole decode steps of a model with random weights whose heads are divided over several GPUs of one host.

    python -m bench.split [--devices 1,2] [--contexts 131072] [--batches 1] [--placements device,hybrid] [--json FILE]

Each GPU has a process with its share of the weights; the first one has all of them while one GPU is timed. A case that
does not fit is `refused`. If one GPU has room, a step's logits must be those of one GPU, up to the order of sums; both
are timed in the same run. `--devices 4` leaves one GPU out. In `host`, a layer's rows are searched while the layer
before it is computed; each process has an equal share of the CPUs for its search threads.
Rows and queries are those of `bench.decode`. As there, a step is the captured graph and the feeding of its tokens.
`add_us` is the time of a kernel that sums over devices, in a graph with as many sums as a step, and `exchange_us` what
that takes more than on one device. `least_us` has the time of the bytes that a device must read (`moved_bytes`, at the
run's `read_gbps`) and of the exchanges. `bound_us` is their total, or more if the link needs longer than the reading;
`of_bound` is its share of the mean step.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.decode.end_to_end import WARM_UP_STEPS, make_runner, roofline, time_steps
from bench.decode.gpu_timing import capture, ceilings, device_machine
from bench.decode.options import Options
from bench.decode.placements import placed, schedules
from bench.decode.prepared import TooLargeError, require_memory
from bench.decode.recording import default_path, load_recording
from bench.decode.roofline import weight_bytes
from bench.decode.steps import RecordedQueries, greedy_step
from bench.decode.widened import Heads, Which
from bench.decode.workload import DTYPE, Workload
from bench.random_weights import random_weights
from bench.shapes import config_named
from bench.streamed import streamed_bytes
from bench.timing import end_as_interrupted, finish, gate, numbers, options_parser
from csattn.config import IndexConfig, SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import DevicesError
from csattn.models.description import describe
from csattn.models.share import share_of_spec
from csattn.share import Share
from workers.model.devices import Devices
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Exchange, Readers, Stream, num_squares

# largest change of any logit by rounding to bfloat16 in all layers, in standard deviations of the logits
CLOSE = 0.25


@dataclass(frozen=True, slots=True)
class ShareOfWorkload(Workload):
    """The part of a workload that has one device's heads, copied to memory of its own."""

    share: Share = Share(0, 1)  # noqa: RUF009 (it is frozen)

    def rows(self, layer_idx: int) -> Tensor:
        rows = Workload.rows(self, layer_idx)
        return rows[self.share.of(len(rows))].clone()

    def queries(self, layer_idx: int, which: Which = "own") -> Tensor:
        q = Workload.queries(self, layer_idx, which)
        return q[:, :, self.share.of(q.shape[2])].contiguous()

    def _index_arrays(self, layer_idx: int, config: IndexConfig) -> dict[str, Tensor]:
        whole = Workload(self.recording, self.heads, self.context_len, self.batch_size, self.device, self.is_shared)
        arrays = whole._index_arrays(layer_idx, config)
        of_heads = {name: array for name, array in arrays.items() if name != "segment_starts"}
        return arrays | {name: array[self.share.of(len(array))].clone() for name, array in of_heads.items()}


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--contexts", default="131072")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--placements", default="device,hybrid")
    parser.add_argument("--variant", default="default")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--recording", type=Path, default=default_path())
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)  # the rank, and the rendezvous file
    arguments = parser.parse_args()
    counts = numbers(arguments.devices)
    most = max(counts, default=0)
    wanted = "--devices is a number of GPUs above 1, alone or beside 1: 4, or 1,4"
    gate(most > 1 and set(counts) <= {1, most}, f"{wanted}; {arguments.devices!r} is neither")
    if arguments.process is None:
        gate(torch.cuda.device_count() >= most, f"{most} GPUs are wanted, {torch.cuda.device_count()} are there")
        _run_processes(most)
        return
    rank, rendezvous = int(arguments.process[0]), Path(arguments.process[1])
    del sys.orig_argv[sys.orig_argv.index("--process") :]  # not part of the reported command
    devices = Devices(Share(rank, most), torch.device("cuda", rank), rendezvous)
    with torch.no_grad():
        bench = _Bench(arguments, devices)
        found = bench.run(counts)
    if rank == 0:
        report = {
            "bench": "split",
            "machine": device_machine(),
            "ceilings": bench.ceilings,
            "shape": arguments.shape,
            "devices": repr(devices),
            "cases": found,
        }
        finish(report, arguments.json)
    devices.close()


def _run_processes(num: int) -> None:
    """Run a process for each GPU. When one ends, all are ended, because each waits for the others."""
    end_as_interrupted()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "bench.split", *sys.argv[1:], "--process"]
        children = [subprocess.Popen([*command, str(rank), f"{directory}/meeting"]) for rank in range(num)]
        try:
            while None in (states := [child.poll() for child in children]) and not any(states):
                time.sleep(0.1)
        finally:
            for child in children:
                child.kill()
    sys.exit(int(any(states)))


class _Bench:
    def __init__(self, arguments: argparse.Namespace, devices: Devices) -> None:
        self._arguments, self._devices, self._config = arguments, devices, config_named(arguments.shape)
        self._shape = describe(self._config)
        is_searched = len(self._shape.indexed_layers) == self._shape.num_layers
        gate(is_searched, f"some layers of {arguments.shape} are not searched; choose a shape of which all are")
        with devices.all_or_none():
            self._recording = load_recording(arguments.recording)
        self.ceilings = ceilings()  # measured on all devices at once, because steps also use all links at once
        torch.cuda.empty_cache()

    def run(self, counts: list[int]) -> list[dict[str, Any]]:
        arguments, devices, found = self._arguments, self._devices, []
        for context_len in numbers(arguments.contexts):
            for batch_size in numbers(arguments.batches):
                for placement in arguments.placements.split(","):
                    case = {"context_len": context_len, "batch_size": batch_size, "placement": placement}
                    logits = None
                    if 1 in counts:
                        with devices.all_or_none():
                            if devices.share.rank == 0:
                                timed, logits = self._measure(placement, context_len, batch_size, Share(0, 1))
                                found.append({**case, "num_devices": 1, **timed})
                                print(json.dumps(found[-1]), flush=True)
                    timed, got = self._measure(placement, context_len, batch_size, devices.share)
                    if logits is not None and got is not None:
                        timed |= compare(got, logits)
                    found.append({**case, "num_devices": devices.share.num_devices, **timed})
                    if devices.share.rank == 0:
                        print(json.dumps(found[-1]), flush=True)
        return found

    def _measure(
        self, placement: str, context_len: int, batch_size: int, share: Share
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Return the times and the logits of the first step, or `refused` and None. Frees the device's memory."""
        try:
            timed, logits = self._time_steps(placement, context_len, batch_size, share)
        except (TooLargeError, DevicesError) as error:
            return {"refused": str(error)}, None
        finally:
            # CUDA graphs and their memory are in reference cycles; freed during a capture, they would break it.
            gc.collect()
            torch.cuda.empty_cache()
        sums_us = 0.0
        if share.num_devices > 1:
            add_us = self._time_add(batch_size, self._devices.exchange(batch_size, self._shape.hidden_size))
            exchange_us = add_us - self._time_add(batch_size, None)
            sums_us = timed["least_us"]["sums"] = round(2 * self._shape.num_layers * exchange_us, 1)
            timed |= {"add_us": round(add_us, 2), "exchange_us": round(exchange_us, 2)}
        bound_us = timed["roofline_us"] + sums_us
        return timed | {"bound_us": round(bound_us, 1), "of_bound": round(bound_us / timed["mean_us"], 3)}, logits

    def _time_steps(
        self, placement: str, context_len: int, batch_size: int, share: Share
    ) -> tuple[dict[str, Any], Tensor]:
        device, is_split = self._devices.device, share.num_devices > 1
        what = "each device's share of the weights" if is_split else "the whole model"
        work = ShareOfWorkload(self._recording, Heads.of(self._shape), context_len, batch_size, device, share=share)
        spec = share_of_spec(self._shape, share.num_devices)
        [(_, search), *_] = schedules(SearchConfig(lookahead=0), placement)
        threads = max(1, available_cpus() // share.num_devices)
        options = Options(shape=spec, search=search, ceilings=self.ceilings, seconds=0.3, num_threads=threads)
        with self._devices.all_or_none() if is_split else nullcontext():
            require_memory(weight_bytes(spec), what)
            weights = random_weights(self._config, device, DTYPE, share=share if is_split else None)
            torch.cuda.empty_cache()  # frees the whole layers of which this is a share
            prepared = placed(work, options, self._arguments.variant, placement, search)
        try:
            devices = self._devices if is_split else None
            runner = make_runner(work, weights, RecordedQueries(prepared.attention, work), devices)
            logits = runner.step(batch_size).logits.clone()

            step = greedy_step(runner, batch_size)
            for _ in range(WARM_UP_STEPS):
                step()
            prepared.start_counting()
            times_us = time_steps(step, self._arguments.steps)
            facts = prepared.facts(len(times_us))
        finally:
            prepared.close()
        moved_bytes, roofline_us = roofline(work, weights, prepared, options, facts)
        p50, p99 = (round(float(x), 1) for x in np.percentile(times_us, [50, 99]))
        of_weights = streamed_bytes(weights), moved_bytes - streamed_bytes(weights)
        least_us = [round(num_bytes / self.ceilings["read_gbps"] / 1e3, 1) for num_bytes in of_weights]
        return {
            "p50_us": p50,
            "p99_us": p99,
            "mean_us": round(float(np.mean(times_us)), 1),
            "hbm_bytes": torch.cuda.memory_allocated(),
            "moved_bytes": round(moved_bytes),
            "least_us": dict(zip(("weights", "codes and rows"), least_us, strict=True)),
            "roofline_us": round(roofline_us, 1),
            **facts,
        }, logits

    def _time_add(self, batch_size: int, exchange: Exchange | None) -> float:
        """Return the µs of one addition to the residual stream, with an exchange as a sum over devices."""
        sizes, device = (batch_size, self._shape.hidden_size), self._devices.device
        ops, num_adds = TritonOps(device, self._shape.norm_eps), 2 * self._shape.num_layers
        hidden, scaled, ahead = (torch.zeros(sizes, dtype=DTYPE, device=device) for _ in range(3))
        squares = torch.zeros(num_squares(sizes[1]), batch_size, device=device)
        stream = Stream(hidden, scaled, ahead, squares, row_sums=exchange)
        branch = torch.zeros(sizes, device=device)
        readers = Readers(torch.ones(sizes[1], device=device))

        def adds() -> None:
            for _ in range(num_adds):
                ops.add_normed(branch, None, 1.0, 1.0, stream, readers)

        return _graph_us(adds) / num_adds


def _graph_us(run: Callable[[], None], times: int = 20) -> float:
    """Return the µs of a graph of `run`. All devices must replay it equally often, because they wait for each other."""
    graph = capture([run])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def compare(got: Tensor, want: Tensor) -> dict[str, Any]:
    distance = float((got - want).abs().max() / want.std())
    gate(distance < CLOSE, f"logits are {distance:.3f} of their spread apart, more than {CLOSE}")
    same = float((got.argmax(1) == want.argmax(1)).float().mean())
    return {"logits_apart": round(distance, 5), "same_tokens": same}


if __name__ == "__main__":
    main()
