"""One of several devices that compute together: which part of every head-wise thing is its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Neighbouring KV heads and their query heads, and as many columns of every MLP."""

    rank: int
    num_devices: int

    def of(self, num: int, first: int = 0) -> slice:
        """This device's of so many neighbours, which the devices share out among them. first: of these."""
        each, left = divmod(num, self.num_devices)
        assert not left, f"{num} cannot be divided among {self.num_devices} devices"
        return slice(first + self.rank * each, first + (self.rank + 1) * each)
