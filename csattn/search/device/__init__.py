"""Search on a CUDA device for a batch over several contexts, and attention by codes to the rows not chosen."""

from csattn.search.device.exact import ExactSearch, exact_bytes
from csattn.search.device.indexes import (
    DeviceIndexes,
    DeviceLayerIndex,
    DeviceLists,
    DeviceSketch,
    place_codes,
    to_device,
)
from csattn.search.device.lists_pass import ListsPass
from csattn.search.device.run import DeviceSearch, workspace_bytes
from csattn.search.device.shapes import IndexShape, ListsShape, RowsShape, SketchShape, index_shape
from csattn.search.device.sketch_pass import SketchPass

__all__ = [
    "DeviceIndexes",
    "DeviceLayerIndex",
    "DeviceLists",
    "DeviceSearch",
    "DeviceSketch",
    "ExactSearch",
    "IndexShape",
    "ListsPass",
    "ListsShape",
    "RowsShape",
    "SketchPass",
    "SketchShape",
    "exact_bytes",
    "index_shape",
    "place_codes",
    "to_device",
    "workspace_bytes",
]
