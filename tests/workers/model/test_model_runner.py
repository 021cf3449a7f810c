"""The decode loop generates the tokens that transformers generates, with the same weights and context."""

import pytest
import torch

from csattn.errors import ConfigError, ContextError
from tests.tiny import ALL_FAMILIES, loaded, make_model, token_ids
from tests.workers.model.decoding import decode, prefill
from tests.workers.model.full_attention import FullAttention
from tests.workers.model.full_context import (
    CONTEXT_LENS,
    assert_greedy,
    context_kv,
    contexts_of,
    full_attention,
    logits_after,
    make_runner,
)
from workers.model import ModelRunner, take_weights

QUESTIONS = [token_ids(length, seed=length).tolist() for length in (1, 5, 7)]
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def ask(runner: ModelRunner, context_id: int, tail_id: int, question: list[int], num_tokens: int) -> list[int]:
    """Prefill a question and decode greedily, as the only request."""
    context_len = CONTEXT_LENS[context_id]
    first = int(prefill(runner, question, context_id, context_len, tail_id).next_ids)
    runner.fill(1, [first], [context_len + len(question)], [context_id], [tail_id], [len(question) + 1])
    return [first, *decode(runner, 1, num_tokens - 1)[:, 0].tolist()]


def test_greedy_tokens_equal_those_of_transformers() -> None:
    model = loaded("qwen2").model
    runner = make_runner(model)
    for tail_id, question in enumerate(QUESTIONS):
        context_id = tail_id % 2
        assert_greedy(ask(runner, context_id, tail_id, question, 32), model, context_id, question)


@pytest.mark.parametrize("rope_type", ROPES)
def test_greedy_tokens_equal_those_of_transformers_for_every_rope_type(rope_type) -> None:
    model = make_model(rope_parameters=ROPES[rope_type])
    assert_greedy(ask(make_runner(model), 0, 0, QUESTIONS[1], 32), model, 0, QUESTIONS[1])


@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_logits_equal_transformers_if_norms_after_rope_undo_its_scaling(use_qk_norm) -> None:
    model = make_model("llama4_text", rope_parameters=ROPES["yarn"], use_qk_norm=use_qk_norm)
    logits = prefill(make_runner(model), QUESTIONS[2], 0, CONTEXT_LENS[0], tail_id=0).logits
    torch.testing.assert_close(logits, logits_after(model, 0, QUESTIONS[2])[-1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"hidden_size": 72}])
def test_greedy_tokens_equal_those_of_transformers_for_other_model_shapes(changes) -> None:
    model = make_model("llama", **changes)
    assert_greedy(ask(make_runner(model), 1, 0, QUESTIONS[2], 32), model, 1, QUESTIONS[2])


def test_requests_in_one_batch_generate_the_tokens_they_generate_alone() -> None:
    """The rows have different contexts, positions and tails; one more row is idle."""
    model = loaded("qwen3").model
    runner = make_runner(model, batch_sizes=(2, 4))
    rows = []
    for tail_id, question in enumerate(QUESTIONS):
        context_id = tail_id % 2
        first = int(prefill(runner, question, context_id, CONTEXT_LENS[context_id], tail_id).next_ids)
        rows.append((first, CONTEXT_LENS[context_id] + len(question), context_id, tail_id, len(question) + 1))
    runner.fill(4, *zip(*rows, strict=True))
    together = decode(runner, 4, 20).T.tolist()
    for row, (question, tokens) in enumerate(zip(QUESTIONS, together, strict=False)):
        assert_greedy([rows[row][0], *tokens], model, row % 2, question)


def test_idle_rows_and_their_tails_do_not_change() -> None:
    runner = make_runner(loaded().model)
    runner.fill(3, [5], [40], [0], [1], [1])
    before = torch.stack(list(runner.attention.tails))
    decode(runner, 3, 4)
    rows = runner.rows(3)
    assert rows.context_ids.tolist() == [0, -1, -1]
    assert rows.positions.tolist() == [44, 0, 0]
    assert rows.tail_lens.tolist() == [5, 0, 0]
    changed = ~torch.isclose(before, torch.stack(list(runner.attention.tails)), equal_nan=True).flatten(2).all(-1)
    assert changed.any(0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("batch_sizes", [(1,), (2, 5), (16,)])
def test_a_question_prefilled_in_chunks_of_any_size_gives_the_same_logits(batch_sizes) -> None:
    model = loaded("qwen2").model
    question = token_ids(11, seed=3).tolist()
    logits = prefill(make_runner(model, batch_sizes), question, 1, CONTEXT_LENS[1], tail_id=2).logits
    want = logits_after(model, 1, question)[-1:]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_logits_of_a_follow_up_question_equal_those_of_transformers() -> None:
    model = loaded().model
    runner = make_runner(model)
    answer = ask(runner, 0, 0, QUESTIONS[1], 6)
    so_far = [*QUESTIONS[1], *answer[:-1]]  # the last token is generated, but not yet fed
    follow_up = [answer[-1], *QUESTIONS[2]]
    output = prefill(runner, follow_up, 0, CONTEXT_LENS[0] + len(so_far), tail_id=0, tail_len=len(so_far))
    want = logits_after(model, 0, [*so_far, *follow_up])[-1:]
    torch.testing.assert_close(output.logits, want, rtol=1e-4, atol=1e-4)


class PredictionsRecorded(FullAttention):
    """Full attention that looks ahead, and records the predicted queries and the order of calls."""

    lookahead = True

    def __init__(self, inner: FullAttention) -> None:
        self.__dict__.update(inner.__dict__)
        self.predicted: dict[int, torch.Tensor] = {}
        self.order: list[str] = []

    def begin_step(self, rows) -> None:
        self.order.append("begin")

    def look_ahead(self, layer_idx, q, rows) -> None:
        self.predicted[layer_idx] = q.clone()
        self.order.append(f"look ahead to {layer_idx}")

    def attend(self, layer_idx, q, rows, out) -> None:
        super().attend(layer_idx, q, rows, out)
        self.order.append(f"attend {layer_idx}")

    def end_step(self, rows) -> None:
        self.order.append("end")


@pytest.mark.parametrize("family", [name for name in ALL_FAMILIES if name != "deepseek_v4"])  # its rows are compressed
def test_predicted_queries_equal_those_from_the_layers_own_modules(family) -> None:
    """As in a session: this layer's input goes through the next layer's norm and projection, the map, and RoPE."""
    from bench.accuracy.attending.rotation import rotate_for
    from csattn.models.query import queries_before_rope

    model = loaded(family).model
    attention = PredictionsRecorded(full_attention(model, begun=1))
    shape = take_weights(model, "cpu").spec
    maps = torch.randn(2, shape.num_layers, shape.num_q_heads, shape.head_dim + 1, shape.head_dim) * 0.3
    runner = ModelRunner(take_weights(model, "cpu"), attention, (2,), next_query=maps)
    question, context_id = QUESTIONS[1][:2], 1
    prefill(runner, question, context_id, CONTEXT_LENS[context_id], tail_id=0)

    ids = torch.cat([contexts_of(model)[context_id], torch.tensor(question)])[None]
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
        positions = torch.arange(ids.shape[1] - 2, ids.shape[1])
        for number, layer_idx in enumerate(shape.indexed_layers[1:]):
            early = queries_before_rope(model, layer_idx, hidden[layer_idx - 1][0, -2:])
            matrix = maps[context_id, number]
            predicted = early @ matrix[:, :-1] + matrix[:, -1:]
            want = rotate_for(model.model, layer_idx, predicted, positions).transpose(0, 1)
            torch.testing.assert_close(attention.predicted[layer_idx], want, rtol=1e-3, atol=1e-3)
        assert attention.predicted.keys() == set(shape.indexed_layers[1:])


def test_a_step_calls_its_attention_in_the_documented_order() -> None:
    model = loaded().model
    attention = PredictionsRecorded(full_attention(model))
    maps = torch.zeros(2, 3, 4, 17, 16)
    runner = ModelRunner(take_weights(model, "cpu"), attention, (1,), next_query=maps)
    runner.fill(1, [3], [40], [0], [0], [1])
    runner.step(1)
    assert attention.order == [
        "begin",
        "look ahead to 1",
        "attend 0",
        "look ahead to 2",
        "attend 1",
        "attend 2",
        "end",
    ]


def test_batches_tokens_and_tails_out_of_range_are_refused_with_the_reason() -> None:
    model = loaded().model
    runner = make_runner(model)
    with pytest.raises(ConfigError, match="4 rows do not fit a step of 3"):
        runner.batch_size_for(4)
    with pytest.raises(ContextError, match="token id 256 is not in the model's vocabulary of 256"):
        prefill(runner, [1, 256], 0, CONTEXT_LENS[0], 0)
    with pytest.raises(ContextError, match="a tail of 61 rows was requested, tails hold 60"):
        prefill(runner, [1] * 61, 0, CONTEXT_LENS[0], 0)
    with pytest.raises(ConfigError, match="batch sizes must be positive"):
        make_runner(model, ())
    with pytest.raises(ConfigError, match="needs next_query"):
        ModelRunner(take_weights(model, "cpu"), PredictionsRecorded(full_attention(model)), (1,))


def test_context_kv_does_not_depend_on_how_much_is_prefilled_at_once() -> None:
    """A context's KV, which tests insert, does not depend on how much of it is prefilled at once."""
    model = loaded("mistral").model
    ids = contexts_of(model)[0]
    whole, first = context_kv(model, ids), context_kv(model, ids[:20])
    torch.testing.assert_close(whole[-1][:, :20], first[-1], rtol=1e-5, atol=1e-5)
