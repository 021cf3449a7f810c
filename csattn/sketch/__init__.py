"""The sketch: of every key, the coordinates that matter most to the context's queries, in 4 or 2 bits each.

`reference` is the definition, `index` what a layer of a context has of it, `codes` how codes lie in memory.
"""

from csattn.sketch.index import SketchIndex

__all__ = ["SketchIndex"]
