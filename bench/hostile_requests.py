"""The kinds of bad requests: each makes the pieces that a client sends. A number among them is a wait, -1 a hang-up."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "n", "stop", "seed", "logprobs", "top_logprobs", "keep", "lookahead", "selector", "tools", "user",
    "response_format", "logit_bias", "presence_penalty", "echo", "suffix", "best_of", "nothing",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Whom to send to."""

    host: str
    port: int
    key: str
    model: str

    def head(self, method: str, path: str, length: int | str | None, *lines: str, key: str | None = None) -> bytes:
        """The header of a request; `length` may be a lie."""
        fields = [f"Host: {self.host}:{self.port}", *lines]
        if self.key or key:
            fields.append(f"Authorization: Bearer {self.key if key is None else key}")
        if not any(line.lower().startswith("content-type") for line in lines):
            fields.append("Content-Type: application/json")
        if length is not None:
            fields.append(f"Content-Length: {length}")
        return "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", ""]).encode("latin-1", "replace")

    def sent(self, body: Any, path: str = "/v1/completions", *lines: str) -> list[bytes | float]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return [self.head("POST", path, len(content), *lines) + content]


Pieces = list[bytes | float]


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with a liking for those that hurt."""
    leaves: list[Any] = [
        None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -0.0, 1e308, 0.5, "", "x", "\x00", "\ud800", "\u202e",
        "a" * 3000, "smollm2-135m@../../etc/passwd", "'; DROP TABLE contexts; --", "<script>", "%00", "\r\nX: y",
    ]  # fmt: skip
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(leaves)
    if rng.random() < 0.5:
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(("role", "content", "type", "text", "x" * 100)): nonsense(rng, depth + 1) for _ in range(3)}


def _request(target: Target, **changes: Any) -> dict[str, Any]:
    return {"model": target.model, "prompt": "Say one word.", "max_tokens": 1, **changes}


def wrong_types(rng: random.Random, target: Target) -> Pieces:
    body = _request(target, **{rng.choice(FIELDS): nonsense(rng) for _ in range(rng.randrange(1, 4))})
    if rng.random() < 0.5:
        del body["prompt"]
        body.setdefault("messages", [{"role": "user", "content": "x"}] if rng.random() < 0.5 else nonsense(rng))
        return target.sent(body, "/v1/chat/completions")
    return target.sent(body)


def beyond_all_bounds(rng: random.Random, target: Target) -> Pieces:
    field, value = rng.choice(
        [("max_tokens", 10**9), ("n", 10**6), ("temperature", 1e9), ("stop", ["a"] * 999), ("logprobs", 10**6),
         ("keep", 1e300), ("seed", 10**40), ("top_p", -1), ("prompt", ["x"] * 999), ("prompt", "y" * 2 * MIB)]
    )  # fmt: skip
    return target.sent(_request(target, **{field: value}))


def bad_key(rng: random.Random, target: Target) -> Pieces:
    key = rng.choice(["wrong", target.key + "x", target.key[:-1], "\xff\xfe", "x" * 3000, " ", "null"])
    path = rng.choice(["/v1/models", "/metrics", "/v1/status", "/v1/contexts", "/version", "/nothing"])
    return [target.head("GET", path, None, key=key)]


def broken_json(rng: random.Random, target: Target) -> Pieces:
    whole = json.dumps(_request(target)).encode()
    cut = rng.randrange(len(whole))
    flipped = bytearray(whole)
    flipped[cut] ^= 1 << rng.randrange(8)
    return target.sent(rng.choice([whole[:cut], bytes(flipped), rng.randbytes(cut), whole + b"x", b"", b"NaN", b'"']))


def deep_json(rng: random.Random, target: Target) -> Pieces:
    opening = rng.choice([b"[", b'{"a":', b'[{"a":['])
    return target.sent(opening * rng.choice([20, 1000, 100_000]))


def wide_json(rng: random.Random, target: Target) -> Pieces:
    item = rng.choice([b"0,", b"[],", b'"",', b"{},"])
    return target.sent(b'{"prompt": [' + item * rng.choice([1000, 300_000, MIB]) + b"0]}")


def long_number(rng: random.Random, target: Target) -> Pieces:
    return target.sent(b'{"model": ' + b"9" * rng.choice([5000, MIB]) + rng.choice([b"}", b".5}", b"e99999}"]))


def oversize(rng: random.Random, target: Target) -> Pieces:
    size = rng.choice([9 * MIB, 20 * MIB])
    return [target.head("POST", "/v1/contexts", size), *[b"x" * MIB] * (size // MIB)]


def oversize_in_chunks(rng: random.Random, target: Target) -> Pieces:
    head = target.head("POST", "/v1/contexts", None, "Transfer-Encoding: chunked")
    return [head, *[b"100000\r\n" + b"x" * MIB + b"\r\n"] * rng.choice([9, 20]), b"0\r\n\r\n"]


def lies_about_length(rng: random.Random, target: Target) -> Pieces:
    length = rng.choice(["-1", "1e3", "99999999999999999999", "0x10", "10, 20", "", "12"])
    return [target.head("POST", "/v1/completions", length) + b'{"model": 1}', -1.0]


def smuggling(rng: random.Random, target: Target) -> Pieces:
    both = target.head("POST", "/v1/completions", 4, "Transfer-Encoding: chunked")
    twice = target.head("POST", "/v1/completions", 4, "Content-Length: 40")
    return [rng.choice([both, twice]) + b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", 0.05, -1.0]


def no_http(rng: random.Random, target: Target) -> Pieces:
    return [
        rng.choice([rng.randbytes(500), b"\x16\x03\x01\x02\x00\x01", b"GET /\r\n\r\n", b"\r\n" * 100]) + b"\r\n\r\n",
        -1.0,
    ]


def large_header(rng: random.Random, target: Target) -> Pieces:
    lines = [f"X-{number}: {'y' * 500}" for number in range(rng.choice([40, 200]))]
    return [target.head("GET", "/v1/models", None, *lines)]


def odd_address(rng: random.Random, target: Target) -> Pieces:
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW", "TRACE", "HEAD"])
    path = rng.choice(
        ["/", "/v1", "/v1/models/%2e%2e%2fpasswd", "/static/../app.py", "/static/..%5capp.py", "/v1/contexts/%00",
         "/v1/contexts/" + "a" * 2000, "/v1/models/%ff%fe", "//health", "/health/", "/v1/contexts/%0d%0aX:y",
         "/?" + "q" * 2000]
    )  # fmt: skip
    return [target.head(method, path, 0), 0.02, *([-1.0] if method == "HEAD" else [])]


def bad_context(rng: random.Random, target: Target) -> Pieces:
    names = ["../x", "a/b", "", "a" * 999, "\u0000", "a@b", 5, None, "\ud800", "con text"]
    return target.sent({"name": rng.choice(names), "text": "x"}, "/v1/contexts")


def wrong_kind_of_body(rng: random.Random, target: Target) -> Pieces:
    kind = rng.choice(
        ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "*/*", ";"]
    )
    return target.sent(_request(target), "/v1/completions", f"Content-Type: {kind}")


def hangs_up_in_the_body(rng: random.Random, target: Target) -> Pieces:
    return [target.head("POST", "/v1/completions", 10_000) + b"{" * rng.randrange(5000), -1.0]


def hangs_up_in_the_answer(rng: random.Random, target: Target) -> Pieces:
    return [*target.sent(_request(target, max_tokens=200, stream=rng.random() < 0.5)), -1.0]


def good(rng: random.Random, target: Target) -> Pieces:
    """So that the others have something to disturb."""
    return target.sent(_request(target, stream=rng.random() < 0.5))


KINDS: dict[str, Callable[[random.Random, Target], Pieces]] = {
    make.__name__.replace("_", " "): make
    for make in (
        wrong_types, beyond_all_bounds, bad_key, broken_json, deep_json, wide_json, long_number, oversize,
        oversize_in_chunks, lies_about_length, smuggling, no_http, large_header, odd_address, bad_context,
        wrong_kind_of_body, hangs_up_in_the_body, hangs_up_in_the_answer, good,
    )
}  # fmt: skip
