"""Watches a service while a trace runs: its processes' memory and reads, and what its workers report."""

import argparse
import asyncio
import contextlib
import json
import re
import urllib.request
from http.client import HTTPException
from typing import Any

import psutil

from bench.process_memory import mapped_bytes
from bench.timing import gate

SAMPLE_S = 0.5


class ServiceWatch:
    """Watches memory and reads of processes and their children, and the bytes that the service's workers report."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Counts begin with the first `sample`."""
        self._pids, self._store = options.pid or [], options.store
        self._url, self._key = options.url.rstrip("/"), options.key
        self._peak_mb, self._read_bytes = 0.0, dict[int, list[int]]()
        self._mapped, self._held, self._num_samples = 0, 0, 0
        self._budget: int | None = None
        self._counts: dict[tuple[str, str], float] = {}  # last values, by worker and where contexts were found
        self._requests: dict[str, float] = {"memory": 0.0, "store": 0.0}  # since the first sample

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self.sample()

    async def sample(self) -> None:
        self._sample_processes()
        with contextlib.suppress(OSError, HTTPException):  # while a worker is lost
            await asyncio.to_thread(self._ask_workers)
            self._num_samples += 1

    def _sample_processes(self) -> None:
        rss, mapped = 0.0, 0
        for pid in self._pids:
            for process in family(pid):
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    rss += process.memory_info().rss / 1e6
                    self._read_bytes.setdefault(process.pid, []).append(process.io_counters().read_bytes)
                    if self._store is not None and self._budget is not None:
                        mapped = max(mapped, mapped_bytes(self._store, ".safetensors", process.pid))
        self._peak_mb, self._mapped = max(self._peak_mb, rss), max(self._mapped, mapped)

    def _ask_workers(self) -> None:
        for worker in self._get("/v1/status")["workers"]:
            self._held, self._budget = max(self._held, worker["held_bytes"]), worker["budget_bytes"] or self._budget
        text = self._get("/metrics")
        for labels, value in re.findall(r"^csattn_context_requests_total{(.*)} (\S+)$", text, re.M):
            of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            key, now = (of.get("worker", ""), of["found"]), float(value)
            before = self._counts.get(key, 0.0 if self._num_samples else now)
            self._requests[of["found"]] += now - before if now >= before else now  # less: a new process counts from 0
            self._counts[key] = now

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(self._url + path, headers={"Authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(request, timeout=10.0) as reply:
            return json.load(reply) if path.startswith("/v1/") else reply.read().decode()

    def found(self, new_tokens: int) -> dict[str, Any]:
        gate(self._num_samples > 0, "the service never told what it holds")
        of_all = sum(self._requests.values())
        result: dict[str, Any] = {
            "samples": self._num_samples,
            "held_bytes": self._held,
            "budget_bytes": self._budget,
            "requests_where_their_context_was": round(self._requests["memory"] / of_all, 4) if of_all else None,
            "requests_that_loaded": int(self._requests["store"]),
        }
        for what, num_bytes in (("held", self._held), ("resident", self._mapped)):
            gate(self._budget is None or num_bytes <= self._budget, f"{num_bytes:,} bytes of contexts were {what}")
        if self._pids:
            read = sum(counts[-1] - counts[0] for counts in self._read_bytes.values())
            result |= {"peak_rss_mb": round(self._peak_mb, 1), "disk_bytes_per_token": round(read / max(1, new_tokens))}
        if self._store is not None and self._budget is not None:
            result["resident_context_bytes"] = self._mapped
        return result


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; an empty list if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []
