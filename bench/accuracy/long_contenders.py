"""The methods that `bench.accuracy long` compares: ways to keep a context small."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bench.accuracy.attending.attend import Codes, Reading
from bench.accuracy.attending.context import ContextLayer, heads_apart
from bench.accuracy.attending.lists import ListCodes
from bench.accuracy.attending.low_bit import kivi, q4_0, turbo_quant
from bench.accuracy.attending.others import H2oCodes, MagicpigCodes, PqcacheCodes, QuestCodes, SparqCodes
from bench.accuracy.attending.sketches import SketchCodes, build_sketch
from bench.decode.sampled import TABLES
from bench.decode.variants import lists_by_torch
from bench.timing import gate
from csattn.config import SearchConfig, SketchConfig

Make = Callable[[ContextLayer], Codes]
Group = Literal["ours", "sizes", "lists", "others", "low-bit"]

FULL_KV_BYTES = 2 * 2  # per dimension of a row: key and value, 16 bits each


@dataclass(frozen=True, slots=True)
class LongContender:
    """A method. `make` returns the codes of a layer's rows; None: the rows themselves are searched."""

    name: str
    group: Group
    make: Make | None
    rest: Literal["none", "codes", "moments"] = "none"
    ahead: bool = False
    one_keep: bool = False  # measured at a single share of rows
    has_keep: bool = True  # False: it chooses no share of rows, but attends to all by their codes, draws some, or none
    per_query_head: bool = False  # chooses rows for each query head separately

    def codes(self, layer: ContextLayer) -> Codes | None:
        return None if self.make is None else self.make(heads_apart(layer) if self.per_query_head else layer)

    def reading(self, keep: float, context_len: int) -> Reading:
        top_k = max(1, round(keep * context_len)) if self.has_keep else 0
        # all contenders read sinks and window exactly, even low-bit KV
        sink_len, window_len = SearchConfig().sink_len, SearchConfig().window_len
        near = sink_len, min(window_len, context_len - sink_len)
        return Reading(top_k, *near, self.rest, per_query_head=self.per_query_head)


def contenders() -> list[LongContender]:
    """Return all contenders; those that share codes are neighbours, so the codes are made once."""
    default = partial(_sketch, SketchConfig())
    lists, paper = (partial(ListCodes, config=lists_by_torch(name)) for name in ("lists", "paper"))
    return [
        LongContender("exact", "ours", None),
        LongContender("exact+ahead", "ours", None, ahead=True, one_keep=True),
        LongContender("exact+rest=moments", "ours", None, "moments", one_keep=True),
        LongContender("default", "ours", default, "codes"),
        LongContender("default+ahead", "ours", default, "codes", ahead=True),
        LongContender("default+rest=moments", "ours", default, "moments", one_keep=True),
        LongContender("default+rest=none", "ours", default, one_keep=True),
        *_sizes(),
        LongContender("lists", "lists", lists, one_keep=True),
        LongContender("paper", "lists", paper, one_keep=True, per_query_head=True),
        LongContender("lists+rest=moments", "lists", lists, "moments", one_keep=True),
        *(LongContender(name, "low-bit", make, "codes", has_keep=False) for name, make in LOW_BIT),
        *(LongContender(name, "others", make) for name, make in CHOOSING),
        *(LongContender(name, "others", make, has_keep=False) for name, make in DRAWING),
        LongContender("pqcache, 16 bytes", "others", _pqcache_of_16_bytes, one_keep=True),
        LongContender("pqcache, 16 bytes+rest=moments", "others", _pqcache_of_16_bytes, "moments", one_keep=True),
        LongContender("window", "others", None, has_keep=False),
    ]


LOW_BIT: tuple[tuple[str, Make], ...] = (
    ("KIVI, 2 bits", kivi(2)),
    ("KIVI, 4 bits", kivi(4)),
    ("TurboQuant, 3.5 bits", turbo_quant(4, 3)),
    ("TurboQuant, 4 bits", turbo_quant(4)),
    ("q4_0", q4_0),
)


CHOOSING: tuple[tuple[str, Make], ...] = (
    ("quest", QuestCodes),
    ("sparq", SparqCodes),
    ("sparq, no mean value", partial(SparqCodes, adds_mean=False)),
    ("pqcache", PqcacheCodes),
    ("h2o", H2oCodes),
)
DRAWING: tuple[tuple[str, Make], ...] = tuple(
    (name, partial(MagicpigCodes, num_bits=tables.num_bits, num_tables=tables.number))
    for name, tables in TABLES.items()
)


def find_contenders(names: str) -> list[LongContender]:
    """Parse a list of names and groups, or `all`, separated by ',', or by ';' where a name contains a comma."""
    every = contenders()
    listed = [name.strip() for name in names.split(";" if ";" in names else ",")]
    known = {c.name for c in every} | {c.group for c in every} | {"all"}
    unknown = [name for name in listed if name not in known]
    if unknown and names in known:
        listed, unknown = [names], []
    gate(not unknown, f"unknown contender {', '.join(unknown)}; choose from {'; '.join(sorted(known))}")
    return [c for c in every if {c.name, c.group, "all"} & set(listed)]


def _pqcache_of_16_bytes(layer: ContextLayer) -> Codes:
    """PQCache with as many bytes as the default's codes take at head_dim 64."""
    return PqcacheCodes(layer, num_subspaces=16)


def _sizes() -> list[LongContender]:
    """Return contenders with sketches of other sizes than the default's."""
    words = (2, 0), (2, 1), (4, 0), (4, 2)
    return [
        LongContender(
            f"sketch of {fine} + {coarse} words",
            "sizes",
            partial(_sketch, SketchConfig(num_fine=fine, num_coarse=coarse)),
            "codes",
        )
        for fine, coarse in words
    ]


def _sketch(config: SketchConfig, layer: ContextLayer) -> Codes:
    return SketchCodes(build_sketch(layer, config), layer)
