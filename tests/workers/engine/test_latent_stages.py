"""The stages of steps over latents agree with their definition; a row's bits do not depend on the other rows."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import word, words_of
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.lightning import top_k_reference
from csattn.models.latent import attend_latents, attend_listed, choose_rows
from csattn.models.latent_spec import IndexerSpec, LatentSpec
from csattn.models.query import Queries
from workers.engine.cpu.latent_rows import (
    ARGUMENTS,
    attend_pieces,
    attend_stage,
    choose_stage,
    score_pieces,
    score_stage,
)

SPEC = LatentSpec(
    num_heads=19,
    q_rank=8,
    kv_rank=37,
    nope_dim=4,
    rope_dim=6,
    v_dim=4,
    indexer=IndexerSpec(num_heads=5, head_dim=11, interleaved=False),
    top_k=21,
)
WIDTH, SCALE = SPEC.row_width + 3, 0.3
CONTEXT_LENS, TAIL_LENS = [0, 1, 20, 21, 530, 600], [1, 19, 2, 1, 3, 40]


@dataclass(frozen=True)
class Case:
    """Rows with contexts and tails of CONTEXT_LENS and TAIL_LENS. Index keys are small integers: scores have ties."""

    contexts: list[Tensor]  # [context_len, WIDTH]
    tails: Tensor  # [num_rows, capacity, WIDTH]; what is not seen is NaN
    asked: Queries

    @classmethod
    def make(cls, dtype: torch.dtype) -> "Case":
        generator = torch.Generator().manual_seed(0)
        assert SPEC.indexer is not None

        def rows(*sizes: int) -> Tensor:
            made = torch.randn(*sizes, WIDTH, generator=generator)
            of_index = slice(SPEC.key_width, SPEC.row_width)
            made[..., of_index] = made[..., of_index].round()
            made[..., SPEC.row_width :] = torch.nan
            return made.to(dtype)

        num_rows = len(CONTEXT_LENS)
        contexts, tails = [rows(n) for n in CONTEXT_LENS], rows(num_rows, 50)
        for row, num_own in enumerate(TAIL_LENS):
            tails[row, num_own:] = torch.nan
        q = torch.randn(num_rows, SPEC.num_heads, SPEC.key_width, generator=generator)
        index_q = torch.randn(num_rows, SPEC.indexer.num_heads, SPEC.indexer.head_dim, generator=generator).round()
        weights = torch.randn(num_rows, SPEC.indexer.num_heads, generator=generator).round() / 4
        return cls(contexts, tails, Queries(q, index_q, weights))

    def seen(self, row: int) -> Tensor:
        return torch.cat([self.contexts[row], self.tails[row, : TAIL_LENS[row]]])

    def run(self, rows: list[int], top_k: int | None, num_threads: int = 1) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Run a step of these rows. Return the chosen positions, their number, and the attention output."""
        contexts = np.array([word(self.contexts[row]) for row in rows])
        lens, tail_ids, tail_lens = (np.array(x)[rows] for x in (CONTEXT_LENS, range(len(TAIL_LENS)), TAIL_LENS))
        assert SPEC.indexer is not None and self.asked.index_q is not None and self.asked.index_weights is not None
        scores = np.full((len(rows), 700), np.nan, np.float32)
        chosen, num_chosen = np.full((len(rows), top_k or 1), -1, np.int32), np.zeros(len(rows), np.int64)
        out = torch.full((len(rows), SPEC.num_heads, SPEC.kv_rank), torch.nan)
        q, index_q, weights = (
            x[rows].contiguous() for x in (self.asked.q, self.asked.index_q, self.asked.index_weights)
        )
        scale = np.array([SCALE])
        values = {
            **{"contexts": contexts, "context_lens": lens, "tails": self.tails, "tail_capacity": self.tails.shape[1]},
            **{"tail_ids": tail_ids, "tail_lens": tail_lens, "width": WIDTH, "kv_rank": SPEC.kv_rank},
            **{"key_width": SPEC.key_width, "num_heads": SPEC.num_heads, "q": q, "softmax_scale": scale},
            **{"num_index_heads": SPEC.indexer.num_heads, "index_dim": SPEC.indexer.head_dim, "index_q": index_q},
            **{"index_weights": weights, "scores": scores, "scores_width": scores.shape[1], "top_k": top_k or 0},
            **{"chosen": chosen, "num_chosen": num_chosen, "out": out},
        }
        arguments = words_of(ARGUMENTS, values)
        kind, tape = str(self.tails.dtype).removeprefix("torch."), Tape()
        if top_k is not None:
            tape.add(KindStage(score_stage, kind), arguments, len(rows) * score_pieces(scores.shape[1]))
            tape.add(choose_stage, arguments, len(rows))
        tape.add(KindStage(attend_stage, kind), arguments, len(rows) * attend_pieces(SPEC.num_heads))
        with Team(num_threads) as team:
            team.run(tape)
        return chosen, num_chosen, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choices_and_attention_equal_the_definition(dtype: torch.dtype) -> None:
    case = Case.make(dtype)
    chosen, num_chosen, out = case.run(list(range(len(CONTEXT_LENS))), SPEC.top_k, num_threads=2)
    for row, (context_len, tail_len) in enumerate(zip(CONTEXT_LENS, TAIL_LENS, strict=True)):
        seen, one = case.seen(row).float(), slice(row, row + 1)
        parts = [x[one] for x in (case.asked.q, case.asked.index_q, case.asked.index_weights) if x is not None]
        lens = torch.tensor([len(seen)], dtype=torch.int32)
        want = choose_rows(Queries(*parts), seen, lens, SPEC)
        assert num_chosen[row] == min(SPEC.top_k or 0, context_len + tail_len)
        assert chosen[row, : num_chosen[row]].tolist() == sorted(want[want >= 0].tolist())
        close = attend_latents(case.asked.q[one], seen, want, SPEC, SCALE)
        torch.testing.assert_close(out[one], close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_an_indexer_all_rows_are_attended_to(dtype: torch.dtype) -> None:
    case = Case.make(dtype)
    _, _, out = case.run(list(range(len(CONTEXT_LENS))), None)
    for row in range(len(CONTEXT_LENS)):
        seen, one = case.seen(row).float(), slice(row, row + 1)
        close = attend_latents(case.asked.q[one], seen, torch.arange(len(seen), dtype=torch.int32)[None], SPEC, SCALE)
        torch.testing.assert_close(out[one], close, rtol=1e-5, atol=1e-5)


def test_attend_listed_over_all_rows_equals_attend_latents() -> None:
    rows, q = torch.randn(150, WIDTH), torch.randn(70, SPEC.num_heads, SPEC.key_width)
    want = attend_latents(q, rows, None, SPEC, SCALE)
    torch.testing.assert_close(attend_listed(q, rows, SPEC, SCALE), want, rtol=1e-5, atol=1e-5)


def test_the_bits_of_a_row_do_not_depend_on_other_rows_or_threads() -> None:
    case = Case.make(torch.float32)
    alone = [case.run([row], SPEC.top_k) for row in range(len(CONTEXT_LENS))]
    for rows, num_threads in (([5, 0, 4], 1), ([1, 2, 3, 4, 5, 0], 3)):
        together = case.run(rows, SPEC.top_k, num_threads)
        for at, row in enumerate(rows):
            for got, want in zip(together, alone[row], strict=True):
                np.testing.assert_array_equal(got[at], want[0])


@pytest.mark.parametrize(
    "scores",
    [
        [0.0, -0.0, 0.0, -0.0],
        [np.nan, -np.inf, np.inf, -1.0, np.nan, 1e-45, -1e-45, 0.0],
        [3.0] * 40,
        np.random.default_rng(0).integers(-3, 4, 777).tolist(),
        np.random.default_rng(1).standard_normal(1000).tolist(),
    ],
)
def test_the_choice_is_ordered_by_score_then_position_with_nan_last(scores: list[float]) -> None:
    """The order is score descending, then position, NaN last; the stage reads nothing but scores and lengths."""
    made = np.array([scores], np.float32)
    for top_k in (1, 2, 3, len(scores) - 1, len(scores), len(scores) + 1):
        chosen, num_chosen = np.full((1, top_k), -1, np.int32), np.zeros(1, np.int64)
        values = dict.fromkeys(ARGUMENTS, 0) | {"scores": made, "scores_width": len(scores), "top_k": top_k}
        lens = {"context_lens": np.array([len(scores) - 1]), "tail_lens": np.array([1])}
        values |= lens | {"chosen": chosen, "num_chosen": num_chosen}
        tape = Tape()
        tape.add(choose_stage, words_of(ARGUMENTS, values), 1)
        with Team(1) as team:
            team.run(tape)
        want = top_k_reference(torch.from_numpy(made), top_k, torch.tensor([len(scores)], dtype=torch.int32))
        assert chosen[0, : num_chosen[0]].tolist() == sorted(want[want >= 0].tolist())
