"""Selectors decide which rows a step attends to: csattn's own and those it is compared with, behind one interface."""

from csattn.selector_names import About
from csattn.selectors.base import ContextLayer, ContextView, Prepared, Selector
from csattn.selectors.centroids import CentroidSelector, index_bytes, predictor_bytes, search_bytes
from csattn.selectors.prepare import prepare, register, resolve_rest, selector_for

__all__ = [
    "About",
    "CentroidSelector",
    "ContextLayer",
    "ContextView",
    "Prepared",
    "Selector",
    "index_bytes",
    "predictor_bytes",
    "prepare",
    "register",
    "resolve_rest",
    "search_bytes",
    "selector_for",
]
