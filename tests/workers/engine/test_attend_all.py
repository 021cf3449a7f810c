"""Steps that attend to all rows: their results, and that a streamed layer is read only while it is on the device."""

import pytest
import torch

from csattn.attention import device as attention
from csattn.attention import every_row
from csattn.attention.device_reference import attend_step
from csattn.batch import StepRows, make_device_selection, make_step_rows
from csattn.config import SearchConfig
from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from offload.host_memory import copy_rows
from offload.pinned import PinnedRows
from tests.attention.device_steps import change_rows
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from workers.engine.gpu.attend_all import AttendAll, StreamedRows, streamed_bytes
from workers.engine.gpu.far_rows import DeviceRows, context_layers
from workers.engine.gpu.shape import EngineShape

NUM_LAYERS = 3  # odd, so that with two buffers a step begins in the buffer where the previous step ended


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, attention, every_row)


def make_shape(context_lens: list[int], **others: object) -> EngineShape:
    sizes = {"num_layers": NUM_LAYERS, "num_q_heads": 4, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": 32}
    return EngineShape(
        **{**sizes, **others},  # type: ignore[arg-type]
        dtype=torch.float32,
        softmax_scale=32**-0.5,
        search=SearchConfig(),
        max_context_len=max(context_lens),
        batch_sizes=(5,),
        num_contexts=len(context_lens),
        num_tails=5,
        tail_capacity=8,
        attends_all=True,
    )


def make_contexts(shape: EngineShape, context_lens: list[int]) -> list[list[torch.Tensor]]:
    """Return random KV rows, indexed by context and layer."""
    row = shape.num_kv_heads, 2, shape.head_dim
    return [[torch.randn(row[0], n, *row[1:]) for _ in range(shape.num_layers)] for n in context_lens]


def place(shape: EngineShape, contexts: list[list[torch.Tensor]], streamed: bool) -> AttendAll:
    far = StreamedRows(shape, DEVICE) if streamed else DeviceRows(shape, DEVICE)
    for context_id, layers in enumerate(contexts):
        rows = list(context_layers(shape, layers))
        if isinstance(far, DeviceRows):
            far.load(context_id, rows)
        else:
            no_lock = {} if DEVICE.type == "cuda" else {"register": ignore, "unregister": ignore}
            far.load(context_id, PinnedRows(copy_rows(rows), **no_lock))  # type: ignore[arg-type]
    steps = AttendAll(shape, far, DEVICE)
    steps.tails.copy_(torch.randn_like(steps.tails))
    return steps


def ignore(*_: object, **__: object) -> None:
    """Register nothing: if the device is the CPU, it can read all host memory."""


def make_rows(context_ids: list[int]) -> StepRows:
    rows = make_step_rows(len(context_ids), DEVICE)
    rows.context_ids.copy_(torch.tensor(context_ids))
    rows.tail_ids.copy_(torch.arange(len(context_ids)))
    rows.tail_lens.copy_(torch.tensor([3 + i if context_id >= 0 else 0 for i, context_id in enumerate(context_ids)]))
    return rows


def take_step(steps: AttendAll, rows: StepRows, q: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention output of each layer; all layers get the same query."""
    outs = [torch.full_like(q, torch.nan) for _ in range(steps.shape.num_layers)]
    steps.begin_step(rows)
    for layer_idx, out in enumerate(outs):
        steps.attend(layer_idx, q, rows, out)
    steps.end_step(rows)
    return [out.cpu() for out in outs]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("text", [None, "k=q8_0,v=q4_0"])
def test_every_row_of_a_context_is_attended_to(text: str | None, streamed: bool) -> None:
    """Only rows of the row's own context are read: not those of other contexts, nor what a buffer held before."""
    lens = [37, 1, 150]
    shape = make_shape(lens, kv_format=None if text is None else KvFormat.parse(text))
    contexts = make_contexts(shape, lens)
    steps = place(shape, contexts, streamed)
    if text is not None:
        codec = KvCodec(KvFormat.parse(text), shape.head_dim)
        contexts = [[torch.from_numpy(codec.decode(codec.encode(kv.numpy()))) for kv in layers] for layers in contexts]
    if isinstance(steps.far, StreamedRows):
        room = steps.far._buffers
        assert room.nbytes == streamed_bytes(shape)
        room.view(torch.uint8).fill_(0xFF)  # NaN where no row has been copied
    for context_ids in ([2, 0, -1, 2, 1], [1, 1, -1, -1, 0], [-1] * 5):
        rows, q = make_rows(context_ids), torch.randn(5, shape.num_q_heads, shape.head_dim)
        nothing = make_device_selection(5, shape.num_kv_heads, 1, torch.device("cpu"))
        on_cpu = change_rows(rows, torch.Tensor.cpu)
        for layer_idx, got in enumerate(take_step(steps, rows, q.to(DEVICE))):
            resident = [layers[layer_idx] for layers in contexts]
            tails = steps.tails[layer_idx].cpu()
            want, _ = attend_step(q, resident, tails, resident, nothing, on_cpu, shape.softmax_scale)
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_streamed_rows_and_rows_on_the_device_give_the_same_bits() -> None:
    lens = [150, 37]
    shape = make_shape(lens, kv_format=KvFormat.parse("fp8"))
    contexts, rows = make_contexts(shape, lens), make_rows([1, 0, 0, -1, 1])
    q = torch.randn(5, shape.num_q_heads, shape.head_dim, device=DEVICE)
    on_device, streamed = place(shape, contexts, False), place(shape, contexts, True)
    streamed.tails.copy_(on_device.tails)
    for got, want in zip(take_step(streamed, rows, q), take_step(on_device, rows, q), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_streamed_layer_is_read_only_while_it_is_on_the_device() -> None:
    """Copies take longer than the attention that they overlap with, and the host does not synchronize."""
    lens = [40_000]
    shape = make_shape(lens)
    contexts, rows = make_contexts(shape, lens), make_rows([0, 0, -1, -1, -1])
    on_device, streamed = place(shape, contexts, False), place(shape, contexts, True)
    streamed.tails.copy_(on_device.tails)
    q = torch.randn(5, shape.num_q_heads, shape.head_dim, device=DEVICE)
    want = take_step(on_device, rows, q)
    outs = [torch.full_like(q, torch.nan) for _ in range(4 * NUM_LAYERS)]
    torch.cuda.synchronize()
    for step in range(4):
        streamed.begin_step(rows)
        for layer_idx in range(NUM_LAYERS):
            streamed.attend(layer_idx, q, rows, outs[step * NUM_LAYERS + layer_idx])
    for i, out in enumerate(outs):
        assert torch.equal(out.cpu(), want[i % NUM_LAYERS])
