"""Attention to low-bit rows in `bench.decode`: its kernel agrees with rows coded and decoded by definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.accuracy.attending import low_bit
from bench.accuracy.attending.context import ContextLayer
from bench.decode import low_bit_rows
from bench.decode.baselines import reference_attention, relative_error
from bench.decode.low_bit_rows import FORMATS, ROTATED_BITS, TILE_LEN, LowBitAttention, coded_tiles
from bench.decode.options import Options
from bench.decode.widened import Heads
from bench.decode.workload import Workload
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.test_bench_decode import FEW, FEW_HEADS, ignore, recording  # noqa: F401

DEFINED = {
    "kivi-2": low_bit.kivi(2),
    "kivi-4": low_bit.kivi(4),
    "turboquant-3.5": low_bit.turbo_quant(*ROTATED_BITS),
    "q4_0": low_bit.q4_0,
}


@pytest.fixture
def kernels(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, low_bit_rows)


def rotations(rows: torch.Tensor) -> torch.Tensor:
    """Return maps from heads' channels to TurboQuant's, [num_kv_heads, head_dim, head_dim]. rows: keys or values."""
    order = low_bit.largest_channels(rows)
    parts = low_bit.encode_rotated(rows, order, ROTATED_BITS)
    rotation = torch.block_diag(*(turn for _, _, turn in parts))
    return torch.stack([torch.eye(rows.shape[2])[head[0]].mT @ rotation for head in order.cpu()])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_tiles", "batch_size", "group_size"), [(1, 1, 8), (7, 2, 4), (67, 1, 3)])
def test_attention_to_codes_equals_attention_to_decoded_rows(kernels, rng, name, num_tiles, batch_size, group_size):
    require_attention(rng, name, num_tiles, batch_size, group_size)


@pytest.mark.parametrize("name", ["kivi-2", "turboquant-3.5"])
def test_attention_is_correct_when_partial_sums_need_more_memory_than_tiles(kernels, as_ampere, rng, name):
    require_attention(rng, name, 9, 1, 8)


def require_attention(rng: np.random.Generator, name: str, num_tiles: int, batch_size: int, group_size: int) -> None:
    heads, num_q_heads = Heads(2, group_size, 128, 128**-0.5), 2 * group_size
    shape = batch_size, 2, num_tiles * TILE_LEN, 2, 128
    rows = torch.from_numpy(rng.standard_normal(shape)).float()
    rows[..., 5] *= 6.0
    rows[:, :, :3] *= 3.0  # some rows with large weights
    q = torch.from_numpy(rng.standard_normal((batch_size, num_q_heads, 128))).bfloat16()
    asked, want = q.clone(), torch.empty(batch_size, num_q_heads, 128)
    for request, of in enumerate(rows):
        k, v = (part.contiguous() for part in of.unbind(2))
        coded = DEFINED[name](ContextLayer(torch.zeros(0), k, v, heads.softmax_scale, predictor=None))
        assert isinstance(coded, low_bit.LowBitRows)
        assert coded.bytes_per_key * TILE_LEN == FORMATS[name].tile_bytes(128)
        q_of = q[request : request + 1, :, None].float()
        want[request] = reference_attention(q_of, coded.k[None], coded.v[None])[0, :, 0]
        if name == "turboquant-3.5":
            asked[request] = (
                (q[request].float().view(2, group_size, 128) @ rotations(k)).view(num_q_heads, 128).bfloat16()
            )
    attention = LowBitAttention(FORMATS[name], heads, shape[2], batch_size, DEVICE)
    tiles = torch.stack([coded_tiles(of.to(DEVICE), FORMATS[name]) for of in rows])
    assert tiles.shape[3] == FORMATS[name].tile_bytes(128)
    out = torch.full((batch_size, num_q_heads, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    attention._parts.fill_(torch.nan)
    attention.attend(asked.to(DEVICE), tiles, out)
    got = out.float().cpu()
    if name == "turboquant-3.5":
        back = [rotations(of[:, :, 1].contiguous()).mT for of in rows]
        got = torch.stack(
            [(of.view(2, group_size, 128) @ turn).view(num_q_heads, 128) for of, turn in zip(got, back, strict=True)]
        )
    assert relative_error(got, want) < 0.02


def test_steps_attend_to_the_rows_of_each_request(kernels, recording, monkeypatch):  # noqa: F811
    monkeypatch.setattr(low_bit_rows, "require_memory", ignore)
    work, shape = Workload(recording, FEW_HEADS, 128, 2, DEVICE), replace(FEW, layers=FEW.layers[:2])
    options = Options(shape=shape, search=SearchConfig(), ceilings={}, seconds=0.0)
    prepared = low_bit_rows.low_bit_rows(work, options, "kivi-4")
    assert prepared.step_bytes == 2 * 2 * 2 * 128 * 160
    q, kv = work.queries(1)[0].contiguous(), work.separate_kv(1)
    out = torch.zeros_like(q)
    prepared.attention.attend(1, q, work.step_rows(64), out)
    want = reference_attention(q[:, :, None], *kv)[:, :, 0]
    assert relative_error(out.cpu(), want.cpu()) < 0.1  # the error of 4 bits


def test_shapes_that_the_kernel_does_not_support_are_refused(recording):  # noqa: F811
    options = Options(shape=FEW, search=SearchConfig(), ceilings={}, seconds=0.0)
    with pytest.raises(ConfigError, match="contexts of their own"):
        low_bit_rows.low_bit_rows(Workload(recording, FEW_HEADS, 128, 2, DEVICE, is_shared=True), options, "q4_0")
    wide = Workload(recording, replace(FEW_HEADS, group_size=9), 128, 1, DEVICE)
    with pytest.raises(ConfigError, match=r"8 query heads of a KV head at most, .* not 9 of 128"):
        low_bit_rows.low_bit_rows(wide, options, "kivi-4")
    with pytest.raises(ConfigError, match="whole tiles of 32, not 100 rows"):
        coded_tiles(torch.zeros(1, 100, 2, 128), FORMATS["q4_0"])
