"""What decides which rows a step attends to: ours and those it is compared with, behind one interface."""

from csattn.selectors.base import ContextView, FarRows, Selector
from csattn.selectors.centroids import CentroidSelector
from csattn.selectors.exact import ExactSelector
from csattn.selectors.fixed import FullSelector, WindowSelector

SELECTOR_NAMES = ("csattn", "exact", "full", "window")

__all__ = [
    "SELECTOR_NAMES",
    "CentroidSelector",
    "ContextView",
    "ExactSelector",
    "FarRows",
    "FullSelector",
    "Selector",
    "WindowSelector",
]
