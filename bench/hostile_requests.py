"""The kinds of bad requests. Each makes the pieces that a client sends; a number is a wait in seconds, -1 a hang-up."""

import json
import random
from collections.abc import Callable, Iterator
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
    """The service to which requests are sent."""

    host: str
    port: int
    key: str
    model: str

    def head(self, method: str, path: str, length: int | str | None, *lines: str, key: str | None = None) -> bytes:
        """Return the header of a request; `length` need not be true."""
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
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": [{"type": "text", "text": "Say one word."}]},
]  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "", "parameters": _SCHEMA, "strict": True}
_DRAWN = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "presence_penalty": 0.1, "stream": False,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "keep": 0.02, "lookahead": 0,
    "rest": "none", "selector": "csattn", "cache_salt": "x",
}  # fmt: skip
# for each address, a body with all its fields; `wrong_somewhere` changes values in it at any depth
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _MESSAGES, "max_tokens": 1, "stop": ["x"], "n": 1, "logprobs": True, "top_logprobs": 1,
        "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "none", "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        "stream_options": {"include_usage": True}, **_DRAWN,
    },
    "/v1/completions": {
        "prompt": ["Say", "one"], "max_tokens": 1, "stop": "x", "n": 1, "logprobs": 1, "echo": True, "suffix": "",
        "best_of": 1, "stream_options": {"include_usage": True}, **_DRAWN,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Say one word."}]},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "1"}],
        "instructions": "Be brief.", "max_output_tokens": 1, "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": "none", "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": False, "metadata": {}, **_DRAWN,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say one word.", "cache_control": {}}]},
                     {"role": "assistant", "content": [
                         {"type": "thinking", "thinking": "x", "signature": ""},
                         {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"},
                                                  {"type": "document", "source": {"type": "text", "data": "x"}}]},
                     {"role": "system", "content": "Be brief."}],
        "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 1, "stop_sequences": ["x"],
        "tools": [{"name": "f", "description": "", "input_schema": _SCHEMA}], "tool_choice": {"type": "none"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "x"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}, **_DRAWN,
    },
    "/tokenize": {"messages": _MESSAGES, "tools": [{"type": "function", "function": _FUNCTION}]},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/contexts": {"name": "a b", "text": "x"},
}  # fmt: skip


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key or index of every value in some JSON."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places_of(value[key])


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value, preferably one that causes trouble."""
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


def wrong_somewhere(rng: random.Random, target: Target) -> Pieces:
    """Change, remove or rename values anywhere in a body that has all fields."""
    path = rng.choice(list(BODIES))
    body = json.loads(json.dumps(BODIES[path] if path == "/v1/contexts" else {"model": target.model, **BODIES[path]}))
    places = [(inside, key) for inside, key in places_of(body) if key not in ("max_tokens", "max_output_tokens")]
    for _ in range(rng.choice([0, 1, 1, 1, 3])):
        inside, key = rng.choice(places or [(body, "x")])
        if isinstance(inside, list) or rng.random() < 0.7:
            inside[key] = nonsense(rng)
        else:
            value = inside.pop(key, None)
            if rng.random() < 0.5:
                inside[rng.choice(["", "x", key.upper(), "\x00"])] = value
            places = list(places_of(body))
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages") and rng.random() < 0.3:
        body["stream"] = True
    return target.sent(body, path)


ODD_TEXTS = (
    "\ud83d", "\udc00\ud83d", "\u202e\u2066", "e" + "\u0301" * 50, "\ufdd0\uffff", "\U0010ffff", "\x00", "\ufeff",
    "\u2028", "\u0130" * 50, "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 5,
)  # fmt: skip


def odd_unicode(rng: random.Random, target: Target) -> Pieces:
    """Send lone surrogates, direction marks, long runs of combining marks, noncharacters and invalid UTF-8."""
    odd = rng.choice(ODD_TEXTS)
    content = json.dumps(_request(target, prompt=odd, stop=[odd[:9]]), ensure_ascii=rng.random() < 0.5)
    path = rng.choice(["/v1/completions", "/tokenize"])
    data = content.encode("utf-8", rng.choice(["surrogatepass", "replace"]))
    if rng.random() < 0.3:
        data = rng.choice(
            [b"\xef\xbb\xbf" + data, content.encode("utf-16", "surrogatepass"), data.replace(b"Say", b"\xc0\x80")]
        )
    return target.sent(data, path)


def beyond_all_bounds(rng: random.Random, target: Target) -> Pieces:
    field, value = rng.choice(
        [("max_tokens", 10**10), ("n", 10**6), ("temperature", 1e9), ("stop", ["a"] * 999), ("logprobs", 10**6),
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


def odd_chunks(rng: random.Random, target: Target) -> Pieces:
    """Send a good body in chunks, small ones or some with a bad length, extension or trailer."""
    data = json.dumps(_request(target)).encode()
    size = rng.choice([1, 7, len(data)])
    chunks = [b"%x\r\n%s\r\n" % (len(data[i : i + size]), data[i : i + size]) for i in range(0, len(data), size)]
    fault = rng.randrange(6)
    if fault < 4:
        bad = [b"-1\r\nx\r\n", b"zz\r\nx\r\n", b"ffffffffffffffffff\r\nx\r\n", b"1;" + b"e" * 20_000 + b"\r\nx\r\n"][
            fault
        ]
        chunks.insert(rng.randrange(len(chunks) + 1), bad)
    head = target.head("POST", "/v1/completions", None, "Transfer-Encoding: chunked")
    end = b"0\r\n\r\n" if fault != 4 else b"0\r\nX-Trailer: " + b"y" * 40_000 + b"\r\n\r\n"
    return [head, *chunks, end, 0.05, *([-1.0] if fault < 5 else [])]


def pipelined(rng: random.Random, target: Target) -> Pieces:
    """Send many good and bad requests at once on one connection, and leave after at most one reply."""
    kinds = (good, broken_json, wrong_somewhere, odd_address)
    pieces = [piece for _ in range(rng.choice([2, 20])) for piece in rng.choice(kinds)(rng, target)]
    return [b"".join(piece for piece in pieces if isinstance(piece, bytes)), 0.05, -1.0]


def cuts_a_stream(rng: random.Random, target: Target) -> Pieces:
    """Read a stream for a while, then hang up."""
    body = _request(target, max_tokens=50, stream=True, n=rng.choice([1, 4]))
    return [*target.sent(body), rng.random(), -1.0]


def huge_header(rng: random.Random, target: Target) -> Pieces:
    """Send a header with a name, a value or an address of up to a megabyte, or with ten thousand lines."""
    what = rng.randrange(4)
    long = "y" * rng.choice([20_000, MIB])
    if what == 3:
        return [target.head("GET", "/?" + long, None)]
    lines = [[f"X: {long}"], [f"{long}: x"], [f"X-{i}: y" for i in range(10_000)]][what]
    return [target.head("GET", "/health", None, *lines)]


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
    """Send a good request, so that the bad ones have something to disturb."""
    return target.sent(_request(target, stream=rng.random() < 0.5))


KINDS: dict[str, Callable[[random.Random, Target], Pieces]] = {
    make.__name__.replace("_", " "): make
    for make in (
        wrong_types, beyond_all_bounds, bad_key, broken_json, deep_json, wide_json, long_number, oversize,
        oversize_in_chunks, lies_about_length, smuggling, no_http, large_header, odd_address, bad_context,
        wrong_kind_of_body, hangs_up_in_the_body, hangs_up_in_the_answer, good, wrong_somewhere, odd_unicode,
        odd_chunks, pipelined, cuts_a_stream, huge_header,
    )
}  # fmt: skip
