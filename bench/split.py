"""What several GPUs of one host make of a step: whole steps of a model with random weights, its heads shared out.

    python -m bench.split [--devices 1,2] [--contexts 131072] [--batches 1] [--placements device,hybrid] [--json FILE]

A process for each GPU. First it is seen that the logits of one step are those of one GPU, up to the order of sums; then
both are timed in the same run. Rows and queries are those of `bench.decode`, and so is what is counted as a step: the
captured graph and the feeding of its tokens. `add_us` is one sum over devices, in a graph of as many as a step has.
"""

import argparse
import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.decode.end_to_end import WARM_UP_STEPS, make_runner, time_steps
from bench.decode.gpu_timing import device_machine
from bench.decode.options import Options
from bench.decode.placements import placed
from bench.decode.recording import default_path, load_recording
from bench.decode.steps import RecordedQueries, fed_step
from bench.decode.widened import Heads, Which
from bench.decode.workload import Workload
from bench.random_weights import random_weights
from bench.shapes import shape_named
from bench.timing import finish, gate, numbers
from csattn.config import IndexConfig, SearchConfig
from csattn.models.share import share_of_head, share_of_layer, share_of_spec
from csattn.models.weights import Linear, ModelWeights
from csattn.share import Share
from workers.model.devices import Devices

CLOSE = 0.25  # of the logits' spread: what rounding to bfloat16 in all layers may change of the one it changes most


@dataclass(frozen=True, slots=True)
class ShareOfWorkload(Workload):
    """The heads of one device."""

    share: Share = Share(0, 1)  # noqa: RUF009 (it is frozen)

    def rows(self, layer_idx: int) -> Tensor:
        rows = Workload.rows(self, layer_idx)
        return rows[self.share.of(len(rows))].contiguous()

    def queries(self, layer_idx: int, which: Which = "own") -> Tensor:
        q = Workload.queries(self, layer_idx, which)
        return q[:, :, self.share.of(q.shape[2])].contiguous()

    def _index_arrays(self, layer_idx: int, config: IndexConfig) -> dict[str, Tensor]:
        whole = Workload(self.recording, self.heads, self.context_len, self.batch_size, self.device, self.is_shared)
        arrays = whole._index_arrays(layer_idx, config)
        of_heads = {name: array for name, array in arrays.items() if name != "segment_starts"}
        return arrays | {name: array[self.share.of(len(array))].contiguous() for name, array in of_heads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--contexts", default="131072")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--placements", default="device,hybrid")
    parser.add_argument("--variant", default="default")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--recording", type=Path, default=default_path())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)  # the rank, and where they meet
    arguments = parser.parse_args()
    counts = numbers(arguments.devices)
    most = max(counts)
    if arguments.process is None:
        gate(torch.cuda.device_count() >= most, f"{most} GPUs are wanted, {torch.cuda.device_count()} are there")
        _run_processes(most)
        return
    rank, meeting = int(arguments.process[0]), Path(arguments.process[1])
    del sys.argv[sys.argv.index("--process") :]  # no part of the command that is told
    assert set(counts) <= {1, most}, "one GPU, and another number of them"
    devices = Devices(Share(rank, most), torch.device("cuda", rank), meeting)
    with torch.no_grad():
        found = _Bench(arguments, devices).run(counts)
    if rank == 0:
        report = {
            "bench": "split",
            "machine": device_machine(),
            "shape": arguments.shape,
            "devices": repr(devices),
            "cases": found,
        }
        finish(report, arguments.json)
    devices.close()


def _run_processes(num: int) -> None:
    """One for each GPU; all end together, for each waits for the others."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
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
        self._arguments, self._devices, self._shape = arguments, devices, shape_named(arguments.shape)
        self._recording = load_recording(arguments.recording)

    def run(self, counts: list[int]) -> list[dict[str, Any]]:
        arguments, devices, found = self._arguments, self._devices, []
        whole = random_weights(self._shape, devices.device)
        own = share_of(whole, devices.share)
        if devices.share.rank or 1 not in counts:
            del whole
        gc.collect()
        torch.cuda.empty_cache()
        for context_len in numbers(arguments.contexts):
            for batch_size in numbers(arguments.batches):
                for placement in arguments.placements.split(","):
                    case = {"context_len": context_len, "batch_size": batch_size, "placement": placement}
                    logits = None
                    if 1 in counts:
                        with devices.together():
                            if devices.share.rank == 0:
                                timed, logits = self._measure(whole, placement, context_len, batch_size, Share(0, 1))
                                found.append({**case, "num_devices": 1, **timed})
                                print(json.dumps(found[-1]), flush=True)
                    timed, got = self._measure(own, placement, context_len, batch_size, devices.share)
                    timed["add_us"] = self._time_add(batch_size)
                    if logits is not None:
                        timed |= compare(got, logits)
                    found.append({**case, "num_devices": devices.share.num_devices, **timed})
                    if devices.share.rank == 0:
                        print(json.dumps(found[-1]), flush=True)
        return found

    def _measure(
        self, weights: ModelWeights, placement: str, context_len: int, batch_size: int, share: Share
    ) -> tuple[dict[str, Any], Tensor]:
        """Times, and the logits of the first step."""
        device, is_split = self._devices.device, share.num_devices > 1
        work = ShareOfWorkload(self._recording, Heads.of(self._shape), context_len, batch_size, device, share=share)
        search = SearchConfig(lookahead=0)
        options = Options(shape=weights.spec, search=search, ceilings={}, seconds=0.3)
        prepared = placed(work, options, self._arguments.variant, placement, search)
        try:
            devices = self._devices if is_split else None
            runner = make_runner(work, weights, RecordedQueries(prepared.attention, work), devices)
            logits = runner.step(batch_size).logits.clone()

            step = fed_step(runner, batch_size)
            for _ in range(WARM_UP_STEPS):
                step()
            times_us = time_steps(step, self._arguments.steps)
            p50, p99 = (round(float(x), 1) for x in np.percentile(times_us, [50, 99]))
            timed = {"p50_us": p50, "p99_us": p99, "hbm_bytes": torch.cuda.memory_allocated()}
        finally:
            prepared.close()
            del prepared
            gc.collect()
            torch.cuda.empty_cache()
        return timed, logits

    def _time_add(self, batch_size: int) -> float:
        """One sum over devices, as the step has them."""
        room, num_adds = self._devices.room(batch_size, self._shape.hidden_size), 2 * self._shape.num_layers

        def adds() -> None:
            for _ in range(num_adds):
                self._devices.add_over_devices(room)

        return round(_graph_us(adds) / num_adds, 2)


def _graph_us(run: Callable[[], None], times: int = 20) -> float:
    """As many replays on every device: each waits for the others'."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def compare(got: Tensor, want: Tensor) -> dict[str, Any]:
    apart = float((got - want).abs().max() / want.std())
    gate(apart < CLOSE, f"logits are {apart:.3f} of their spread apart, more than {CLOSE}")
    same = float((got.argmax(1) == want.argmax(1)).float().mean())
    return {"logits_apart": round(apart, 5), "same_tokens": same}


def share_of(weights: ModelWeights, share: Share) -> ModelWeights:
    """Copies, so that the whole can go."""

    def copied(linear: Linear) -> Linear:
        return Linear(linear.weight.clone(), linear.bias)

    def joined(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        return (Linear(torch.cat([linear.weight for linear in linears])),)

    spec, layers = weights.spec, []
    for layer_idx, (layer, of) in enumerate(zip(weights.layers, weights.spec.layers, strict=True)):
        part = share_of_layer(layer, spec.heads_of(layer_idx), of, share)
        layers.append(replace(part, qkv=joined(part.qkv), gate_up=joined(part.gate_up)))
    head = copied(share_of_head(weights.head, share))
    return replace(weights, spec=share_of_spec(spec, share.num_devices), layers=tuple(layers), head=head)


if __name__ == "__main__":
    main()
