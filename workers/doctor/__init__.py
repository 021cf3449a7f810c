"""Is this machine ready? Facts about it are gathered, then judged check by check, with remedies."""

from workers.doctor.checks import examine
from workers.doctor.facts import Facts, gather_facts
from workers.doctor.findings import Finding

__all__ = ["Facts", "Finding", "examine", "gather_facts"]
