"""Steps over latents on a device agree with their definition, row by row, with torch's operations and with kernels."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from csattn.batch import StepRows, make_step_rows
from csattn.config import SearchConfig
from csattn.lightning.mla.rows import SelectedRows
from csattn.lightning.topk import device as topk_device
from csattn.models.latent import attend_latents, choose_rows
from csattn.models.latent_spec import IndexerSpec, LatentSpec
from csattn.models.query import Queries
from offload import gather, slot_cache
from offload.host_memory import copy_rows
from offload.pinned import PinnedRows
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.offload.soundness import check
from tests.workers.engine.emulated_engine import ignore
from workers.engine import model_choice
from workers.engine.gpu import attend_latents as attending
from workers.engine.gpu import latent_memory
from workers.engine.gpu.attend_latents import AttendLatents
from workers.engine.gpu.latent_memory import CachedLatents, LatentPlaces
from workers.engine.gpu.shape import EngineShape
from workers.engine.model_choice import least_slots

INDEXER = IndexerSpec(num_heads=5, head_dim=21, interleaved=False)
CHOOSES = LatentSpec(
    num_heads=3, q_rank=8, kv_rank=32, nope_dim=4, rope_dim=16, v_dim=4, indexer=INDEXER, top_k=16
)  # fmt: skip
SHARES, ALL = replace(CHOOSES, indexer=None), replace(CHOOSES, indexer=None, top_k=None)
MODELS = {"chooses": [CHOOSES, SHARES, CHOOSES], "all": [ALL, ALL]}
CONTEXT_LENS = 37, 5
# (context, tail, number of tail rows seen): two tokens of one request, one of a short context, one without a context,
# an idle row, one that sees exactly top_k rows, and one that sees one more
ROWS = [(0, 2, 5), (0, 2, 6), (1, 0, 1), (-1, 1, 20), (-1, 0, 0), (1, 3, 11), (1, 3, 12)]
SCALE = 0.3
HEAD_DIM = 36  # half a row; the whole row ends with three numbers of padding after the index key


@pytest.fixture(params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the facade's CPU path, then with the device's kernels, interpreted (Triton) and emulated (CUDA C)."""
    if request.param == "torch":
        return
    if DEVICE.type == "cuda":
        pytest.skip("the device runs its kernels by itself")
    pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")
    from csattn.lightning.mla.triton_kernels import attend_on_device
    from csattn.lightning.paged.triton_kernels import score_on_device

    emulator.stand_in(monkeypatch, topk_device)

    def score(q: Tensor, weights: Tensor, keys: Any, pages: Tensor, lens: Tensor, longer_than: int, out: Tensor) -> Any:
        keys.check()
        score_on_device(q, weights, keys.values, keys.scales, pages, lens, longer_than, out)
        return out

    def choose(scores: Tensor, k: int, lens: Tensor, order: str, pages: Tensor, out: Tensor) -> None:
        topk_device.select_on_device(scores, lens, order == "position", pages, 1, out)

    def attend(*told: Any, out: Tensor) -> None:
        rows = SelectedRows(*told)
        rows.check()
        attend_on_device(rows, out, torch.empty(out.shape[:2]))

    for name, kernel in (("score_pages", score), ("top_k", choose), ("sparse_mla", attend)):
        monkeypatch.setattr(attending, name, kernel)


def test_a_context_has_slots_for_all_that_the_rows_of_a_step_choose() -> None:
    latent = replace(MODELS["chooses"][0], top_k=5)
    assert [least_slots(latent, context_len, 3) for context_len in (14, 15, 16)] == [14, 15, 15]
    assert least_slots(latent, 1000, 100) == least_slots(latent, 1000) == 5 * model_choice.ROWS_AT_ONCE


@pytest.mark.parametrize(("model", "placement"), [("chooses", "device"), ("chooses", "hybrid"), ("all", "device")])
def test_steps_over_latents_on_a_device_equal_the_definition(
    kernels: None, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, model: str, placement: str
) -> None:
    """Also over a context loaded where another was unloaded. Memory that no row sees is NaN."""
    emulator.stand_in(monkeypatch, gather, slot_cache, latent_memory)
    monkeypatch.setattr(model_choice, "ROWS_AT_ONCE", 2)  # as many rows as see the longer context
    layers, generator = MODELS[model], torch.Generator().manual_seed(3)
    shape = make_shape(len(layers), layers[0])
    num_cache_slots = least_slots(layers[0], shape.max_context_len, len(ROWS))  # exactly as many as a step may need
    far = LatentPlaces(shape, DEVICE) if placement == "device" else CachedLatents(shape, num_cache_slots, DEVICE)
    attention = AttendLatents(shape, SimpleNamespace(layers=[SimpleNamespace(latent=x) for x in layers]), far, DEVICE)  # type: ignore[arg-type]
    everything = far.rows if isinstance(far, LatentPlaces) else far.memory
    everything.fill_(torch.nan)
    contexts = [made(generator, len(layers), length) for length in CONTEXT_LENS]
    load(far, 1, made(generator, len(layers), 40))
    far.unload(1)
    for context_id, rows in enumerate(contexts):
        load(far, context_id, rows)
    own = made(generator, len(layers) * shape.num_tails, shape.tail_capacity).view(far.tails.shape)
    far.tails.copy_(own)
    for _ in range(3):  # fetched rows may stay in their slots for the next step
        step(attention, layers, contexts, own, generator)
    if isinstance(far, CachedLatents):
        check(far.cache)
        counts = far.cache.statistics()
        assert sum(layer.num_found for layer in counts) > 0 and not sum(layer.num_spilled for layer in counts)


def load(far: LatentPlaces | CachedLatents, context_id: int, rows: Tensor) -> None:
    if isinstance(far, LatentPlaces):
        far.load(context_id, list(rows))
        return
    locks = {} if DEVICE.type == "cuda" else {"register": ignore, "unregister": ignore}
    far.load(context_id, PinnedRows(copy_rows(list(rows)), **locks))  # type: ignore[arg-type]


def step(
    attention: AttendLatents, layers: list[LatentSpec], contexts: list[Tensor], own: Tensor, generator: torch.Generator
) -> None:
    """Run all layers of one step and compare each with its definition."""
    rows, chosen = step_rows(), [torch.empty(0)] * len(ROWS)
    for layer_idx, spec in enumerate(layers):
        asked, out = make_asked(generator), torch.full((len(ROWS), spec.num_heads, spec.kv_rank), torch.nan).to(DEVICE)
        attention.attend_latents(layer_idx, asked, rows, out)
        for row, (context_id, tail_id, tail_len) in enumerate(ROWS):
            if tail_len == 0:
                continue
            of_context = (
                contexts[context_id][layer_idx].flatten(2)[0] if context_id >= 0 else own.new_empty(0, 2 * HEAD_DIM)
            )
            seen = torch.cat([of_context, own[layer_idx, tail_id, 0, :tail_len].flatten(1)]).float()
            one = slice(row, row + 1)
            if spec.indexer is not None:
                parts = [part[one].cpu() for part in (asked.q, asked.index_q, asked.index_weights) if part is not None]
                lens = torch.tensor([len(seen)], dtype=torch.int32)
                chosen[row] = choose_rows(Queries(*parts), seen, lens, spec)
            listed = chosen[row] if spec.top_k else torch.arange(len(seen), dtype=torch.int32)[None]
            want = attend_latents(asked.q[one].cpu(), seen, listed, spec, SCALE)
            torch.testing.assert_close(out[one].cpu(), want, rtol=1e-4, atol=1e-5)


def make_shape(num_layers: int, latents: LatentSpec) -> EngineShape:
    return EngineShape(
        num_layers=num_layers,
        num_q_heads=3,
        num_kv_heads=1,
        num_index_heads=1,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        softmax_scale=SCALE,
        search=SearchConfig(),
        max_context_len=41,
        batch_sizes=(1, len(ROWS)),
        num_contexts=2,
        num_tails=4,
        tail_capacity=23,
        attends_all=True,
        latents=latents,
    )


def made(generator: torch.Generator, *sizes: int) -> Tensor:
    """Make rows [first, 1, second, 2, HEAD_DIM]. Index keys are small integers: scores have ties, and are exact."""
    rows = torch.randn(sizes[0], 1, *sizes[1:], 2 * HEAD_DIM, generator=generator)
    rows[..., CHOOSES.key_width :] = rows[..., CHOOSES.key_width :].round()
    return rows.view(sizes[0], 1, sizes[1], 2, HEAD_DIM)


def make_asked(generator: torch.Generator) -> Queries:
    num_rows = len(ROWS)
    q = torch.randn(num_rows, CHOOSES.num_heads, CHOOSES.key_width, generator=generator)
    index_q = torch.randn(num_rows, INDEXER.num_heads, INDEXER.head_dim, generator=generator).round()
    weights = torch.randn(num_rows, INDEXER.num_heads, generator=generator).round() / 4
    return Queries(q.to(DEVICE), index_q.to(DEVICE), weights.to(DEVICE))


def step_rows() -> StepRows:
    rows = make_step_rows(len(ROWS), DEVICE)
    for tensor, values in zip((rows.context_ids, rows.tail_ids, rows.tail_lens), zip(*ROWS, strict=True), strict=True):
        tensor.copy_(torch.tensor(values))
    return rows
