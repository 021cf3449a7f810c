"""`bench.tiers` compares the memory of processes with KV in memory and in files, and detects an excess of either."""

from typing import Any

import pytest

from bench import tiers
from bench.timing import GateError

BUDGET, KV = 30_000_000, 100_000_000


def results(of_memory: int, of_disk: int) -> dict[str, Any]:
    """Return results of all cases, which hold `of_memory` bytes besides KV in memory, or `of_disk` in all."""
    return {
        name: {
            "logits_sha256": case.selector,
            "tokens": [1],
            "mapped_kv_bytes": 0 if case.tiered else KV,
            "most_bytes": {"all": of_disk if case.tiered else of_memory + KV, "held": BUDGET * case.tiered},
        }
        for name, case in tiers.CASES.items()
    }


@pytest.mark.parametrize(("more_in_memory", "refusal"), [(5_000_000, "allowed"), (80_000_000, "is no measure")])
def test_memory_beyond_the_budget_is_detected_with_kv_in_memory_and_in_files(more_in_memory: int, refusal: str) -> None:
    tiers.check(results(500_000_000, 500_000_000 + BUDGET), BUDGET)
    held = 500_000_000 + BUDGET + (20_000_000 if refusal == "allowed" else 0)
    with pytest.raises(GateError, match=refusal):
        tiers.check(results(500_000_000 + more_in_memory, held), BUDGET)
