"""A step on tapes computes what its definition computes, and gives a row the same bits in any batch."""

import numpy as np
import pytest
import torch

from csattn.batch import StepRows, make_step_rows
from csattn.cpu.addresses import KindStage
from csattn.cpu.team import Team
from csattn.errors import ModelError
from csattn.models.module_weights import weights_of
from csattn.models.quantized_model import round_weights
from csattn.models.quantized_weight import Rounding
from csattn.models.query import Queries
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import Linear
from tests.tiny import ALL_FAMILIES, loaded, make_model
from tests.workers.model.step_ops import EPS, make_choice, rows_of_tokens
from workers.model.cpu.cpu_model import CpuModel
from workers.model.cpu.linear_stage import linear_stage
from workers.model.cpu.stage_recorder import StageRecorder
from workers.model.cpu.tape_ops import TapeOps
from workers.model.layers import StepLayers
from workers.model.ops import CompressedBuffers, ExpertBuffers, Normed, RecurrentState
from workers.model.torch_ops import TorchOps

TOKENS, POSITIONS, TAIL_IDS, TAIL_LENS = [3, 250, 0, 3, 17], [90, 17, 0, 91, 40], [2, 0, 1, 2, 3], [3, 1, 1, 4, 5]


def attended(q: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for attention's output."""
    return torch.sin(q / 4)


class Recorded:
    """A `StepAttention` that attends to no rows, and records the queries that it is given."""

    lookahead = True
    in_graph = True

    def __init__(self, tails: list[torch.Tensor], states: list[RecurrentState | None]) -> None:
        self.tails, self.states = tails, states
        self.q: list[torch.Tensor] = []
        self.ahead: list[torch.Tensor] = []

    def begin_step(self, rows: StepRows) -> None:
        pass

    def look_ahead(self, layer_idx: int, q: torch.Tensor, rows: StepRows) -> None:
        self.ahead.append(q.clone())

    def attend(self, layer_idx: int, q: torch.Tensor, rows: StepRows, out: torch.Tensor) -> None:
        self.q.append(q.clone())
        out.copy_(attended(q))

    def attend_latents(self, layer_idx: int, queries: Queries, rows: StepRows, out: torch.Tensor) -> None:
        self.q += [part.clone() for part in (queries.q, queries.index_q, queries.index_weights) if part is not None]
        out.copy_(attended(queries.q)[..., : out.shape[-1]])

    def attend_compressed(self, layer_idx: int, buffers: CompressedBuffers, rows: StepRows) -> None:
        self.q += [buffers.projected.clone(), buffers.inputs.clone()]
        attend_compressed(buffers, rows.batch_size)

    def end_step(self, rows: StepRows) -> None:
        pass


def attend_compressed(buffers: CompressedBuffers, num_rows: int) -> None:
    groups = attended(buffers.projected[:num_rows, : buffers.attended.shape[::2].numel()])
    buffers.attended[:, :num_rows] = groups.view(num_rows, len(buffers.attended), -1).transpose(0, 1)


def fill(state: RecurrentState | None) -> RecurrentState | None:
    """Fill a state with random numbers. Returns a copy of it."""
    if state is None:
        return None
    generator = torch.Generator().manual_seed(2)
    for part in (state.conv, state.memory):
        part.copy_(torch.randn(part.shape, generator=generator))
    return RecurrentState(state.conv.clone(), state.memory.clone(), state.version.clone())


def maps_of(model: CpuModel) -> torch.Tensor:
    """Make random maps that predict each layer's queries [1, num_layers, num_q_heads, head_dim + 1, head_dim]."""
    spec = model.spec
    generator = torch.Generator().manual_seed(1)
    sizes = 1, spec.num_layers, spec.num_q_heads, spec.head_dim + 1, spec.head_dim
    return torch.randn(sizes, generator=generator) * spec.head_dim**-0.5


def run_tapes(
    model: CpuModel, rows: list[int], ahead: bool, num_threads: int = 1
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Run a step. Returns the queries and predicted queries of every layer, and the logits."""
    maps, num_rows, q, predicted = maps_of(model), len(rows), [], []
    for layer_idx in range(model.spec.num_layers):
        model.maps[layer_idx] = maps[0, layer_idx].data_ptr() if ahead else 0
    model.set_rows(*([values[row] for row in rows] for values in (TOKENS, POSITIONS, TAIL_IDS, TAIL_LENS)))
    with Team(num_threads) as team:
        team.run(model.begin[ahead])
        for layer_idx, after in enumerate(model.after[ahead]):
            if (buffers := model.latents[layer_idx]) is not None:
                queries = buffers.queries
                q += [
                    part[:num_rows].numpy().copy()
                    for part in (queries.q, queries.index_q, queries.index_weights)
                    if part is not None
                ]
                buffers.attended[:num_rows] = attended(queries.q[:num_rows])[..., : buffers.attended.shape[-1]]
                team.run(after)
                continue
            if model.spec.layers[layer_idx].compressed is not None:
                _, of_rows, _ = model.compressed(layer_idx)
                q += [part[:num_rows].numpy().copy() for part in (of_rows.projected, of_rows.inputs)]
                attend_compressed(of_rows, num_rows)
                team.run(after)
                continue
            q.append(model.queries[layer_idx][:num_rows].copy())
            if ahead and model.spec.is_predicted(layer_idx):
                indexed_idx = model.indexed_idx[layer_idx]
                assert indexed_idx is not None
                predicted.append(model.q_ahead[indexed_idx % 2][:num_rows].copy())
            model.outputs[layer_idx][:num_rows] = attended(torch.from_numpy(q[-1])).reshape(num_rows, -1)
            team.run(after)
        team.run(model.logits_tape(range(num_rows)))
    return q, predicted, model.logits[:num_rows].copy()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "of odd width"])
def test_a_step_on_tapes_equals_its_torch_definition(family: str, ahead: bool) -> None:
    whole = loaded(family).model if family in ALL_FAMILIES else make_model("qwen3", hidden_size=74)
    model = CpuModel(whole, 7, 5, 9)
    for tail in model.tails:
        tail.fill_(torch.nan)
    tails, states = [tail.clone() for tail in model.tails], [fill(state) for state in model.states]
    q, predicted, logits = run_tapes(model, list(range(5)), ahead, num_threads=2)

    rows = make_step_rows(5, torch.device("cpu"))
    for place, values in (
        (rows.token_ids, TOKENS),
        (rows.positions, POSITIONS),
        (rows.context_ids, 5 * [0]),
        (rows.tail_ids, TAIL_IDS),
        (rows.tail_lens, TAIL_LENS),
    ):
        place.copy_(torch.tensor(values))
    close = 1e-4 if all(state is None for state in states) else 2e-3  # random states are read as differences
    want, weights, maps = Recorded(tails, states), weights_of(whole), maps_of(model)
    by_layer = [maps[:, layer_idx] for layer_idx in range(model.spec.num_layers)]
    layers = StepLayers(weights, want, by_layer, TorchOps(weights.spec.norm_eps), rows, torch.float32)
    with torch.no_grad():
        for call in layers.calls(ahead):
            call.run()
    for got, expected in ((q, want.q), (predicted, want.ahead), ([logits], [layers.logits])):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=close, atol=close)
    torch.testing.assert_close(model.tails, tails, rtol=close, atol=close, equal_nan=True)
    for got_state, state in zip(model.states, states, strict=True):
        assert (got_state is None) == (state is None)
        if got_state is not None and state is not None:
            torch.testing.assert_close(got_state.conv, state.conv, rtol=close, atol=close)
            torch.testing.assert_close(got_state.memory, state.memory, rtol=close, atol=close)
    assert len(predicted) == ahead * len(model.spec.indexed_layers[1:])


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_row_on_tapes_has_the_same_bits_in_any_batch(family: str) -> None:
    """This holds in any batch, on any number of threads."""
    model = CpuModel(loaded(family).model, 7, 5, 9)
    for state in model.states:
        fill(state)
    alone = [run_tapes(model, [row], True) for row in range(5)]
    keeps_states = any(state is not None for state in model.states)  # then rows 0 and 3, of one request, interact
    for num_threads, rows in ((1, [4, 0]), (2, [1, 2, 3]), (3, [0, 1, 2, 4] if keeps_states else [0, 1, 2, 3, 4])):
        q, predicted, logits = run_tapes(model, rows, True, num_threads)
        for at, row in enumerate(rows):
            for number in [i for i in range(len(q)) if not keeps_states or model.states[i] is None]:
                np.testing.assert_array_equal(q[number][at], alone[row][0][number][0])
            for layer_idx, early in enumerate(predicted):
                np.testing.assert_array_equal(early[at], alone[row][1][layer_idx][0])
            np.testing.assert_array_equal(logits[at], alone[row][2][0])


def test_logits_are_computed_for_the_requested_rows_only() -> None:
    """The number of requested rows does not change the number of rows of the next step."""
    model = CpuModel(loaded("qwen3").model, 7, 5, 9)
    logits = run_tapes(model, list(range(5)), False)[2]
    model.logits[:] = np.nan
    with Team(2) as team:
        team.run(model.logits_tape([3, 0]))
    np.testing.assert_array_equal(model.logits[:2], logits[[3, 0]])
    assert np.isnan(model.logits[2:]).all()
    for rows in ([0, 1, 2, 3, 4], [2, 4]):
        np.testing.assert_array_equal(run_tapes(model, rows, False)[2], logits[rows])


def test_stages_wait_only_for_stages_that_they_depend_on() -> None:
    """A layer's projections and the prediction for the next layer run in parallel."""
    model = CpuModel(loaded("qwen3").model, 3, 1, 2)
    waits = {ahead: model.after[ahead][0].stages[:, 3].tolist() for ahead in (False, True)}
    # out, prepare, gates, down, prepare, then q, k, v, then the rotation; ahead also the early q, and the prediction
    assert waits[False] == [0, 1, 1, 1, 1, 1, 0, 0, 1]
    assert waits[True] == [0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0]


def test_weights_of_another_dtype_than_the_models_are_read_in_that_dtype() -> None:
    """The weights of an indexer's heads are float32 in bfloat16 models."""
    x, weight, out = torch.randn(3, 70), torch.randn(21, 70), torch.full((3, 21), torch.nan)
    ops = TapeOps("bfloat16", np.array([3]), EPS)
    ops.linear(Normed(x), [Linear(weight[:4].bfloat16()), Linear(weight[4:])], out)
    tape = ops.cut()
    tape.set_rows(3)
    with Team(2) as team:
        team.run(tape.tape)
    want = torch.cat([x @ weight[:4].bfloat16().float().T, x @ weight[4:].T], dim=1)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounding", ["int4", "fp8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "gpt_oss", "deepseek_v3", "deepseek_v4"])
def test_quantized_weights_are_read_instead_of_the_decoded_ones(family: str, rounding: Rounding) -> None:
    """The results are those of weights decoded to float32, bit for bit."""
    model = make_model(family, intermediate_size=200).bfloat16()
    wide = make_model(family, intermediate_size=200).bfloat16().float()
    for each in (model, wide):
        round_weights(each, rounding)
    kept_in = [module for module in model.modules() if hasattr(module, "quantized")]
    assert any(hasattr(module, "gate_up_proj") for module in kept_in) == (family != "qwen2")
    read = run_tapes(CpuModel(model, 7, 5, 9), list(range(5)), False)[2]
    assert not any(hasattr(module, "quantized") for module in wide.modules())
    np.testing.assert_array_equal(read, run_tapes(CpuModel(wide, 7, 5, 9), list(range(5)), False)[2])
    for module in kept_in:
        for name in ("weight", "gate_up_proj", "down_proj"):
            if isinstance(parameter := getattr(module, name, None), torch.nn.Parameter):
                parameter.data.fill_(torch.nan)
    np.testing.assert_array_equal(run_tapes(CpuModel(model, 7, 5, 9), list(range(5)), False)[2], read)


def test_shares_are_zero_if_all_chosen_scores_are_zero() -> None:
    """Shares are 0, not NaN, where the sigmoid of all chosen experts is 0."""
    logits, shares, chosen = torch.full((2, 5), -200.0), torch.full((2, 2), torch.nan), torch.zeros(2, 2).int()
    logits[1, 3] = 1.0
    spec = ExpertsSpec(num_experts=5, num_chosen=2, intermediate_size=1, scores="sigmoid", normed=True, scale=1.5)
    ops = TapeOps("float32", np.array([2]), EPS)
    buffers = ExpertBuffers(logits, chosen, shares, shares, shares)
    ops.choose_experts(make_choice(spec), spec, rows_of_tokens([0, 0]), buffers)
    tape = ops.cut()
    tape.set_rows(2)
    with Team(1) as team:
        team.run(tape.tape)
    assert chosen.tolist() == [[0, 1], [3, 0]]
    assert shares.tolist() == [[0.0, 0.0], [1.5, 0.0]]


def test_float64_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="float64"):
        CpuModel(make_model().double(), 1, 1, 1)


def test_a_stage_has_a_fixed_number_of_pieces_or_a_number_per_row() -> None:
    recorder = StageRecorder("float32", np.array([1]), EPS)
    for pieces in ({"fixed": 3}, {}, {"per_row": 2}):
        recorder._record(KindStage(linear_stage, "float32"), (), writes=[], **pieces)
    tape = recorder.cut()
    tape.set_rows(5)
    assert tape.tape.pieces.tolist() == [3, 5, 10]
