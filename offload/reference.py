"""The definition of the slot cache in plain Python: the device's version agrees with it entry by entry."""

import numpy as np
from numpy.typing import NDArray

_OLDEST = 124  # steps unused at which ages saturate: longer counts as equally old


class ReferenceSlotCache:
    """The slot cache of one layer: for each context and KV head, the key in each slot, and when it was last used."""

    def __init__(self, num_contexts: int, num_kv_heads: int, num_slots: int) -> None:
        heads = [(context, head) for context in range(num_contexts) for head in range(num_kv_heads)]
        self.key_of_slot = {head: [-1] * num_slots for head in heads}
        self.unused_for = {head: [-1] * num_slots for head in heads}  # steps; -1: never used
        self.num_kv_heads = num_kv_heads
        self.num_selected = self.num_found = self.num_moved = self.num_spilled = 0

    def look_up(
        self,
        kv_indices: NDArray[np.int32],  # [batch, num_index_heads, max_top_k], ascending, -1 padded
        valid_len: NDArray[np.int32],  # [batch, num_index_heads]
        context_ids: NDArray[np.int32],  # [batch], -1: idle
    ) -> tuple[NDArray[np.int32], dict[tuple[int, int], list[tuple[int, int]]]]:
        """Do `SlotCache.look_up`: return ids like kv_indices, and the (key, slot) moves of each context and KV head."""
        ids = np.full_like(kv_indices, -1)
        moved = {}
        group = kv_indices.shape[1] // self.num_kv_heads
        for context in sorted(set(context_ids.tolist()) - {-1}):
            rows = np.flatnonzero(context_ids == context)
            for head in range(self.num_kv_heads):
                lists = [(row, index_head) for row in rows for index_head in range(head * group, (head + 1) * group)]
                wanted = [kv_indices[at][: valid_len[at]].tolist() for at in lists]
                slot_of, moved[context, head] = self._place(context, head, [key for keys in wanted for key in keys])
                for at, keys in zip(lists, wanted, strict=True):
                    ids[at][: len(keys)] = [slot_of.get(key, -2 - key) for key in keys]
                self.num_spilled += sum(key not in slot_of for keys in wanted for key in keys)
        return ids, moved

    def _place(self, context: int, head: int, wanted: list[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Return the slot of each cached key after this step, and the (key, slot) pairs that were moved in."""
        keys, unused_for = self.key_of_slot[context, head], self.unused_for[context, head]
        slot_of = {key: slot for slot, key in enumerate(keys) if key >= 0}
        missing = [key for key in dict.fromkeys(wanted) if key not in slot_of]
        kept = {slot_of[key] for key in wanted if key in slot_of}
        self.num_selected += len(wanted)
        self.num_found += sum(key in slot_of for key in wanted)

        def replaced_first(slot: int) -> tuple[bool, int, int]:
            return unused_for[slot] != -1, -min(unused_for[slot], _OLDEST), slot

        unused = sorted((slot for slot in range(len(keys)) if slot not in kept), key=replaced_first)
        moved = list(zip(missing, sorted(unused[: len(missing)]), strict=False))
        self.num_moved += len(moved)
        for key, slot in moved:
            slot_of.pop(keys[slot], None)
            slot_of[key] = slot
            keys[slot] = key
        used_now = kept | {slot for _, slot in moved}
        for slot in range(len(keys)):
            if slot in used_now:
                unused_for[slot] = 0
            elif unused_for[slot] >= 0:
                unused_for[slot] += 1
        return slot_of, moved
