"""The rows of Tables 2 to 7 of StreamIndex's paper, and csattn's figures for each of them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

K = 1024
TIMED_VARIANTS = ("csattn", "csattn fp8", "published")
# Table 7: variant -> queries and keys of a tile
ABLATIONS = {
    "published": (2048, 1024),
    "A1 no merge": (2048, 1024),
    "A2 short chunks skipped": (2048, 256),
    "A2 control": (2048, 256),
    "A3 float16 scores": (2048, 1024),
    "csattn": (2048, 1024),
}
KEY = ("table", "kind", "variant", "num_tokens", "top_k", "query_chunk", "key_chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One figure of one table."""

    table: int
    kind: str  # "time", "recall", or "pipeline" (time of selection and attention together)
    variant: str
    num_tokens: int
    top_k: int = 512
    dim: int = 4096
    query_chunk: int | None = 2048  # None: csattn's own tiles
    key_chunk: int | None = 8192

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify the case."""
        return {name: value for name, value in asdict(self).items() if name in KEY}

    @property
    def cost(self) -> float:
        """A number roughly in proportion to its time, so that slow cases come last."""
        slowness = 1 if self.variant.startswith("csattn") else 10
        return slowness * (self.num_tokens / K) ** 2


def cases_of(tables: set[int], max_tokens: int) -> list[Case]:
    """Return the cases of some tables, quick ones first."""
    chosen = [case for case in _all_cases() if case.table in tables and case.num_tokens <= max_tokens]
    return sorted(chosen, key=lambda case: case.cost)


def _all_cases() -> Iterator[Case]:
    for tokens in (2 * K, 4 * K, 8 * K):
        yield Case(table=2, kind="recall", variant="published", num_tokens=tokens)
        for variant in ("csattn", "csattn fp8"):
            yield Case(table=2, kind="recall", variant=variant, num_tokens=tokens, query_chunk=None, key_chunk=None)
    for table, top_k, dim in ((3, 512, 4096), (4, 1024, 7168)):
        sized: dict[str, Any] = {"table": table, "kind": "time", "top_k": top_k, "dim": dim}
        yield Case(**sized, variant="materialised", num_tokens=32 * K)
        for tokens in (32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K, 2048 * K):
            yield from _timed(sized, tokens, published=tokens <= 1024 * K)
    for tokens in (8 * K, 32 * K, 64 * K, 128 * K, 256 * K):
        yield from _timed({"table": 5, "kind": "pipeline"}, tokens, published=True)
        if tokens <= 128 * K:
            yield Case(table=5, kind="pipeline", variant="materialised", num_tokens=tokens)
    for chunk in (1 * K, 4 * K, 16 * K, 64 * K, 256 * K):
        yield from _swept(query_chunk=chunk)
        yield from _swept(key_chunk=chunk)
    for top_k in (64, 256, 512, 1024, 2048):
        yield from _swept(top_k=top_k)
    for variant, (query_chunk, key_chunk) in ABLATIONS.items():
        cut: dict[str, Any] = {"table": 7, "query_chunk": query_chunk, "key_chunk": key_chunk}
        yield Case(**cut, kind="recall", variant=variant, num_tokens=16 * K)
        if variant in ("published", "A3 float16 scores", "csattn"):
            yield Case(**cut, kind="time", variant=variant, num_tokens=256 * K)


def _timed(common: dict[str, Any], tokens: int, published: bool) -> Iterator[Case]:
    for variant in TIMED_VARIANTS:
        if variant != "published":
            yield Case(**common, variant=variant, num_tokens=tokens, query_chunk=None, key_chunk=None)
        elif published:
            yield Case(**common, variant=variant, num_tokens=tokens)


def _swept(**setting: int) -> Iterator[Case]:
    """Yield time at 256K and recall at 16K with the same chunks; if the setting has none, csattn uses its own."""
    common: dict[str, Any] = {"table": 6, "top_k": 512, **setting}
    free = {} if "query_chunk" in setting or "key_chunk" in setting else {"query_chunk": None, "key_chunk": None}
    for kind, tokens in (("recall", 16 * K), ("time", 256 * K)):
        yield Case(**common, kind=kind, variant="published", num_tokens=tokens)
        yield Case(**{**common, **free}, kind=kind, variant="csattn", num_tokens=tokens)
