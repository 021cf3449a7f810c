"""PQCache's and SparQ's choices on the CPU, layer by layer: what they keep of a context and of each request."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.rivals.pqcache import PqSearch
from bench.decode.rivals.sparq import SparqSearch
from csattn.cpu.team import Team
from workers.engine.shape import EngineShape


class PqChooser:
    """One context's centroids and codes, which all rows of a step search."""

    has_rest = False

    def __init__(
        self,
        shape: EngineShape,
        middle: slice,
        centroids: list[NDArray[np.float32]],  # per layer [num_kv_heads, num_subspaces, num_centroids, subspace_dim]
        codes: list[NDArray[np.uint8]],  # per layer [num_kv_heads, context_len, num_subspaces]
        team: Team,
    ) -> None:
        self._centroids, self._codes, self._team = centroids, codes, team
        num_keys, (num_subspaces, num_centroids) = codes[0].shape[1], centroids[0].shape[1:3]
        self._search = PqSearch(
            _group_shape(shape),
            num_keys,
            middle,
            shape.max_top_k,
            shape.softmax_scale,
            num_subspaces,
            num_centroids,
        )

    def choose(
        self,
        layer_idx: int,
        row: int,
        context_id: int,
        q: NDArray[np.float32],
        new_row: NDArray[np.uint16],
        tail_len: int,
        kv_indices: NDArray[np.int32],
        valid_len: NDArray[np.int32],
    ) -> None:
        told = self._search.told
        told["q"], told["centroids"], told["codes"] = q, self._centroids[layer_idx], self._codes[layer_idx]
        told["kv_indices"], told["valid_len"] = kv_indices, valid_len
        self._team.run(self._search.tape)

    def rest(self, row: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("PQCache leaves rows out without an estimate")


class SparqChooser:
    """One context's keys with channels side by side; and each request's own, which begin as zeros."""

    has_rest = True

    def __init__(
        self,
        shape: EngineShape,
        middle: slice,
        channels: list[NDArray[np.uint16]],  # per layer: bits of [num_kv_heads, head_dim, context_len] bfloat16
        value_sums: list[Tensor],  # per layer [num_kv_heads, head_dim] float32
        num_components: int,
        team: Team,
    ) -> None:
        self._channels, self._team = channels, team
        (batch_size,) = shape.batch_sizes
        self._num_keys = channels[0].shape[2]
        size = shape.num_layers, batch_size, shape.num_kv_heads, shape.head_dim, shape.tail_capacity
        self._tails = np.zeros(size, np.uint16)
        self._sums = [[values.clone() for _ in range(batch_size)] for values in value_sums]
        self._seen = np.zeros((shape.num_layers, batch_size), np.int64)  # rows of each tail whose value is in the sums
        self._latest = (0, 0)  # layer and tail length of the last choice
        self._search = SparqSearch(
            _group_shape(shape),
            self._num_keys,
            middle,
            shape.max_top_k,
            shape.softmax_scale,
            num_components,
            shape.tail_capacity,
        )

    def choose(
        self,
        layer_idx: int,
        row: int,
        context_id: int,
        q: NDArray[np.float32],
        new_row: NDArray[np.uint16],
        tail_len: int,
        kv_indices: NDArray[np.int32],
        valid_len: NDArray[np.int32],
    ) -> None:
        tail = self._tails[layer_idx, row]
        tail[:, :, tail_len - 1] = new_row[:, 0]
        if self._seen[layer_idx, row] < tail_len:  # a step that is run again brings the same row
            self._sums[layer_idx][row] += torch.from_numpy(new_row[:, 1].view(np.int16)).view(torch.bfloat16)
            self._seen[layer_idx, row] = tail_len
        told = self._search.told
        told["q"], told["channels"], told["tail_channels"] = q, self._channels[layer_idx], tail
        told["tail_len"], told["kv_indices"], told["valid_len"] = tail_len, kv_indices, valid_len
        self._team.run(self._search.tape)
        self._latest = layer_idx, tail_len

    def rest(self, row: int) -> tuple[Tensor, Tensor]:
        layer_idx, tail_len = self._latest
        mean = self._sums[layer_idx][row] / (self._num_keys + tail_len)
        return mean, torch.from_numpy(self._search.told["shares"].reshape(-1))


def _group_shape(shape: EngineShape) -> tuple[int, int, int]:
    return shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads, shape.head_dim
