"""Layers of random KV in files and in memory, for tests of tiered stores."""

from bisect import bisect_left
from contextlib import closing

import torch

from offload.errors import TierError
from offload.host_store import HostStore
from offload.row_files import FileSpan
from offload.tiered_plan import plan_tiers
from offload.tiered_store import TieredStore

POISON = 0xFF  # bytes of the files around the rows: NaN as a float


class Files:
    """Layers of random KV in files, and copies in memory."""

    def __init__(self, directory, num_layers=2, heads=2, context_len=300, head_dim=8, dtype=torch.float32, offset=100):
        self.shape, self.dtype = (heads, context_len, head_dim), dtype
        self.kv = [torch.randn(heads, context_len, 2, head_dim).to(dtype) for _ in range(num_layers)]
        self.spans = []
        for layer_idx, kv in enumerate(self.kv):
            path = directory / f"layer-{layer_idx}"
            path.write_bytes(bytes([POISON]) * offset + kv.view(torch.uint8).numpy().tobytes() + bytes([POISON]) * 70)
            self.spans.append(FileSpan(path, offset, kv.nbytes))
        self.flat = HostStore(self.kv)

    def store(self, num_slots=10**9, page_rows=1, **options) -> closing[TieredStore]:
        """Return a store with room for `num_slots` pages, which the block closes."""
        options = {"stream_rows": 16, **options}
        heads, context_len, _ = self.shape
        slots = min(num_slots, len(self.kv) * heads * -(-context_len // page_rows))
        budgets = range(1, 1 << 24)
        sizes = len(self.kv), self.shape, self.dtype.itemsize
        how = options.get("resident", ()), page_rows, options["stream_rows"]
        budget = budgets[bisect_left(budgets, slots, key=lambda budget: slots_of(*sizes, budget, *how))]
        store = TieredStore(self.spans, self.shape, self.dtype, budget, page_rows=page_rows, **options)
        assert store.plan.num_slots == slots
        return closing(store)

    def indices(self, rng, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-1, self.shape[1] + 2, size=shape))


def slots_of(*arguments) -> int:
    """Return how many pages a budget has room for, 0 if the budget is refused."""
    try:
        return plan_tiers(*arguments).num_slots
    except TierError:
        return 0


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compare bit for bit."""
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
