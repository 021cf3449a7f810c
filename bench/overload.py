"""How does a service behave under ten times the load it can serve? `python -m bench.overload [--model M]`.

First a closed loop: as many clients as requests run at once, each of which asks again when it has its answer. This
gives the service's rate, and the time of an admitted request. Then an open loop: requests arrive at random times, at
ten times that rate, and are not repeated. Gate: every request is answered or refused, and a refusal is a 429 or 503
that says when to try again.
"""

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.timing import end_as_interrupted, finish, gate, options_parser, percentiles_ms
from tests.workers.service.serving import Service, serving

TEXT = Path(__file__).parent / "texts" / "novel.txt"
FACTOR = 10
RUNNING = 4  # requests that are decoded at the same time; none may wait
NUM_TOKENS, CONTEXT_CHARS = 32, 8000
PATIENCE_S = 120.0
CONTENT = re.compile(r'"content":"((?:[^"\\]|\\.)*)"')  # of a chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one request; times are in seconds from sending it."""

    status: int
    first_s: float
    whole_s: float
    retry_after: str | None
    text: str


class Client:
    """Asks one question again and again, each time on a new connection; it needs little CPU time itself."""

    def __init__(self, url: str, model: str, num_tokens: int) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        turns = [{"role": "user", "content": "What is it about?"}]
        body = json.dumps({"model": model, "messages": turns, "max_tokens": num_tokens, "stream": True})
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        self._request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def ask(self) -> Reply:
        sent = time.perf_counter()
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            with closing(writer):
                writer.write(self._request)
                head = await reader.readuntil(b"\r\n\r\n")
                first = time.perf_counter()
                body = await reader.read()
        whole = time.perf_counter()
        lines = head.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        text = "".join(json.loads(f'"{piece}"') for piece in CONTENT.findall(body.decode()))
        return Reply(int(lines[0].split()[1]), first - sent, whole - sent, headers.get("retry-after"), text)


async def measure(service: Service, model: str, options: argparse.Namespace) -> dict[str, Any]:
    client = Client(service.url, model, NUM_TOKENS)
    alone = [await client.ask() for _ in range(3)]
    since = time.perf_counter()
    full = await closed_loop(client, RUNNING, options.seconds)
    rate = len(full) / (time.perf_counter() - since)  # the last answers come after options.seconds
    over = await open_loop(client, FACTOR * rate, options.seconds, random.Random(options.seed))
    wanted = alone[0].text
    gate(bool(wanted), f"a request alone was answered with status {alone[0].status} and no text")
    admitted = [reply for reply in over if reply.status == 200]
    refused = [reply for reply in over if reply.status != 200]
    gate(
        all(reply.text == wanted for reply in [*alone, *full, *admitted]), "an answer differs from the one given alone"
    )
    gate(bool(admitted), f"none of {len(over)} requests was admitted")
    gate({reply.status for reply in refused} <= {429, 503}, f"refusals were {Counter(r.status for r in refused)}")
    gate(all(reply.retry_after for reply in refused), "a refusal did not say when to come again")
    full_s, over_s = ([reply.whole_s for reply in replies] for replies in (full, admitted))
    return {
        "requests_per_s": round(rate, 2),
        "offered_per_s": round(len(over) / options.seconds, 2),
        "refused": dict(Counter(reply.status for reply in refused)),
        "refusal": percentiles_ms([reply.whole_s for reply in refused]),
        "alone": percentiles_ms([reply.whole_s for reply in alone]),
        "full": percentiles_ms(full_s),
        "admitted": percentiles_ms(over_s),
        "first_byte_full": percentiles_ms([reply.first_s for reply in full]),
        "first_byte_admitted": percentiles_ms([reply.first_s for reply in admitted]),
        "admitted_p50_to_full_p50": round(float(np.median(over_s) / np.median(full_s)), 3),
    }


async def closed_loop(client: Client, num_clients: int, seconds: float) -> list[Reply]:
    """Run num_clients clients, each of which asks again when it is answered."""
    until = time.perf_counter() + seconds
    replies: list[Reply] = []

    async def go_on() -> None:
        while time.perf_counter() < until:
            replies.append(await client.ask())

    await asyncio.gather(*(go_on() for _ in range(num_clients)))
    return replies


async def open_loop(client: Client, rate: float, seconds: float, rng: random.Random) -> list[Reply]:
    """Send requests at random times (a Poisson process), without waiting for earlier replies."""
    asked: list[asyncio.Task[Reply]] = []
    since, at = time.perf_counter(), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, since + at - time.perf_counter()))
        asked.append(asyncio.create_task(client.ask()))
    return await asyncio.gather(*asked)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--model", help="model directory, .gguf file or hub id, as csattn serve takes it")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each part")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_as_interrupted()
    with tempfile.TemporaryDirectory() as store:
        given = ["--local", "--store", store, *(["--model", options.model] if options.model else [])]
        given += ["--set", f"limits.max_concurrent_requests={RUNNING}", "--set", "limits.max_queued_requests=0"]
        with serving(*given) as service:
            model = service.register("overload", TEXT.read_text()[:CONTEXT_CHARS])["model"]
            result = asyncio.run(measure(service, model, options))
    finish({"bench": "overload", "model": model, "running": RUNNING, **result}, options.json)


if __name__ == "__main__":
    main()
