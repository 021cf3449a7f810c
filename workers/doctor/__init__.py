"""Is this machine ready? What was found of it, judged check by check, each with what to do."""

from workers.doctor.checks import examine
from workers.doctor.facts import Facts, gather_facts
from workers.doctor.findings import Finding

__all__ = ["Facts", "Finding", "examine", "gather_facts"]
