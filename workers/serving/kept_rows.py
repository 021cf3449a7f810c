"""A prefix cache: keeps requests' own rows in blocks, so that the next turn of a conversation begins with them.

A block has the rows of BLOCK_ROWS tokens, in all layers and KV heads. Its label holds everything that its bytes depend
on: the model, the context, how rows are attended to, the salt, and the request's tokens up to the block's last one. So
requests with the same beginning share blocks, and no other request can be given one.
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
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName
from offload.block_files import BlockFiles
from offload.blocks import BlockName, Blocks, Label
from offload.budget import host_memory_bytes
from workers.serving.kept_store import DIRECTORY, DiskBudget
from workers.settings import Settings
from workers.words import size

BLOCK_ROWS = 64
_KEEPABLE: tuple[SelectorName, ...] = ("csattn", "full")  # other selectors have a state that depends on past queries
new_hash = hashlib.sha256  # blocks are looked up by hash, then compared by label
_log = logging.getLogger(__name__)


class PrefixCache:
    """Finds and keeps blocks of rows, for all requests. Thread-safe; a thread of its own copies blocks to be kept."""

    def __init__(self, blocks: Blocks, geometry: ModelGeometry, dtype: torch.dtype) -> None:
        self.blocks, self._dtype = blocks, dtype
        self._sizes = geometry.num_layers, geometry.num_kv_heads, BLOCK_ROWS, 2, geometry.head_dim
        self._taker = ThreadPoolExecutor(1, thread_name_prefix="csattn-keep")

    def num_kept(self, identity: bytes, token_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens have kept rows. Reads only the headers of files."""
        return BLOCK_ROWS * sum(1 for _ in takewhile(self.blocks.holds, BlockNames(identity).more(token_ids[:-1])))

    def find(self, identity: bytes, token_ids: Sequence[int]) -> "KeptRows":
        """Return the kept rows that a request with these tokens begins with. Reads files, and holds the blocks until
        they are released."""
        token_ids = token_ids[:-1]  # the last token is always fed: its logits give the next one
        with ExitStack() as stack:
            found = stack.enter_context(self.blocks.hold(BlockNames(identity).more(token_ids)))
            rows = [torch.from_numpy(block).view(self._dtype).view(self._sizes) for block in found]
            names = BlockNames(identity)
            for _ in names.more(token_ids[: BLOCK_ROWS * len(rows)]):
                pass
            return KeptRows(self, names, rows, stack.pop_all())

    def keep(self, name: BlockName, copied: Callable[[], Tensor]) -> None:
        """Keep a block, in the background. copied: waits for the copy of the block's rows, and returns it."""
        self._taker.submit(self._take, name, copied)

    def close(self) -> None:
        """Write all blocks given to `keep`, and close."""
        self._taker.shutdown()
        self.blocks.close()

    def _take(self, name: BlockName, copied: Callable[[], Tensor]) -> None:
        try:
            if not self.blocks.holds(name):
                self.blocks.put(name, copied().contiguous().view(torch.uint8).flatten().numpy())
        except Exception:  # this request has its rows; only later ones have to compute them again
            _log.exception("a block of rows was not kept")


class KeptRows:
    """The kept rows of one request, for the scheduler's thread. `release` may be called from any."""

    def __init__(self, cache: PrefixCache, names: "BlockNames", found: list[Tensor], held: ExitStack) -> None:
        """names: has named the blocks that were found, and continues with those after them."""
        self._cache, self._names, self._held = cache, names, held
        self._waiting = deque(found)
        self.keeps = True
        self.num_found = BLOCK_ROWS * len(found)

    @property
    def has_waiting(self) -> bool:
        """Whether some of the rows that were found are not in the engine yet."""
        return bool(self._waiting)

    def take(self) -> Tensor:
        """Return the next block for the engine; `release` after the last."""
        rows = self._waiting.popleft()
        if not self._waiting:
            self.release()
        return rows

    def has_whole(self, num_rows: int) -> bool:
        """Whether there is a block to `keep` when the request has so many rows."""
        return self.keeps and num_rows - self._names.num_named >= BLOCK_ROWS

    def keep(self, token_ids: Sequence[int], read_rows: Callable[[int, int], Callable[[], Tensor]]) -> None:
        """Keep the blocks that have become complete. token_ids: those of all the request's rows."""
        for name in self._names.more(token_ids):
            self._cache.keep(name, read_rows(self._names.num_named - BLOCK_ROWS, self._names.num_named))

    def release(self) -> None:
        """Let go of the blocks that were found."""
        self._held.close()


class BlockNames:
    """Names the complete blocks of a request, one after another."""

    def __init__(self, identity: bytes) -> None:
        self.num_named = 0  # tokens
        self._hashed, self._label = new_hash(identity), Label(None, identity)

    def more(self, token_ids: Sequence[int]) -> Iterator[BlockName]:
        """Yield the names of the blocks that are not named yet. token_ids: all of the request's, from the first."""
        while (stop := self.num_named + BLOCK_ROWS) <= len(token_ids):
            ids = np.asarray(token_ids[self.num_named : stop], np.int32).tobytes()
            self._hashed.update(ids)
            self._label, self.num_named = Label(self._label, ids), stop
            yield BlockName(self._hashed.hexdigest(), self._label)


def row_identity(
    loaded: LoadedModel,
    settings: Settings,
    artifact_id: str | None,
    salt: str,
    selector: SelectorName,
    config: SearchConfig,
) -> bytes:
    """Everything that a request's rows depend on besides its tokens.

    (With `all_where_faster` they also depend on the other requests in its steps.)
    """
    engine = settings.engine
    parts = {
        "csattn": __version__,
        "model": [loaded.fingerprint, loaded.tokenizer_hash, str(loaded.dtype)],
        "context": artifact_id,
        "preset": settings.build.preset,  # without a context, it decides on a GPU how own rows are attended to
        "reads": [selector, asdict(config), engine.kv_codec, engine.all_where_faster],
        "placement": [engine.placement, engine.num_devices],  # rows may differ in their last bits
        "block_rows": BLOCK_ROWS,
        "salt": hashlib.sha256(salt.encode()).hexdigest(),
    }
    return json.dumps(parts, sort_keys=True).encode() + b"\n"


def open_prefix_cache(loaded: LoadedModel, settings: Settings) -> PrefixCache:
    kept = settings.kept
    files, directory = None, settings.store.path / DIRECTORY
    if kept.disk_bytes:
        budget = DiskBudget("kept.disk_bytes", kept.disk_bytes, directory)
        files = BlockFiles(directory, budget.find)
        budget.find(files.num_bytes)
    memory_bytes = min(kept.memory_bytes, host_memory_bytes() // 4)
    if memory_bytes < kept.memory_bytes:
        message = "kept.memory_bytes is %s, but only %s is used: a quarter of the free memory"
        _log.info(message, size(kept.memory_bytes), size(memory_bytes))
    return PrefixCache(Blocks(memory_bytes, files), loaded.geometry, loaded.dtype)


def is_keepable(selector: SelectorName, config: SearchConfig, geometry: ModelGeometry) -> bool:
    """Whether a request can continue from KV rows of full-attention layers alone: its selector keeps no state between
    steps, and no layer keeps another state or only the last rows."""
    return selector in _KEEPABLE and config.search_period == 1 and geometry.kinds <= {"rows", "latents"}
