"""The rest: an estimate of what attention to the rows that were not chosen would give, without reading them.

Keys and values of a context are taken for jointly normal, and the chosen rows for those with the largest logits. What
is left is then a normal distribution cut off from above, of which both the sum of the weights and the weighted mean of
the values have a closed form. `reference.py` is that form; `estimate_rest` is its compiled version.
"""

from csattn.rest.estimate import estimate_rest
from csattn.rest.moments import Moments, moments_of

__all__ = ["Moments", "estimate_rest", "moments_of"]
