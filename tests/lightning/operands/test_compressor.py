"""The compressor agrees with its definition, with the same bits however its tokens are chunked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning import Compressor, CompressorWeights, indexer_keys
from csattn.lightning.operands.quantise import round_to_fp4
from csattn.lightning.operands.rotations import rope


def make_weights(ratio: int, head_dim: int = 128, rope_dim: int = 64) -> CompressorWeights:
    generator = torch.Generator().manual_seed(ratio)
    width = head_dim * (2 if ratio == 4 else 1)
    return CompressorWeights(
        position_bias=torch.randn(ratio, width, generator=generator),
        norm_weight=torch.randn(head_dim, generator=generator),
        inv_freq=160_000.0 ** (-torch.arange(0, rope_dim, 2) / rope_dim),
    )


def make_tokens(weights: CompressorWeights, num_tokens: int) -> tuple[Tensor, Tensor]:
    width = weights.position_bias.shape[1]
    return torch.randn(num_tokens, width), torch.randn(num_tokens, width)


def by_definition(weights: CompressorWeights, kv: Tensor, gate: Tensor) -> Tensor:
    """Compress key by key, by the formulas."""
    ratio, head_dim, keys = weights.ratio, weights.head_dim, []
    for block in range(len(kv) // ratio):
        rows, gates = [], []
        for token in range(ratio):
            if weights.overlap and block > 0:
                rows.append(kv[(block - 1) * ratio + token, :head_dim])
                gates.append((gate[(block - 1) * ratio + token] + weights.position_bias[token])[:head_dim])
            rows.append(kv[block * ratio + token, -head_dim:])
            gates.append((gate[block * ratio + token] + weights.position_bias[token])[-head_dim:])
        pooled = (torch.stack(rows).double() * torch.stack(gates).double().softmax(0)).sum(0)
        normed = pooled / (pooled.square().mean() + weights.norm_eps).sqrt() * weights.norm_weight
        plain = head_dim - 2 * len(weights.inv_freq)
        turned = rope(normed[None, plain:], torch.tensor([block * ratio]), weights.inv_freq, interleaved=True)[0]
        keys.append(torch.cat((normed[:plain], turned)))
    return torch.stack(keys)


@pytest.mark.parametrize(("ratio", "num_tokens"), [(4, 4), (4, 43), (1, 9), (128, 300)])
def test_compressed_keys_equal_their_definition(ratio: int, num_tokens: int) -> None:
    weights = make_weights(ratio)
    kv, gate = make_tokens(weights, num_tokens)
    got = Compressor(weights).append(kv, gate)
    torch.testing.assert_close(got.double(), by_definition(weights, kv, gate), rtol=1e-4, atol=1e-4)


@settings(max_examples=25)
@given(st.sampled_from([1, 3, 4, 128]), st.lists(st.integers(0, 90), min_size=1, max_size=5))
def test_compressed_keys_have_the_same_bits_however_tokens_are_chunked(ratio: int, pieces: list[int]) -> None:
    weights = make_weights(ratio)
    kv, gate = make_tokens(weights, sum(pieces))
    together = Compressor(weights).append(kv, gate)
    in_pieces, one_by_one = Compressor(weights), Compressor(weights)
    parts = [in_pieces.append(*part) for part in zip(kv.split(pieces), gate.split(pieces), strict=True)]
    assert torch.equal(torch.cat(parts), together)
    singles = [one_by_one.append(kv[i : i + 1], gate[i : i + 1]) for i in range(len(kv))]
    assert torch.equal(torch.cat([together[:0], *singles]), together)
    assert [len(x) for x in singles] == [int((i + 1) % ratio == 0) for i in range(len(kv))]


def test_indexer_keys_are_fp4_values() -> None:
    weights = make_weights(4)
    keys = indexer_keys(Compressor(weights).append(*make_tokens(weights, 64)))
    assert keys.dtype == torch.bfloat16
    assert torch.equal(keys, round_to_fp4(keys))
    blocks = keys.float().view(16, 4, 32)
    steps = blocks / blocks.abs().amax(-1, keepdim=True)
    assert all(len(row.abs().unique()) <= 8 for block in steps for row in block)


def test_repr_reports_keys_and_pending_tokens() -> None:
    weights = make_weights(4)
    compressor = Compressor(weights)
    compressor.append(*make_tokens(weights, 7))
    assert repr(compressor) == "<Compressor 1 keys, 3 of 4 tokens of the next>"


def test_tokens_of_wrong_width_and_weights_of_wrong_dtype_are_refused() -> None:
    weights = make_weights(4)
    with pytest.raises(ArrayError, match=r"kv has shape \[5, 128\]; wanted \[num_tokens, 256\]"):
        Compressor(weights).append(torch.zeros(5, 128), torch.zeros(5, 128))
    with pytest.raises(ArrayError, match="norm_weight is float64"):
        Compressor(CompressorWeights(weights.position_bias, weights.norm_weight.double(), weights.inv_freq))
