"""Can a tenant with its own salt find rows that another tenant left, or notice them by timing?

    python -m bench.turns.tenants [--requests 2000] [--at-once 8] [--json FILE]

Eight tenants repeatedly and concurrently send the same text, each with a secret and a `cache_salt` of its own. Gates:
every answer is the one that the tenant gets without any others, and has no other tenant's secret; a tenant's first
request finds nothing. Then a ninth tenant sends another tenant's whole prompt with its own salt: it finds nothing, and
waits for its first token as long as for a prompt that nobody has sent (medians within a factor of 1.25), while the
tenant itself waits less than half as long.
"""

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import end_as_interrupted, finish, gate, options_parser
from bench.turns.service import TEXTS, Reply, Service, ask, serving, user

TENANTS = ("heron", "walnut", "quartz", "bellows", "saffron", "granite", "juniper", "cobalt")
SHARED = (TEXTS / "speech.txt").read_text()[:1500]
MAX_TOKENS, NUM_PROBES = 4, 12


def prompt(secret: str) -> list[Any]:
    return [user(f"{SHARED}\n\nThe secret word is {secret}. Repeat: the secret word is")]


def ask_all(service: Service, num_requests: int, at_once: int, want: dict[str, str]) -> list[Reply]:
    order = [TENANTS[i % len(TENANTS)] for i in range(num_requests)]
    random.Random(0).shuffle(order)
    with service.client() as client, ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(lambda tenant: ask(client, prompt(tenant), MAX_TOKENS, tenant), order))
    for tenant, reply in zip(order, replies, strict=True):
        others = [other for other in TENANTS if other != tenant and other in reply.text]
        gate(not others, f"{tenant} was told of {others}: {reply.text!r}")
        gate(reply.text == want[tenant], f"{tenant} was told {reply.text!r} instead of {want[tenant]!r}")
    return replies


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    end_as_interrupted()
    with tempfile.TemporaryDirectory() as directory:
        with serving(Path(directory, "alone"), "kept.memory_bytes=0") as service, service.client() as client:
            want = {tenant: ask(client, prompt(tenant), MAX_TOKENS, tenant).text for tenant in TENANTS}
        with serving(Path(directory, "store")) as service, service.client() as client:
            for tenant in TENANTS:
                first = ask(client, prompt(tenant), MAX_TOKENS, tenant)
                gate(first.cached_tokens == 0 and first.text == want[tenant], f"{tenant}'s first request: {first}")
            replies = ask_all(service, options.requests, options.at_once, want)
            gate(all(reply.cached_tokens > 0 for reply in replies), "a tenant does not find its own")
            own, foreign, fresh = [], [], []
            for probe in range(NUM_PROBES):  # in turns, so that other load affects all alike
                secret = TENANTS[probe % len(TENANTS)]
                own.append(ask(client, prompt(secret), 1, secret))
                foreign.append(ask(client, prompt(secret), 1, f"a ninth, {probe}"))
                fresh.append(ask(client, [user(f"{probe} {SHARED[5:]}\n\nThe secret word is {secret}.")], 1, "a tenth"))
    gate(not any(reply.cached_tokens for reply in [*foreign, *fresh]), "who has no right salt finds something")
    own_s, foreign_s, fresh_s = (float(np.median([r.ttft_s for r in some])) for some in (own, foreign, fresh))
    gate(foreign_s > 0.8 * fresh_s and foreign_s < 1.25 * fresh_s, f"{foreign_s:.3f} s tells from {fresh_s:.3f} s")
    gate(own_s < 0.5 * foreign_s, f"its own prompt takes a tenant {own_s:.3f} s, another {foreign_s:.3f} s")
    finish(
        {
            "bench": "turns.tenants",
            "requests": options.requests,
            "tenants": len(TENANTS),
            "foreign_words": 0,
            "wrong_answers": 0,
            "ttft_s": {"own": round(own_s, 3), "wrong_salt": round(foreign_s, 3), "never_sent": round(fresh_s, 3)},
        },
        options.json,
    )


if __name__ == "__main__":
    main()
