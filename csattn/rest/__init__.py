"""The rest: an estimate of what attention to the rows that were not chosen would give, without reading them.

A context's keys and values are assumed to be jointly normal, and the chosen rows to be those with the largest logits.
The logits of the others then have a normal distribution truncated from above, for which both the sum of the weights and
the weighted mean of the values have a closed form. `reference.py` has that form; `estimate_rest` is it, compiled.
"""

from csattn.rest.estimate import estimate_rest
from csattn.rest.moments import Moments, moments_of

__all__ = ["Moments", "estimate_rest", "moments_of"]
