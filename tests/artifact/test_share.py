"""An artifact's shares have each of its heads once, and read the same data as the whole."""

import numpy as np
import pytest
import torch

from csattn.artifact import open_artifact
from csattn.artifact.share import ArtifactShare
from csattn.share import Share
from tests.artifact.synthetic import build, make_spec

HEADS = {
    "sketch": ("codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform", "next_query"),
    "lists": ("codebooks", "key_mean", "next_query"),
}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "share_group"), [("sketch", True), ("lists", True), ("lists", False)])
def test_the_shares_of_an_artifact_concatenate_to_the_whole(tmp_path, layout, share_group, kv_dtype) -> None:
    options = {} if layout == "sketch" else {"share_group": share_group}
    spec = make_spec(num_kv_heads=3, layout=layout, kv_dtype=kv_dtype, **options)
    with open_artifact(build(tmp_path, spec)) as whole:
        shares = [ArtifactShare(whole, Share(rank, 3)) for rank in range(3)]
        for share in shares:
            assert (share.spec.model.num_kv_heads, share.spec.model.num_q_heads) == (1, 2)
            assert share.spec.num_index_heads == whole.spec.num_index_heads // 3
            assert share.spec.artifact_id == whole.spec.artifact_id
            assert share.index_bytes == whole.index_bytes // 3
            share.require_model(spec.model_fingerprint, spec.model, spec.tokenizer_hash)
        for layer_idx, kv in enumerate(whole.indexed_kv()):
            parts = [share.indexed_kv()[layer_idx] for share in shares]
            assert torch.equal(torch.cat(parts), kv)
            assert all(part.is_contiguous() for part in parts)
        for layer_idx, index in enumerate(whole.indexes()):
            of_shares = [share.indexes()[layer_idx] for share in shares]
            for name in HEADS[layout]:
                want = getattr(index, name)
                if want is None:
                    assert all(getattr(part, name) is None for part in of_shares)
                    continue
                np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in of_shares]), want)
            if layout == "lists":
                for name, array in index.table.arrays.items():
                    parts = [part.table.arrays[name] for part in of_shares]
                    np.testing.assert_array_equal(np.concatenate(parts), array)
