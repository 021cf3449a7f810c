"""Read a request's JSON body, within limits of size and time, and without blocking the event loop."""

import asyncio
import json
import math
import time
from typing import Any, NoReturn

import numpy as np
from starlette.requests import Request

from workers.api.errors import HttpError, quoted
from workers.serving.messages import BadRequestError
from workers.settings import LimitSettings

SMALL_BYTES = 32 << 10  # parsed in the event loop; larger bodies are parsed in a thread
SMALL_PIECE_BYTES = 16 << 10  # smaller pieces are not throttled
MANY_BODIES = 8  # of the largest size: all incomplete bodies together may hold as much memory


class BodyReader:
    """Reads bodies for one process, and counts what all of them hold together."""

    def __init__(self, limits: LimitSettings, pace: "Pace") -> None:
        self._limits, self._pace = limits, pace
        self._buffered_bytes = 0

    async def read_json(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # browsers send other types across origins without a CORS preflight
            raise HttpError(
                415, "unsupported_media_type", "wanted a JSON body; send the header 'Content-Type: application/json'"
            )
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise HttpError(
                415,
                "unsupported_media_type",
                f"Content-Encoding is {quoted(encoding)}: compressed bodies are not read; send the JSON as it is",
            )
        pieces = await self._read(request)
        if sum(map(len, pieces)) <= SMALL_BYTES:
            return parse(b"".join(pieces), self._limits)
        return await asyncio.to_thread(lambda: parse(b"".join(pieces), self._limits))

    async def _read(self, request: Request) -> list[bytes]:
        limits = self._limits
        pieces: list[bytes] = []
        num_bytes = 0
        ends_at = time.monotonic() + limits.body_timeout_s
        try:
            while True:
                patience_s = min(limits.stall_timeout_s, ends_at - time.monotonic())
                try:
                    async with asyncio.timeout(patience_s):
                        message = await request.receive()
                except TimeoutError:
                    raise HttpError(
                        408, "body_timeout", f"the body was not complete in time; {num_bytes} bytes had arrived"
                    ) from None
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                if num_bytes + len(piece) > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
                self._reserve(len(piece))
                num_bytes += len(piece)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces
                await self._pace.keep(len(piece))
        finally:
            self._buffered_bytes -= num_bytes

    def _reserve(self, size: int) -> None:
        if self._buffered_bytes + size > MANY_BODIES * self._limits.max_body_bytes:
            raise HttpError(503, "overloaded", "too many large bodies are coming in at once; send it again later")
        self._buffered_bytes += size


class Pace:
    """Limits the rate of all large bodies together, so that the event loop has time for other requests."""

    def __init__(self, bytes_per_s: float = 128 << 20) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    async def keep(self, size: int) -> None:
        """After receiving `size` bytes, wait as the rate demands; the sender waits meanwhile (backpressure)."""
        if size < SMALL_PIECE_BYTES:
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def too_large(max_body_bytes: int) -> HttpError:
    return HttpError(413, "body_too_large", f"the body is larger than the limit of {max_body_bytes} bytes")


def parse(body: bytes, limits: LimitSettings) -> Any:
    """Return the JSON value of a body. Too deep nesting and too many values are refused before anything is built."""
    try:
        text = body.decode("utf-8-sig")  # Windows programs put a byte order mark first
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    depth, num_values = outline(body)
    if depth > limits.max_json_depth:
        raise BadRequestError(f"the body nests {depth} levels deep, wanted at most {limits.max_json_depth}")
    if num_values > limits.max_json_values:
        raise BadRequestError(f"the body holds {num_values} values, wanted at most {limits.max_json_values}")
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:]
        raise BadRequestError(f"the body is not JSON: {what} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # raised for an integer of thousands of digits
        raise BadRequestError("the body holds a number that is too long to be read") from None


def outline(body: bytes, stretch: int = 256 << 10) -> tuple[int, int]:
    """Return the nesting depth of what may be JSON, and an upper bound of its number of values.

    numpy releases the GIL, and one stretch of bytes at a time stays in the CPU's cache.
    """
    plain = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ") if b"\\" in body else body
    inside, depth, deepest, num_values = False, 0, 0, 1
    for start in range(0, len(plain), stretch):
        chars = np.frombuffer(plain[start : start + stretch], np.uint8)
        is_odd = np.bitwise_xor.accumulate(chars == ord('"'))  # parity of the number of quotes so far
        outside = is_odd == inside
        inside ^= bool(is_odd[-1])
        opens = outside & ((chars | 0x20) == ord("{"))  # [ and { differ in that bit alone, as do ] and }
        closes = outside & ((chars | 0x20) == ord("}"))
        depths = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        deepest = max(deepest, depth + int(depths.max()))
        depth += int(depths[-1])
        num_values += int(np.count_nonzero(opens) + np.count_nonzero(outside & (chars == ord(","))))
    return deepest, num_values


def _no_constant(name: str) -> NoReturn:
    raise BadRequestError(f"the body holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequestError("the body holds a number that is too large to be read")
    return value
