"""Several attention workers behind one address: where do requests go, and what is lost if a worker or node is lost?

python -m bench.spread [--workers 2] [--nodes 1] [--every-s 15] [--model tiny|demo] ...
python -m bench.spread --workers 1 2 --every-s 0 --model llama-3.1-8b --set engine.placement=device ...

Runs `csattn serve` on Ray, on a cluster of its own on this machine or, with --nodes, on one of that many nodes, and a
trace of conversations (see `bench.load`) about contexts that were built before. Every --every-s seconds, the process of
an attention worker gets SIGKILL, or a node is removed, and another one added a little later. Gate: every answer equals
the one before any kill; streams end whole or with an error event; none hangs; no file of an artifact is written again;
and workers that come back hold the same contexts again. If several numbers of workers are given, they run one after the
other with the same trace and contexts, and must give the same answers; `gain` compares the last number with the first.
A model given by its shape has random weights.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch

from bench.faults import processes, spread
from bench.load import (
    Answers,
    add_options,
    context_name,
    context_text,
    finish_load,
    first_questions,
    make_trace,
    model_name,
    replay,
    stop,
    trace_report,
)
from bench.served_model import saved_model
from bench.service_watch import ServiceWatch
from bench.timing import end_as_interrupted, gate
from csattn.artifact import open_artifact
from csattn.config import preset
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import choose_wrapping, context_ids
from index_build.pipeline import build_artifact
from tests.index_build.batches import finished_files
from tests.workers.service.serving import Service, serving
from workers.serving.contexts import name_artifact

HUNG_S = 240.0
POLL_S = 0.1
NODE_DOWN_S = 3.0  # until another node is added
RECOVERY_S = 60.0  # within which a worker that is back must hold its contexts again
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


def build(options: argparse.Namespace, place: Path) -> list[str]:
    """Make a model and a store with all contexts; return a service's options."""
    path, dtype = saved_model(options.model, options.layers, place)
    loaded = load_model(None if path is None else str(path), dtype, device=options.device)
    store = place / "store"
    for number in range(options.contexts):
        build_one(loaded, store, number, options.context_chars)
    del loaded
    torch.cuda.empty_cache()  # a worker needs the device next
    settings = ["build.dtype=" + dtype, *options.set]
    own = ["--store", str(store), *([] if path is None else ["--model", str(path)]), "--threads", "1"]
    return [*own, *(word for setting in settings for word in ("--set", setting))]


def build_one(loaded: LoadedModel, store: Path, number: int, num_chars: int) -> None:
    wrapping = choose_wrapping(loaded.tokenizer)
    ids = context_ids(loaded.tokenizer, context_text(number, num_chars), wrapping)
    built = build_artifact(loaded, ids, preset("default"), store, notes={"wrapping": wrapping})
    with open_artifact(built.path) as artifact:
        name_artifact(store, context_name(number), built.artifact_id, artifact.spec.kv_dtype)


@contextlib.contextmanager
def service_of(workers: int, options: argparse.Namespace, own: list[str]) -> Iterator[tuple[Service, Any]]:
    """Run a service; yield it and its cluster, which is None with one node."""
    settings = [*own, "--set", f"ray.num_attention_workers={workers}"]
    if options.nodes == 1:
        with serving(*settings) as service:
            yield service, None
        return
    with (
        cluster_of(options.nodes, **NODE) as cluster,
        serving(*settings, "--set", f"ray.address={cluster.address}") as service,
    ):
        yield service, cluster


@contextlib.contextmanager
def cluster_of(num_nodes: int, **of_node: int) -> Iterator[Any]:
    """Run a cluster of nodes on this machine. of_node: Ray's options of a node, such as num_cpus."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**of_node, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**of_node)
        yield cluster
    finally:
        cluster.shutdown()


class Chaos:
    """Kills workers, or removes nodes, while a trace is running."""

    def __init__(self, service: Service, cluster: Any, options: argparse.Namespace) -> None:
        self._service, self._cluster, self._options = service, cluster, options
        self._random = random.Random(options.seed)
        self.num_killed = 0
        self.back_s: list[float] = []
        self.num_held: list[tuple[int, int]] = []  # contexts of a lost worker: before, and again after

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._options.every_s)
            before = await self.workers()
            started = time.monotonic()
            lost = await (self.lose_a_worker(before) if self._cluster is None else self.lose_a_node(before))
            for name in lost:
                had = before[name]["held"]
                again = had & await self.until_back(name, before[name])
                gate(again == had, f"{name} does not hold again {had - again}")
                self.num_held.append((len(had), len(again)))
            if lost:
                self.back_s.append(time.monotonic() - started)

    async def lose_a_worker(self, before: dict[str, Any]) -> list[str]:
        victims = processes(self._service, "attention worker")
        os.kill(self._random.choice(sorted(victims)), signal.SIGKILL)
        self.num_killed += 1
        lost = await self.lost(before)
        gate(bool(lost), "no worker was seen to be lost after one was killed")
        return lost

    async def lose_a_node(self, before: dict[str, Any]) -> list[str]:
        """Remove a node and add another, never the head node, which has Ray's own state and the HTTP proxy."""
        nodes = self._cluster.worker_nodes
        node = self._random.choice(sorted(nodes, key=lambda node: node.node_id))
        await asyncio.to_thread(self._cluster.remove_node, node, False)
        self.num_killed += 1
        lost = await self.lost(before)
        await asyncio.sleep(NODE_DOWN_S)
        self._cluster.add_node(**NODE)  # Ray requires this thread; clients are blocked meanwhile
        return lost

    async def lost(self, before: dict[str, Any]) -> list[str]:
        """Return the workers that are lost within some seconds of a kill; a node may have had several, or none."""
        for _ in range(50):
            now = await self.workers()
            if lost := [name for name, worker in now.items() if worker["since"] != before[name]["since"]]:
                return lost
            await asyncio.sleep(POLL_S)
        return []

    async def until_back(self, name: str, before: dict[str, Any]) -> set[str]:
        """Wait until a worker is back and holds its contexts again, or RECOVERY_S more; return what it holds."""
        until, since = time.monotonic() + HUNG_S, None
        while True:
            gate(time.monotonic() < until, f"{name} has not come back")
            worker = (await self.workers())[name]
            if worker["since"] not in (None, before["since"]):
                since = since or time.monotonic()
                if worker["held"] >= before["held"] or time.monotonic() > since + RECOVERY_S:
                    return set(worker["held"])
            await asyncio.sleep(POLL_S)

    async def workers(self) -> dict[str, Any]:
        """Return the workers from /v1/status by name, each with the contexts that it holds."""
        status = await asyncio.to_thread(status_of, self._service)
        return {
            worker["name"]: {
                **worker,
                "held": {context["id"] for context in status["contexts"] if worker["name"] in context["held_by"]},
            }
            for worker in status["workers"]
        }


def status_of(service: Service) -> dict[str, Any]:
    until = time.monotonic() + HUNG_S
    while True:
        with contextlib.suppress(httpx2.HTTPError, KeyError):
            reply = service.get("/v1/status").json()
            reply["workers"]
            return dict(reply)
        gate(time.monotonic() < until, "the service does not tell its status")
        time.sleep(POLL_S)


async def run(service: Service, cluster: Any, options: argparse.Namespace, answers: Answers) -> dict[str, Any]:
    from openai import AsyncOpenAI

    options.url, options.key, options.pid, options.store = service.url, "none", [], None
    trace = make_trace(options)
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=20, timeout=HUNG_S) as client:
        model = await model_name(client)
        await replay(client, model, first_questions(options), options, answers)
        watch, chaos = ServiceWatch(options), Chaos(service, cluster, options)
        await watch.sample()
        tasks = [asyncio.create_task(watch.run())]
        if options.every_s:
            tasks.append(asyncio.create_task(chaos.run()))
        started = time.perf_counter()
        try:
            said = await replay(client, model, trace, options, answers)
            num_replays = 1
            while chaos.num_killed < options.least_kills:
                for task in tasks:
                    if task.done():
                        task.result()
                said += await replay(client, model, trace, options, answers)
                num_replays += 1
        finally:
            ended = time.perf_counter()
            for task in tasks:
                stop(task)
    return {
        **trace_report(said, num_replays * trace, started, ended, options),
        **watch.found(sum(of.new_tokens for of in said)),
        "killed": chaos.num_killed,
        "back_after_s": spread(chaos.back_s),
        "contexts_held_before_and_again": [sum(counts) for counts in zip(*chaos.num_held, strict=True)],
    }


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    own = build(options, place)
    files = finished_files(place / "store")
    answers, cases = Answers(), []
    for workers in options.workers:
        with service_of(workers, options, own) as (service, cluster):
            cases.append({"workers": workers, **asyncio.run(run(service, cluster, options, answers))})
        print(json.dumps(cases[-1]), flush=True)
    gate(finished_files(place / "store") == files, "files of contexts were made again")
    header = {"bench": "spread", "model": options.model, "nodes": options.nodes, "settings": options.set}
    header |= {"killed_every_s": options.every_s, "rebuilt_files": 0}
    if len(cases) > 1:
        header["gain"] = round(cases[-1]["tokens_per_s"] / cases[0]["tokens_per_s"], 3)
        of_all = {name: sum(case[name] for case in cases) for name in ("turns", "different_answers")}
        return {**header, **of_all, "cases": cases}
    return {**header, **cases[0]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, named=True)
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[2],
        help="attention workers; several numbers are measured one after the other",
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=15.0, help="seconds between kills; 0: kill nothing")
    parser.add_argument("--least-kills", type=int, default=0, help="replay the trace until there were this many kills")
    parser.add_argument("--model", default="tiny", help="tiny, demo, or a model shape such as llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--device", default="cpu", help="device that builds the contexts")
    parser.add_argument("--set", action="append", default=[], help="setting of the service, KEY=VALUE; may be repeated")
    parser.set_defaults(may_lose=True)
    return parser


def main() -> None:
    options = parser().parse_args()
    end_as_interrupted()
    with tempfile.TemporaryDirectory() as scratch:
        finish_load(measure(options, Path(scratch)), options.json)


if __name__ == "__main__":
    main()
