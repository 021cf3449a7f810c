"""Does the service withstand hostile clients? Sends thousands of bad requests, and times /health meanwhile.

python -m bench.hostile [--url http://127.0.0.1:8000 --key KEY] [--requests 5000 | --seconds 600] [--json FILE]

Without --url, it starts a service of its own, which requires a key. Without --key, no wrong keys are sent.

Gate: every client that waits for a reply gets a whole one; no 5xx except 503 with Retry-After; no refusal of more than
4 KB; no wrong key is accepted; /health always answers. Slow clients are connected at the same time, until they are cut
off. "left": the client did not wait for a reply.
"""

import asyncio
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.hostile_requests import KINDS, Pieces, Target
from bench.timing import end_as_interrupted, finish, options_parser
from bench.turns.service import MODEL, serving

MAX_REFUSAL_BYTES = 4096
PATIENCE_S = 180.0  # a request that takes longer counts as hung; a prompt may have 1000 tokens, the machine other users
PROBE_EVERY_S = 0.02
BASELINE_S = 3.0
LEFT = b"left"  # in place of a reply
OWN_KEY = "the-key-of-a-bench"


@dataclass
class Outcome:
    """The outcomes of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)  # also "closed" (without a reply), "left", "hung", "?"
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    biggest_refusal_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    def saw(self, what: str, kind: str, reply: bytes | None, waits: bool) -> None:
        """Record a reply; see `judged`. waits: the client does not hang up before it has a reply."""
        status, fault = judged(reply)
        if status == "closed" and not waits:
            fault = ""
        if kind == "bad key" and status[0] == "2":
            fault = f"status {status} for a wrong key"
        self.statuses[status] += 1
        self.by_kind.setdefault(kind, Counter())[status] += 1
        if reply is not None and status[0] in "45":
            self.biggest_refusal_bytes = max(self.biggest_refusal_bytes, body_bytes(reply))
        if fault:
            self.faults.append(f"{what}: {fault}")


def judged(reply: bytes | None) -> tuple[str, str]:
    """Return a reply's status and its fault, or "". reply: None if it did not come in time, LEFT if nobody waited."""
    if reply is None:
        return "hung", "no reply in time"
    if reply == LEFT:
        return "left", ""
    if not reply:
        return "closed", "the connection was closed without a reply, or there was none"
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode("ascii", "replace") if head.startswith(b"HTTP/1.") else "?"
    if status == "?":
        return status, f"no HTTP: {reply[:60]!r}"
    if status[0] == "5" and not (status == "503" and b"retry-after:" in head.lower()):
        return status, f"status {status}: {body[:200]!r}"
    if status[0] in "45" and body_bytes(reply) > MAX_REFUSAL_BYTES:
        return status, f"a refusal of {body_bytes(reply)} bytes"
    has_declared_end = re.search(rb"\r\n(content-length|transfer-encoding):", head.lower())  # else the close ends it
    is_broken = has_declared_end and not _is_complete(reply)
    return status, f"a reply that broke off: {reply[-60:]!r}" if is_broken else ""


def body_bytes(reply: bytes) -> int:
    """Return the size of the first reply's body; replies to pipelined requests may follow it."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    declared = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
    return int(declared[1]) if declared else len(rest)


async def attack(
    target: Target, num_requests: int, concurrency: int, num_slow: int, seed: int, seconds: float | None = None
) -> Outcome:
    """Send requests of random kinds, `concurrency` at a time, with slow clients connected throughout.

    With seconds, num_requests is ignored: requests are sent until the time is over.
    """
    outcome, until = Outcome(), None if seconds is None else time.monotonic() + seconds
    todo = iter(range(num_requests if seconds is None else sys.maxsize))
    stop = asyncio.Event()
    kinds = [kind for kind in KINDS if target.key or kind != "bad key"]  # without a key, the service wants none
    slow = [asyncio.create_task(_slow_client(target, stop, outcome)) for _ in range(num_slow)]

    async def work() -> None:
        for number in todo:
            if until is not None and time.monotonic() > until:
                return
            own = random.Random(f"{seed} {number}")  # so a fault can be reproduced by its number
            kind = own.choice(kinds)
            pieces = KINDS[kind](own, target)
            outcome.saw(f"{kind} (request {number})", kind, await _exchange(target, pieces, own), -1.0 not in pieces)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    stop.set()
    await asyncio.gather(*slow)
    return outcome


async def _exchange(target: Target, pieces: Pieces, rng: random.Random) -> bytes | None:
    """Send the pieces and return the reply, LEFT, b"" (not connected) or None (not in time).

    A number among the pieces is a wait in seconds; -1 hangs up.
    """
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
    except OSError:
        return b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            receiving = asyncio.create_task(_received(reader))
            for piece in pieces:
                if receiving.done():
                    break
                if isinstance(piece, bytes):
                    writer.write(piece)
                    try:
                        await writer.drain()
                    except OSError:
                        break
                elif piece < 0:
                    await asyncio.sleep(rng.random() * 0.05)
                    if not receiving.done():
                        receiving.cancel()
                        return LEFT
                else:
                    await asyncio.sleep(piece)
            return await receiving
    except TimeoutError:
        return None
    finally:
        writer.transport.abort()


async def _received(reader: asyncio.StreamReader) -> bytes:
    """Return one reply, or everything until the server closes the connection."""
    parts = b""
    try:
        while not _is_complete(parts):
            part = await reader.read(1 << 16)
            if not part:
                break
            parts += part
    except OSError:
        pass
    return parts


def _is_complete(reply: bytes) -> bool:
    head, gap, body = reply.partition(b"\r\n\r\n")
    if not gap:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")


async def _slow_client(target: Target, stop: asyncio.Event, outcome: Outcome) -> None:
    """Send a body or a header slowly, byte by byte, and begin again when cut off."""
    rng = random.Random()
    while not stop.is_set():
        begin = target.head("POST", "/v1/completions", 1000) if rng.random() < 0.5 else b"GET /health HTTP/1.1\r\n"
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            receiving = asyncio.create_task(_received(reader))
            writer.write(begin)
            while not stop.is_set() and not receiving.done():
                writer.write(b"x")
                await asyncio.sleep(0.2)
            if receiving.done():
                outcome.saw("slow client", "slow client, cut off", receiving.result(), waits=False)
            receiving.cancel()
            writer.transport.abort()
        except OSError:
            await asyncio.sleep(0.2)


def probe(host: str, port: int, begun: Event, stop: Event, latencies: Any) -> None:
    """Time /health in a process of its own, with a new connection each time, and once more after `stop` is set."""
    found: list[tuple[float, float]] = []  # when, and milliseconds
    request = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    is_last = False
    while not is_last:
        is_last, started_at = stop.is_set(), time.perf_counter()
        try:
            with socket.create_connection((host, port), timeout=10) as connection:
                connection.sendall(request)
                is_ok = connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            is_ok = False
        found.append((started_at, 1000 * (time.perf_counter() - started_at) if is_ok else float("inf")))
        begun.set()
        time.sleep(PROBE_EVERY_S)
    latencies.put(found)


def measured(
    url: str,
    key: str,
    model: str,
    *,
    num_requests: int = 0,
    seconds: float | None = None,
    concurrency: int = 16,
    num_slow: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """Attack and probe at the same time. Returns the report, whose `faults` is empty if the service withstood it."""
    parts = urlsplit(url)
    assert parts.hostname is not None, f"{url} names no host"
    target = Target(parts.hostname, parts.port or 80, key, model)
    processes = multiprocessing.get_context("spawn")
    begun, stop, latencies = processes.Event(), processes.Event(), processes.Queue()
    prober = processes.Process(target=probe, args=(target.host, target.port, begun, stop, latencies), daemon=True)
    prober.start()
    begun.wait()
    # the baseline: /health without other requests, on this machine with its present load
    time.sleep(BASELINE_S)
    started_at = time.perf_counter()
    outcome = asyncio.run(attack(target, num_requests, concurrency, num_slow, seed, seconds))
    took_s = time.perf_counter() - started_at
    stop.set()
    probes = latencies.get(timeout=30)
    prober.join(10)
    alone_ms = sorted(ms for at, ms in probes if at < started_at)
    health_ms = sorted(ms for at, ms in probes if at >= started_at)
    if num_failed := health_ms.count(float("inf")):
        outcome.faults.insert(0, f"/health did not answer {num_failed} of {len(health_ms)} times")
    return {
        "requests": outcome.statuses.total(),
        "seconds": round(took_s, 1),
        "statuses": dict(sorted(outcome.statuses.items())),
        "biggest_refusal_bytes": outcome.biggest_refusal_bytes,
        "faults": outcome.faults[:20],
        "num_faults": len(outcome.faults),
        "health_probes": len(health_ms),
        "health_p50_ms": round(statistics.median(health_ms), 2),
        "health_p99_ms": _p99(health_ms),
        "health_max_ms": round(health_ms[-1], 2),
        "asked_for_a_key": bool(key),
        "health_alone_p50_ms": round(statistics.median(alone_ms), 2),
        "health_alone_p99_ms": _p99(alone_ms),
        "seed": seed,
        "cpus": os.cpu_count(),
        "by_kind": {kind: dict(counts) for kind, counts in sorted(outcome.by_kind.items())},
    }


def _p99(ascending: list[float]) -> float:
    return round(ascending[min(len(ascending) - 1, int(0.99 * len(ascending)))], 2)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--url")
    parser.add_argument("--key", default="")
    parser.add_argument("--model", default=MODEL, help="id of a model that is ready")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, help="send requests for this long, instead of --requests")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--slow", type=int, default=8, help="clients that are slow throughout")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end_as_interrupted()
    with ExitStack() as stack:
        url, key = given.url, given.key
        if url is None:
            store, key = stack.enter_context(tempfile.TemporaryDirectory()), OWN_KEY
            url = stack.enter_context(serving(Path(store), f"server.api_keys={key}")).url
        report = measured(
            url, key, given.model, num_requests=given.requests, seconds=given.seconds,
            concurrency=given.concurrency, num_slow=given.slow, seed=given.seed,
        )  # fmt: skip
    for kind, counts in report["by_kind"].items():
        print(f"{kind:40} {', '.join(f'{status} x {count}' for status, count in sorted(counts.items()))}")
    finish({"bench": "hostile", **report}, given.json)
    sys.exit(report["num_faults"] > 0)


if __name__ == "__main__":
    main()
