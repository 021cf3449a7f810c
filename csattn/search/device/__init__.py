"""The search on a CUDA device: a batch of tokens over the indexes of several contexts, one launch per layer."""

from csattn.search.device.indexes import DeviceIndexes, DeviceLayerIndex, to_device
from csattn.search.device.run import DeviceSearch, IndexShape

__all__ = ["DeviceIndexes", "DeviceLayerIndex", "DeviceSearch", "IndexShape", "to_device"]
