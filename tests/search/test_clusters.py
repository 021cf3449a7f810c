"""How many blocks choose for a slot."""

import pytest

from csattn.search.device.clusters import MOST_KEYS_OF_BLOCK, cluster_size, keys_of_block


@pytest.mark.parametrize(
    ("max_keys", "num_slots", "size"),
    [
        (1024, 8, 1),  # a block has at least a chunk
        (131_072, 8, 8),
        (32_768, 32, 4),
        (57_344, 32, 4),  # 7/8 of what a block holds
        (65_536, 32, 8),
        (131_072, 32, 4),  # more than a cluster holds: two launches choose
        (65_536, 1000, 1),
    ],
)
def test_cluster_size(max_keys, num_slots, size) -> None:
    assert cluster_size(max_keys, num_slots, num_multiprocessors=132) == size


def test_a_full_part_is_shared_only_where_there_is_room() -> None:
    assert keys_of_block(65_536, 4) == MOST_KEYS_OF_BLOCK
    assert cluster_size(65_536, num_slots=40, num_multiprocessors=132) == 4


def test_parts_are_whole_chunks() -> None:
    assert keys_of_block(3 * 1024, 2) == 2048
