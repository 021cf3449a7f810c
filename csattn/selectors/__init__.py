"""What decides which rows a step attends to: ours and those it is compared with, behind one interface."""

from csattn.selectors.base import ContextLayer, ContextView, FarRows, Prepared, Selector
from csattn.selectors.centroids import PreparedCentroids
from csattn.selectors.prepare import estimates_rest, prepare, selector_for

__all__ = [
    "ContextLayer",
    "ContextView",
    "FarRows",
    "Prepared",
    "PreparedCentroids",
    "Selector",
    "estimates_rest",
    "prepare",
    "selector_for",
]
