"""Own rows of requests, kept by the tokens that they are of: the next turn of a conversation begins with them.

A block is the rows of BLOCK_ROWS tokens, of all layers and KV heads. What decides its bytes is its label: the model,
the context, how rows are attended to, the salt, and all of the request's tokens up to its last. So requests that begin
alike share blocks, and nothing else can be taken for one.
"""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from csattn import __version__
from csattn.artifact import ModelGeometry
from csattn.artifact.manifest import ALL
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from offload.block_files import BlockFiles
from offload.blocks import BlockCounts, BlockName, Blocks, Label
from offload.budget import host_memory_bytes
from workers.serving.kept_store import DIRECTORY, DiskBudget
from workers.serving.messages import Selector
from workers.settings import Settings
from workers.words import size

BLOCK_ROWS = 64
_KEEPABLE: tuple[Selector, ...] = ("csattn", "full")  # others remember what they were asked
new_hash = hashlib.sha256  # what blocks are looked for by; their labels say what they are
_log = logging.getLogger(__name__)


class KeptRows:
    """Any thread may ask; blocks are taken over by a thread of their own."""

    def __init__(self, blocks: Blocks, geometry: ModelGeometry, dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype
        self._sizes = geometry.num_layers, geometry.num_kv_heads, BLOCK_ROWS, 2, geometry.head_dim
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="csattn-keep")

    def num_kept(self, identity: bytes, token_ids: Sequence[int]) -> int:
        """Of a prompt's first tokens, how many have rows, by the heads of their files."""
        return BLOCK_ROWS * sum(1 for _ in takewhile(self._blocks.holds, BlockNames(identity).more(token_ids[:-1])))

    def find(self, identity: bytes, token_ids: Sequence[int]) -> "OwnRows":
        """What a request with these tokens begins with. Reads files, and holds on to what it has found until it is
        released."""
        token_ids = token_ids[:-1]  # the last is fed in any case: something has to follow it
        with ExitStack() as stack:
            found = stack.enter_context(self._blocks.hold(BlockNames(identity).more(token_ids)))
            rows = [torch.from_numpy(block).view(self._dtype).view(self._sizes) for block in found]
            names = BlockNames(identity)
            for _ in names.more(token_ids[: BLOCK_ROWS * len(rows)]):
                pass
            return OwnRows(self, names, rows, stack.pop_all())

    def keep(self, name: BlockName, copied: Callable[[], Tensor]) -> None:
        """copied: gives the block's rows, once they are there."""
        self._taker.submit(self._take, name, copied)

    def flush(self) -> None:
        """Wait until all that was kept is on the disk, or refused."""
        self._taker.submit(int).result()
        self._blocks.flush()

    def close(self) -> None:
        """What is kept is written before."""
        self._taker.shutdown()
        self._blocks.close()

    @property
    def counts(self) -> BlockCounts:
        return self._blocks.counts

    def _take(self, name: BlockName, copied: Callable[[], Tensor]) -> None:
        try:
            if not self._blocks.holds(name):
                self._blocks.put(name, copied().contiguous().view(torch.uint8).flatten().numpy())
        except Exception:  # the request has its rows; only who comes later has to make them again
            _log.exception("a block of rows was not kept")


class OwnRows:
    """Of one request. Its scheduler's thread asks; `release` is for any."""

    def __init__(self, kept: KeptRows, names: "BlockNames", found: list[Tensor], held: ExitStack) -> None:
        """names: of the blocks that follow those that were found."""
        self._kept, self._names, self._held = kept, names, held
        self._waiting = deque(found)
        self.keeps = True
        self.num_found = BLOCK_ROWS * len(found)

    @property
    def has_waiting(self) -> bool:
        """Whether rows that were found are not in the engine yet."""
        return bool(self._waiting)

    def take(self) -> Tensor:
        """The next rows for the engine."""
        rows = self._waiting.popleft()
        if not self._waiting:
            self.release()
        return rows

    def has_whole(self, num_rows: int) -> bool:
        """Whether of so many rows there is a block to `keep`."""
        return self.keeps and num_rows - self._names.num_named >= BLOCK_ROWS

    def keep(self, token_ids: Sequence[int], read_rows: Callable[[int, int], Callable[[], Tensor]]) -> None:
        """Keep the blocks that have become whole. token_ids: of all rows that the request has."""
        for name in self._names.more(token_ids):
            self._kept.keep(name, read_rows(self._names.num_named - BLOCK_ROWS, self._names.num_named))

    def release(self) -> None:
        """Hold on to nothing any more."""
        self._held.close()


class BlockNames:
    """Of a request's whole blocks, one after another."""

    def __init__(self, identity: bytes) -> None:
        self.num_named = 0  # tokens
        self._hashed, self._label = new_hash(identity), Label(None, identity)

    def more(self, token_ids: Sequence[int]) -> Iterator[BlockName]:
        """Of the blocks that are not named yet. token_ids: from the request's first on."""
        while (stop := self.num_named + BLOCK_ROWS) <= len(token_ids):
            own = np.asarray(token_ids[self.num_named : stop], np.int32).tobytes()
            self._hashed.update(own)
            self._label, self.num_named = Label(self._label, own), stop
            yield BlockName(self._hashed.hexdigest(), self._label)


def row_identity(
    loaded: LoadedModel,
    settings: Settings,
    artifact_id: str | None,
    salt: str,
    selector: Selector,
    config: SearchConfig,
) -> bytes:
    """What decides a request's rows besides its tokens; with `all_where_faster`, besides who was in its steps, too."""
    engine = settings.engine
    parts = {
        "csattn": __version__,
        "model": [loaded.fingerprint, loaded.tokenizer_hash, str(loaded.dtype)],
        "context": artifact_id,
        "reads": [selector, asdict(config), engine.kv_codec, engine.all_where_faster],
        "placement": [engine.placement, engine.num_devices],  # the last bits may differ
        "block_rows": BLOCK_ROWS,
        "salt": hashlib.sha256(salt.encode()).hexdigest(),
    }
    return json.dumps(parts, sort_keys=True).encode() + b"\n"


def open_kept_rows(loaded: LoadedModel, settings: Settings) -> KeptRows:
    kept = settings.kept
    files, directory = None, settings.store.path / DIRECTORY
    if kept.disk_bytes:
        budget = DiskBudget("kept.disk_bytes", kept.disk_bytes, directory)
        files = BlockFiles(directory, budget.find)
        budget.find(files.num_bytes)
    memory_bytes = min(kept.memory_bytes, host_memory_bytes() // 4)
    if memory_bytes < kept.memory_bytes:
        told = "kept.memory_bytes is %s, and %s is kept to: a quarter of the memory that is free"
        _log.info(told, size(kept.memory_bytes), size(memory_bytes))
    return KeptRows(Blocks(memory_bytes, files), loaded.geometry, loaded.dtype)


def is_keepable(selector: Selector, config: SearchConfig, geometry: ModelGeometry) -> bool:
    """Whether rows of the layers that see everything are all that a request goes on from."""
    return selector in _KEEPABLE and config.search_period == 1 and set(geometry.reaches) <= {0, ALL}
