"""Layers of latents in steps on the CPU: what their rows attend to is the model's own choice, not a request's."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import word, words_of
from csattn.cpu.tape import Tape
from csattn.models.spec import LatentSpec
from workers.engine.latent_stages import ARGUMENTS, attend_pieces, attend_stage, choose_stage, score_pieces, score_stage
from workers.model.cpu.cpu_model import CpuModel


class LatentChoice:
    """Room for scores and for what is chosen, of one layer after the other.

    A layer without an indexer finds the choice of the last one that has one.
    """

    def __init__(self, max_rows: int, top_k: int) -> None:
        self.scores = np.zeros((max_rows, 0), np.float32)
        self.chosen = np.zeros((max_rows, top_k), np.int32)
        self.num_chosen = np.zeros(max_rows, np.int64)

    def make_room(self, num_seen: int) -> None:
        """For rows that see so many."""
        if num_seen > self.scores.shape[1]:
            self.scores = np.zeros((len(self.scores), max(num_seen, 5 * self.scores.shape[1] // 4)), np.float32)


class LatentRows:
    """What rows attend to in such a layer: of their context and of their own, the rows that are chosen."""

    def __init__(self, layer_idx: int, spec: LatentSpec, model: CpuModel, choice: LatentChoice) -> None:
        self.layer_idx, self._spec, self._choice, room = layer_idx, spec, choice, model.latents[layer_idx]
        assert room is not None
        self._contexts, self._context_lens = (np.zeros(model.max_rows, np.int64) for _ in range(2))
        self._scale, tails, indexer = np.array([model.shape.softmax_scale]), model.tails[layer_idx], spec.indexer
        values = {
            "contexts": self._contexts,
            "context_lens": self._context_lens,
            "tails": tails,
            "tail_capacity": tails.shape[2],
            "tail_ids": model.tail_ids,
            "tail_lens": model.tail_lens,
            "width": tails.shape[3:].numel(),
            "kv_rank": spec.kv_rank,
            "key_width": spec.key_width,
            "num_heads": spec.num_heads,
            "q": room.queries.q,
            "softmax_scale": self._scale,
            "num_index_heads": 0 if indexer is None else indexer.num_heads,
            "index_dim": 0 if indexer is None else indexer.head_dim,
            "index_q": room.queries.index_q,
            "index_weights": room.queries.index_weights,
            "scores": choice.scores,
            "scores_width": 0,
            "top_k": spec.top_k or 0,
            "chosen": choice.chosen,
            "num_chosen": choice.num_chosen,
            "out": room.attended,
        }
        self._room = room  # which the tape has addresses of, as of the choice
        self._arguments = words_of(ARGUMENTS, values)
        self.tape = Tape()
        if indexer is not None:
            self.tape.add(KindStage(score_stage, model.kind), self._arguments)
            self.tape.add(choose_stage, self._arguments)
        self.tape.add(KindStage(attend_stage, model.kind), self._arguments)

    def set_contexts(self, kv: list[Tensor]) -> None:
        """kv: of the rows' contexts, [1, context_len, 2, head_dim] each."""
        self._contexts[: len(kv)] = [word(rows) for rows in kv]
        self._context_lens[: len(kv)] = [rows.shape[1] for rows in kv]

    def set_lens(self, context_lens: NDArray[np.int64], tail_lens: NDArray[np.int64]) -> None:
        """Of the rows of the next step."""
        num_rows = len(tail_lens)
        pieces: list[int] = []
        if self._spec.indexer is not None:
            longest = int((context_lens + tail_lens).max())
            self._choice.make_room(longest)
            width = self._choice.scores.shape[1]
            self._arguments[ARGUMENTS.index("scores")] = word(self._choice.scores)
            self._arguments[ARGUMENTS.index("scores_width")] = width
            pieces = [num_rows * score_pieces(width), num_rows]
        self.tape.pieces[:] = [*pieces, num_rows * attend_pieces(self._spec.num_heads)]
