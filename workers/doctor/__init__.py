"""Is this machine ready? What was found of it, judged check by check, each with what to do."""

from workers.doctor.checks import Finding, examine
from workers.doctor.facts import Facts, gather_facts

__all__ = ["Facts", "Finding", "examine", "gather_facts"]
