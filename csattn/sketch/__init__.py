"""The sketch: for every key, the coordinates that matter most to the context's queries, in 4 or 2 bits each.

`reference` is the definition, `index` the data of one layer of a context, and `codes` the memory layout of the codes.
"""

from csattn.sketch.index import SketchIndex

__all__ = ["SketchIndex"]
