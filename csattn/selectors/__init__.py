"""What decides which rows a step attends to: ours and those it is compared with, behind one interface."""

from csattn.selectors.base import ContextLayer, ContextView, FarRows, Prepared, Selector
from csattn.selectors.centroids import PreparedCentroids, PreparedSketch
from csattn.selectors.prepare import prepare, resolve_rest, selector_for

__all__ = [
    "ContextLayer",
    "ContextView",
    "FarRows",
    "Prepared",
    "PreparedCentroids",
    "PreparedSketch",
    "Selector",
    "prepare",
    "resolve_rest",
    "selector_for",
]
