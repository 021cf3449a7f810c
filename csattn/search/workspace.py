"""What a search writes to: the caller's selections, and scratch memory that later searches reuse."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import LINE_BYTES, aligned
from csattn.cpu.posts import NUM_POST_WORDS, await_others
from csattn.search.plan import MAX_JOBS, MAX_PIECES, SCRATCH
from csattn.search.select import SAMPLE_ROOM
from csattn.search.work import NUM_CALLS, PROGRESS_WORDS, SCRATCH_RECORD
from csattn.selection import Selection
from csattn.sketch.reference import NORMALISER_KEYS
from csattn.table.lists import CHUNK_KEYS

SKETCH_SCORE_BYTES, LIST_SCORE_BYTES = 2, 4
# Kernels write whole blocks: over lists, scores up to the end of the context's last chunk; over sketches and tails, up
# to 63 scores past the last key. The stride between query rows is an odd number of cache lines of uint16 scores (of
# float32 scores, twice that), so that the rows do not compete for the same sets of the caches.
STRIDE_STEP, STRIDE_EXTRA = CHUNK_KEYS, 512 + 32


@dataclass(frozen=True, slots=True)
class TokenSelections:
    """One layer's selections for several tokens."""

    kv_indices: NDArray[np.int32]  # [num_tokens, num_index_heads, top_k], each row as in Selection
    valid_len: NDArray[np.int32]  # [num_tokens, num_index_heads]
    # over a sketch, if wanted: attention by codes to the rows that are neither resident nor chosen, as parts to be
    # merged by their log-sum-exps [num_tokens, num_q_heads, head_dim + 2]: see `csattn.search.rest`
    rest: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.kv_indices)

    def __getitem__(self, token: int) -> Selection:
        return Selection(self.kv_indices[token], self.valid_len[token])


def empty_token_selections(num_tokens: int, num_index_heads: int, top_k: int) -> TokenSelections:
    """Return selections of no rows for several tokens, with room for top_k per head."""
    shape = num_tokens, num_index_heads
    return TokenSelections(np.full((*shape, top_k), -1, np.int32), np.zeros(shape, np.int32))


class SearchWorkspace:
    """Scratch memory for searches that run one at a time, over any layers. It grows to fit the largest of them.

    One workspace for all layers saves memory and stays in the cache.
    """

    def __init__(self, num_threads: int = 1, num_slots: int = 1) -> None:
        """num_slots: jobs that may be between scoring and selection at the same time."""
        self.scratch = np.zeros(1, SCRATCH)
        self.calls = np.zeros(NUM_CALLS, np.int64)
        self.calls[SCRATCH_RECORD] = self.scratch.ctypes.data
        self.progress = aligned(8 * PROGRESS_WORDS).view(np.int64)
        self.control = aligned(8 * NUM_POST_WORDS).view(np.int64)
        self.control[:] = 0
        self.scratch["num_threads"], self.scratch["num_slots"] = num_threads, num_slots
        self._memory = aligned(0)
        self._layout: tuple[int, ...] = ()

    def prepare(self, group_size: int, query_bytes: int, score_bytes: int, num_keys: int, part_words: int) -> None:
        """Make room for searches of these sizes and describe it in `scratch`.

        query_bytes: of a job's queries; part_words: of a query row's part of the rest, 0 if the rest is not wanted.
        """
        layout = group_size, query_bytes, score_bytes, -(-num_keys // STRIDE_STEP), part_words
        if layout == self._layout:
            return
        await_others(self.control)
        stride = layout[3] * STRIDE_STEP + STRIDE_EXTRA
        query_bytes = -(-query_bytes // LINE_BYTES) * LINE_BYTES
        num_slots = int(self.scratch["num_slots"][0])
        slot, slot_bytes = _places(_slot_arrays(group_size, stride, score_bytes, part_words))
        whole, num_bytes = _places({"queries": MAX_JOBS * query_bytes, "slots": num_slots * slot_bytes})
        base = self.reserve(num_bytes).ctypes.data
        for name, place in slot.items():
            self.scratch[name] = place
        for name, place in whole.items():
            self.scratch[name] = base + place
        self.scratch["query_bytes"], self.scratch["stride"] = query_bytes, stride
        self.scratch["sample_stride"], self.scratch["slot_bytes"] = SAMPLE_ROOM, slot_bytes
        self._layout = layout

    def reserve(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return at least num_bytes of scratch memory, with arbitrary contents."""
        if len(self._memory) < num_bytes:
            self._memory = aligned(num_bytes)
            self._layout = ()
        return self._memory


def _slot_arrays(group_size: int, stride: int, score_bytes: int, part_words: int) -> dict[str, int]:
    """Return the bytes of each array of a slot: see plan.SCRATCH."""
    per_range = MAX_PIECES * group_size
    common = {
        "at_scores": score_bytes * group_size * stride,
        "at_copied": 4 * stride,
        "at_copied_group_scores": 4 * stride,
        "at_sample": score_bytes * group_size * SAMPLE_ROOM,
        "at_sample_group_scores": 4 * SAMPLE_ROOM,
        "at_counts": 8 * MAX_PIECES,
        "at_guess": 8 * 2,
    }
    if score_bytes == SKETCH_SCORE_BYTES:
        return common | {
            "at_greatest": 2 * group_size * stride // NORMALISER_KEYS,
            "at_group_shifts": 2 * group_size,
            "at_parts": 4 * per_range * part_words,
        }
    return common | {"at_shifts": 8 * per_range, "at_totals": 8 * per_range, "at_terms": 4 * 4 * group_size}


def _places(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Lay arrays of these sizes in bytes out on cache lines of their own; return their offsets and the total size."""
    places, end = {}, 0
    for name, num_bytes in sizes.items():
        places[name] = end
        end += -(-num_bytes // LINE_BYTES) * LINE_BYTES + LINE_BYTES
    return places, end
