"""How many blocks choose together for a row and an index head, where sums are worths (choose_sums.cu)."""

CHUNK_KEYS = 1024  # of choice.cu: the blocks of a slot share out whole chunks
MOST_KEYS_OF_BLOCK = 512 * 4 * 8  # LOADS x SUM_KEYS for each of its threads
# Of the multiprocessors, those that clusters can have at the same time: they do not reach from one cluster of
# multiprocessors (GPC) into another, and these have 14 to 18.
CLUSTERED_SHARE = {2: 1.0, 4: 0.9, 8: 0.75}
NEARLY_FULL = 7 / 8


def cluster_size(max_keys: int, num_slots: int, num_multiprocessors: int) -> int:
    """Blocks for each slot: two on a multiprocessor, three where each of the two would be nearly full.

    max_keys: whole chunks.
    """
    cluster = 1
    for twice, share in CLUSTERED_SHARE.items():
        nearly_full = NEARLY_FULL < keys_of_block(max_keys, cluster) / MOST_KEYS_OF_BLOCK <= 1
        most = share * num_multiprocessors * (3 if nearly_full else 2)
        if twice * CHUNK_KEYS > max_keys or twice * num_slots > most:
            break
        cluster = twice
    return cluster


def keys_of_block(max_keys: int, cluster: int) -> int:
    """The longest part of a slot's keys that one of its blocks has."""
    return -(-max_keys // CHUNK_KEYS // cluster) * CHUNK_KEYS
