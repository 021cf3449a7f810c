"""A device's share of an artifact in tensor parallelism: some of its heads, as if there were no others."""

from dataclasses import replace

import torch

from csattn.artifact.manifest import ArtifactSpec
from csattn.artifact.reader import Artifact
from csattn.index import ListIndex, NoIndex
from csattn.share import Share
from csattn.sketch import SketchIndex
from csattn.sketch.index import BY_HEAD


class ArtifactShare(Artifact):
    """A view of an open artifact with some of its heads; those of others are never touched.

    It reads the maps of the whole artifact, which whoever opened it has to close.
    """

    def __init__(self, whole: Artifact, share: Share) -> None:
        super().__init__(whole.path, whole.manifest, whole._files)
        self._whole, self._share = whole, share
        model, num_devices = whole.spec.model, share.num_devices
        num_q_heads, num_kv_heads = model.num_q_heads // num_devices, model.num_kv_heads // num_devices
        if "compressed" in model.kinds:  # rows that all heads see
            num_kv_heads = model.num_kv_heads
        window_heads = model.window_heads and (model.window_heads[0] // num_devices, *model.window_heads[1:])
        model = replace(model, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, window_heads=window_heads)
        self._spec = replace(whole.spec, model=model)

    @property
    def spec(self) -> ArtifactSpec:
        """The spec, with the numbers of heads of the share."""
        return self._spec

    @property
    def index_bytes(self) -> int:
        return super().index_bytes // self._share.num_devices

    def layer_kv(self, layer_idx: int) -> torch.Tensor:
        kv = super().layer_kv(layer_idx)
        return kv[self._share.of(len(kv))]

    def _index(self, layer_idx: int) -> ListIndex | SketchIndex | NoIndex:
        if layer_idx not in self._indexes:
            self._indexes[layer_idx] = share_of_index(self._whole._index(layer_idx), self._share)
        return self._indexes[layer_idx]


def share_of_index(index: ListIndex | SketchIndex | NoIndex, share: Share) -> ListIndex | SketchIndex | NoIndex:
    """Return the index of the share's heads, as views of the same arrays."""
    next_query = None if index.next_query is None else index.next_query[share.of(len(index.next_query))]
    if isinstance(index, NoIndex):
        return NoIndex(next_query)
    return replace(index_of_heads(index, share.of(index.num_heads)), next_query=next_query)


def index_of_heads(index: ListIndex | SketchIndex, heads: slice) -> ListIndex | SketchIndex:
    """Return the index of some heads, without `next_query`: views, no copies."""
    if isinstance(index, SketchIndex):
        return replace(index, **{name: getattr(index, name)[heads] for name in BY_HEAD}, next_query=None)
    codebooks, key_mean, table = index.codebooks[heads], index.key_mean[heads], index.table.of_heads(heads)
    return replace(index, codebooks=codebooks, key_mean=key_mean, table=table, next_query=None)
