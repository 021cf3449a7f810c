"""Our own attention in whole steps: contexts of the workload, loaded in each placement."""

from dataclasses import replace

from bench.decode.op import Options
from bench.decode.prepared import Prepared, TooLargeError
from bench.decode.workload import Workload
from csattn.config import SearchConfig


def schedules(search: SearchConfig) -> list[tuple[str, SearchConfig]]:
    """The published ones: at every step by its own query, ahead by a predicted one, and every fourth step."""
    return [
        ("every step", search),
        ("one layer ahead", replace(search, lookahead=1)),
        ("every 4th step, keep 0.15", replace(search, keep=0.15, search_period=4)),
    ]


def placed(work: Workload, options: Options, index_name: str, placement: str, search: SearchConfig) -> Prepared:
    raise TooLargeError("")
