"""Tensor parallelism: the part of the heads and of the MLPs that one of several devices computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One device's share: consecutive KV heads with their query heads, and an equal part of the columns of MLPs."""

    rank: int
    num_devices: int

    def of(self, num: int, first: int = 0) -> slice:
        """Return this device's slice of `num` consecutive items, divided equally; `first` is the index of the first."""
        each, left = divmod(num, self.num_devices)
        assert not left, f"{num} cannot be divided among {self.num_devices} devices"
        return slice(first + self.rank * each, first + (self.rank + 1) * each)
