"""Plays the device's part in a step: posts queries layer after layer, and reads the selections."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.search import LayerSearch, SearchPool, TokenSelections
from offload.shared_memory import SharedMemory
from tests.workers.searchers.searching import POISON, WAIT_S, wait_until
from workers.searchers.step_searches import GIVE_UP, STEP_SEARCH, StepPlan

SINK_LEN, WINDOW_LEN, SCALE = 4, 32, 0.25


class Device:
    """The rows of a step over some contexts. Layers use two sets of buffers (mails) in turn."""

    def __init__(self, artifacts: Sequence[Artifact], contexts: Sequence[int], top_k: int) -> None:
        """artifacts: by context id; contexts: the context id of each row."""
        spec = artifacts[0].spec
        self.artifacts, self.contexts, self.top_k = artifacts, contexts, top_k
        self.num_layers, self.num_heads = spec.model.num_layers, spec.num_index_heads
        rows, self.query_shape = len(contexts), (spec.model.num_q_heads, spec.model.head_dim)
        self.memory = SharedMemory(1 << 20, torch.device("cpu"))
        give_up = self.memory.zeros((8,), torch.int64)
        assert self.memory.place_of(give_up) == GIVE_UP
        self.give_up = give_up.numpy()

        def both(shape: tuple[int, ...], dtype: torch.dtype) -> list[NDArray[Any]]:
            return [self.memory.zeros((rows, *shape), dtype).numpy() for _ in range(2)]

        self.q, self.kv = both(self.query_shape, torch.float32), both((self.num_heads, top_k), torch.int32)
        self.lens, self.arrived = both((self.num_heads,), torch.int32), both((), torch.int64)
        self.chosen = both((self.num_heads,), torch.int64)
        self.plan = StepPlan(self._records())
        self.num_steps = 0

    @property
    def since(self) -> int:
        return self.num_steps * (self.num_layers + 1)

    def take_step(
        self, run_step: Callable[[StepPlan, int], bool], seed: int, before_layer: Callable[[int], object] = lambda i: 0
    ) -> None:
        """Run a step and assert that each layer's choice is that of one thread.

        The next layer's queries are posted while a layer is searched.
        """
        self.num_steps += 1
        ended: list[bool | BaseException] = []
        thread = threading.Thread(target=self._run, args=(run_step, ended), daemon=True)
        thread.start()
        queries = np.random.default_rng(seed).standard_normal(
            (self.num_layers, len(self.contexts), *self.query_shape), np.float32
        )
        got = []
        self._post(0, queries[0])
        for layer_idx in range(self.num_layers):
            before_layer(layer_idx)
            if layer_idx + 1 < self.num_layers:
                self._post(layer_idx + 1, queries[layer_idx + 1])
            mail, value = layer_idx % 2, self.since + layer_idx + 1
            wait_until(lambda mail=mail, value=value: (self.chosen[mail] >= value).all() or ended)
            got.append((self.kv[mail].copy(), self.lens[mail].copy()))
            self.kv[mail][:] = POISON  # the choice has been copied: its buffer may be overwritten
        thread.join(WAIT_S)
        assert ended == [True], ended
        for layer_idx, (kv, lens) in enumerate(got):
            want = self.choose(layer_idx, queries[layer_idx])
            np.testing.assert_array_equal(kv, want.kv_indices)
            np.testing.assert_array_equal(lens, want.valid_len)

    def choose(self, layer_idx: int, q: NDArray[np.float32]) -> TokenSelections:
        """Search with one thread of this process."""
        rows = len(self.contexts)
        out = TokenSelections(
            np.full((rows, self.num_heads, self.top_k), POISON, np.int32), np.empty((rows, self.num_heads), np.int32)
        )
        with SearchPool(1) as pool:
            for row, context in enumerate(self.contexts):
                here = slice(row, row + 1)
                part = TokenSelections(out.kv_indices[here], out.valid_len[here])
                index = self.artifacts[context].layer_index(layer_idx)
                pool.search_layers([LayerSearch(q[here].copy(), index, None, SINK_LEN, WINDOW_LEN, SCALE, part)])
        return out

    def _post(self, layer_idx: int, q: NDArray[np.float32]) -> None:
        self.q[layer_idx % 2][:] = q
        self.arrived[layer_idx % 2][:] = self.since + layer_idx + 1

    def _run(self, run_step: Callable[[StepPlan, int], bool], ended: list[bool | BaseException]) -> None:
        try:
            ended.append(run_step(self.plan, self.since))
        except BaseException as error:
            ended.append(error)

    def _records(self) -> NDArray[np.void]:
        records = np.zeros((self.num_layers, len(self.contexts)), STEP_SEARCH)
        records["num_rows"] = 1
        base = self.memory.array.ctypes.data
        places = {"q_at": self.q, "kv_at": self.kv, "len_at": self.lens}
        places |= {"query_flag_at": self.arrived, "choice_flag_at": self.chosen}
        for (layer_idx, row), _ in np.ndenumerate(records["layer"]):
            record = records[layer_idx, row]
            record["layer"], record["context"], record["num_heads"] = layer_idx, self.contexts[row], self.num_heads
            record["group_size"], record["head_dim"] = self.query_shape[0] // self.num_heads, self.query_shape[1]
            record["top_k"], record["sink_len"], record["window_len"] = self.top_k, SINK_LEN, WINDOW_LEN
            record["softmax_scale"], record["flag_value"] = SCALE, layer_idx + 1
            for name, mails in places.items():
                record[name] = mails[layer_idx % 2][row:].ctypes.data - base
        return records


def later(seconds: float, call: Callable[[], object]) -> None:
    """Make the call after so many seconds, in its own thread."""

    def run() -> None:
        time.sleep(seconds)
        call()

    threading.Thread(target=run, daemon=True).start()
