"""Attention over selected latent rows is the definition's for any split, and reads no other rows."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from csattn.attention import reference
from csattn.errors import ArrayError, ConfigError
from csattn.lightning import sparse_mla, sparse_mla_reference
from csattn.lightning.mla import triton_kernels
from csattn.lightning.mla.rows import SelectedRows
from csattn.lightning.mla.triton_kernels import AttendShape, attend_on_device
from tests.cuda_on_cpu.emulated import DEVICE

SCALE = 0.3
NUM_ROWS = 150


def make_case(
    num_queries: int, num_heads: int, top_k: int, dims: tuple[int, int] = (32, 16), dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    """Return selections with a hole, padded with -1; the first is empty. Rows that no query selects are NaN."""
    latent, rope = dims
    indices = torch.stack([torch.randperm(NUM_ROWS)[:top_k].sort().values for _ in range(num_queries)]).to(torch.int32)
    indices[0] = -1
    indices[1:, top_k - top_k // 3 :] = -1
    indices[1:, top_k // 4] = -1
    used = torch.zeros(NUM_ROWS, 1, dtype=torch.bool)
    used[indices[indices >= 0].long()] = True
    # both parts are views of one cache
    rows = torch.randn(NUM_ROWS, latent + rope).to(dtype).where(used, torch.nan)
    return {
        "q_nope": torch.randn(num_queries, num_heads, latent).to(dtype),
        "q_pe": torch.randn(num_queries, num_heads, rope).to(dtype) if rope else None,
        "ckv": rows[:, :latent],
        "kpe": rows[:, latent:] if rope else None,
        "indices": indices,
    }


def by_kernel(case: dict[str, Tensor | None], shape: AttendShape, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    arrays = {name: None if array is None else array.to(DEVICE) for name, array in case.items()}
    out = torch.full_like(arrays["q_nope"], torch.nan)  # type: ignore[arg-type]
    lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
    sink = None if sink is None else sink.to(DEVICE)
    rows = SelectedRows(**arrays, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    attend_on_device(rows, out, lse, shape, lse_unit=2.0)
    return out.cpu(), lse.cpu() / 2


def agree(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance)
    assert (got[0][0] == 0).all()
    assert (got[1][0] == -torch.inf).all()


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("num_heads", "top_k", "num_splits"), [(16, 40, 1), (3, 65, 3), (20, 100, 4), (1, 1, 2)])
def test_the_kernel_equals_the_definition(num_heads: int, top_k: int, with_sink: bool, num_splits: int) -> None:
    case = make_case(3, num_heads, top_k)
    sink = torch.randn(num_heads) if with_sink else None
    got = by_kernel(case, AttendShape(16, 16, num_splits, 4, 2), sink)
    agree(got, sparse_mla_reference(**case, softmax_scale=SCALE, attn_sink=sink), 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 20])
def test_the_last_selected_row_may_be_row_0(place: int) -> None:
    case = make_case(2, 4, 40)
    for name in ("ckv", "kpe"):
        case[name][0] = 1.0  # type: ignore[index]
    case["indices"][1, place:] = torch.tensor([0] + [-1] * (39 - place))  # type: ignore[index]
    want = sparse_mla_reference(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    agree(by_kernel(case, AttendShape(16, 16, 1, 4, 2), None), want, 1e-5)


def test_float16_rows_without_rope_channels_equal_the_definition() -> None:
    case = make_case(4, 16, 64, dims=(64, 0), dtype=torch.float16)
    sink = torch.randn(16)
    want = sparse_mla_reference(**case, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    agree(by_kernel(case, AttendShape(16, 32, 2, 4, 2), sink), want, 5e-3)


def test_selections_may_be_longer_than_the_largest_block_of_triton() -> None:
    """A selection can be all rows of a long context, padded to the longest that the request may reach."""
    case = make_case(2, 3, 40)
    first, used = case["indices"], 5000  # type: ignore[index]
    case["indices"] = torch.full((2, used), -1, dtype=torch.int32)
    case["indices"][:, :40] = case["indices"][:, -40:] = first
    want = sparse_mla_reference(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    case["indices"] = torch.nn.functional.pad(case["indices"], (0, 2**20), value=-1)
    agree(by_kernel(case, AttendShape(16, 16, 1, 4, 2), None), want, 1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_queries_are_split_into_launches_of_limited_size(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, shape = make_case(5, 3, 65), AttendShape(16, 16, num_splits, 4, 2)
    at_once, grids = by_kernel(case, shape, torch.ones(3)), list[tuple[int, ...]]()
    kernel = triton_kernels._attend_kernel
    watched = type("Watched", (), {"__getitem__": lambda self, grid: grids.append(grid) or kernel[grid]})()
    monkeypatch.setattr(triton_kernels, "_attend_kernel", watched)
    monkeypatch.setattr(triton_kernels, "MOST_QUERIES", 2)
    assert all(map(torch.equal, by_kernel(case, shape, torch.ones(3)), at_once))
    assert [grid[2] for grid in grids] == [2, 2, 1]


def test_the_kernel_equals_the_definition_at_deepseek_v32_sizes() -> None:
    """DeepSeek-V3.2's rows have 512 + 64 channels. Launch shapes are those chosen for a device."""
    case = make_case(2, 16, 96, dims=(512, 64), dtype=torch.float16)
    want = sparse_mla_reference(**case, softmax_scale=0.13523378)  # type: ignore[arg-type]
    arrays = {name: array.to(DEVICE) for name, array in case.items()}  # type: ignore[union-attr]
    out = torch.full_like(arrays["q_nope"], torch.nan)
    lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
    attend_on_device(SelectedRows(**arrays, softmax_scale=0.13523378), out, lse)
    agree((out.cpu(), lse.cpu()), want, 5e-3)


def test_chunked_attention_on_the_cpu_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(7, 3, 20)
    monkeypatch.setattr("csattn.lightning.mla.attend.CHUNK_BYTES", 8 * 20 * 32 * 2)
    got = sparse_mla(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    agree(got, sparse_mla_reference(**case, softmax_scale=SCALE), 0)  # type: ignore[arg-type]


def test_the_definition_is_attention_over_the_selected_rows() -> None:
    case = make_case(2, 4, 30)
    out, lse = sparse_mla_reference(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    chosen = case["indices"][1]  # type: ignore[index]
    at = chosen[chosen >= 0].long()
    ckv, kpe = case["ckv"][at], case["kpe"][at]  # type: ignore[index]
    q = torch.cat((case["q_nope"][1], case["q_pe"][1]), -1)  # type: ignore[index]
    k, v = torch.cat((ckv, kpe), -1), torch.cat((ckv, torch.zeros_like(kpe)), -1)
    want, want_lse = reference.attend(q[None, None], k[None, None], v[None, None], SCALE)
    torch.testing.assert_close(out[1], want[0, 0, :, :32])
    torch.testing.assert_close(lse[1], want_lse[0, 0])


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    case = make_case(2, 2, 10)
    plain, lse = sparse_mla(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    sink = torch.stack((lse[1, 0], torch.tensor(-torch.inf)))
    out, same_lse = sparse_mla(**case, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    torch.testing.assert_close(out[1, 0], plain[1, 0] / 2)
    torch.testing.assert_close(out[1, 1], plain[1, 1])
    torch.testing.assert_close(same_lse, lse)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_query_without_rows_gets_zeros_for_any_sink(num_splits: int) -> None:
    case = make_case(2, 16, 65)
    sink = torch.randn(16)
    sink[3], sink[4] = -torch.inf, torch.inf
    want = sparse_mla(**case, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    agree(by_kernel(case, AttendShape(16, 16, num_splits, 4, 2), sink), want, 1e-5)


def test_an_integer_softmax_scale_is_accepted() -> None:
    case = make_case(2, 2, 8)
    assert torch.equal(sparse_mla(**case, softmax_scale=1)[0], sparse_mla(**case, softmax_scale=1.0)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["q_nope", "kpe"])
def test_nan_and_infinity_in_the_inputs_make_the_output_nan(of: str, value: float) -> None:
    """NaN and infinity reach the output: zeros would look like an answer."""
    case = make_case(3, 2, 8)
    case[of][case["indices"][1, 0] if of == "kpe" else 1] = value  # type: ignore[index]
    out, _ = sparse_mla(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    assert out[1].isnan().all()
    assert (out[0] == 0).all()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # from Triton's interpreter (numpy)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_kernels_log_sum_exp_is_not_finite_for_nan_or_infinite_inputs(num_splits: int, value: float) -> None:
    """Its log-sum-exp is not finite either: a finite one, or that of no rows, would look like an answer."""
    case = make_case(4, 16, 65)
    case["q_nope"][1], case["kpe"][case["indices"][2, 40], 3] = value, value  # type: ignore[index]
    case["q_pe"][2] = case["q_pe"][2].abs()  # type: ignore[index]
    want, want_lse = sparse_mla(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    out, lse = by_kernel(case, AttendShape(16, 16, num_splits, 4, 2), None)
    assert not want_lse[2].isfinite().any()
    torch.testing.assert_close(lse, want_lse, equal_nan=True)
    torch.testing.assert_close(out, want, equal_nan=True)


def test_launch_shapes_split_rows_to_fill_the_device() -> None:
    assert AttendShape.choose(1, 16, 2048) == AttendShape(16, 32, 64, 4, 1)
    assert AttendShape.choose(8, 16, 2048) == AttendShape(16, 32, 16, 4, 5)
    assert AttendShape.choose(8, 128, 2048).num_splits == 8
    assert AttendShape.choose(4096, 64, 2048).num_splits == 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q_nope": torch.zeros(2, 4, 32, dtype=torch.int32)}, ArrayError, "q_nope is int32"),
        ({"ckv": torch.zeros(NUM_ROWS, 31)}, ArrayError, r"wanted \[num_rows, 32\]"),
        ({"ckv": torch.zeros(32, NUM_ROWS).T}, ArrayError, "ckv .* wanted contiguous rows"),
        ({"kpe": torch.zeros(3, 16)}, ArrayError, r"\[150, 16\]"),
        ({"kpe": None}, ArrayError, "one of q_pe and kpe is missing"),
        ({"indices": torch.zeros(2, 8, dtype=torch.int64)}, ArrayError, "indices is int64"),
        ({"attn_sink": torch.zeros(3)}, ArrayError, r"attn_sink has shape \[3\]"),
        ({"out": torch.zeros(2, 4, 31)}, ArrayError, "out has shape"),
        ({"lse": torch.zeros(2, 3)}, ArrayError, "lse has shape"),
        ({"softmax_scale": 0.0}, ConfigError, "wanted a positive number"),
        (
            {"softmax_scale": np.float32(0.3)},
            ConfigError,
            r"is np.float32\(0.3\); wanted a positive number, as a float",
        ),
    ],
)
def test_invalid_arguments_of_sparse_mla_are_refused_with_the_reason(
    change: dict[str, object], error: type[Exception], says: str
) -> None:
    arguments: dict[str, object] = {**make_case(2, 4, 8), "softmax_scale": SCALE, **change}
    with pytest.raises(error, match=says):
        sparse_mla(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("room", "num_stages"), [(16 * 5, [5, 5]), (16, [5, 5, 1]), (0, [5, 5, 1])])
def test_launch_shapes_beyond_shared_memory_are_replaced_by_smaller_ones(
    room: int, num_stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance, 64 heads in float32 on Hopper would take 304,128 bytes of shared memory, of 232,448."""
    kernel, asked = triton_kernels._attend_kernel, list[int]()

    def launch(grid: tuple[int, ...], *args: object, **options: int) -> None:
        asked.append(options["NUM_STAGES"])
        if (needs := options["BLOCK_HEADS"] * options["NUM_STAGES"]) > room:
            raise OutOfResources(needs, room, "shared memory")
        kernel[grid](*args, **options)

    watched = type("Watched", (), {"__getitem__": lambda self, grid: partial(launch, grid)})()
    monkeypatch.setattr(triton_kernels, "_attend_kernel", watched)
    case = make_case(3, 40, 100)
    if room:
        want = sparse_mla_reference(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
        agree(by_kernel(case, AttendShape(64, 16, 2, 8, 5), None), want, 1e-5)
    else:
        with pytest.raises(ArrayError, match=r"rows of 48 channels in torch.float32 take 16 bytes of shared memory"):
            by_kernel(case, AttendShape(64, 16, 2, 8, 5), None)
    assert asked == num_stages


def test_latent_widths_that_the_kernel_does_not_support_are_refused() -> None:
    with pytest.raises(ArrayError, match="24 latent channels"):
        by_kernel(make_case(2, 4, 8, dims=(24, 16)), AttendShape(16, 16, 1, 4, 2), None)
