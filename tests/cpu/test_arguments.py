"""Stages read their arguments by name, and are compiled for each kind of floats."""

from typing import Any

import numpy as np
import pytest
import torch

from csattn.cpu.addresses import KINDS, KindStage, array_at
from csattn.cpu.arguments import bytes_of, floats_of, number_at, word_of, words_at, words_of
from csattn.cpu.floats import load_float
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team

NAMES = ("kept", "width", "rows", "multiplier", "out", "nothing")
_arguments_at = words_at(NAMES)


def _sums(arguments: int, piece: int, thread: int, like: Any) -> int:
    """out[piece] = multiplier * the sum of row rows[piece] of `kept`"""
    args, total = _arguments_at(arguments), np.float32(0)
    row = array_at(args.kept + word_of(args.rows, piece) * args.width * bytes_of(like), args.width, like)
    for i in range(args.width):
        total += load_float(row, i)
    if args.nothing == 0:
        floats_of(args.out, piece, 1)[0] = number_at(args.multiplier) * total
    return 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_reads_its_arguments_by_name(kind: str) -> None:
    kept, rows = torch.arange(15.0, dtype=getattr(torch, kind)).reshape(5, 3), np.array([4, 0])
    out, half = np.zeros((2, 1), np.float32), np.array([0.5])
    values = {"kept": kept, "width": 3, "rows": rows, "multiplier": half, "out": out, "nothing": None}
    tape = Tape()
    tape.add(KindStage(_sums, kind), words_of(NAMES, values), 2)
    with Team(1) as team:
        team.run(tape)
    assert out.tolist() == [[0.5 * (12 + 13 + 14)], [0.5 * (0 + 1 + 2)]]


def test_missing_and_unknown_stage_arguments_are_refused() -> None:
    with pytest.raises(AssertionError, match="wants"):
        words_of(("a", "b"), {"a": 1})
    with pytest.raises(AssertionError, match="wants"):
        words_of(("a",), {"a": 1, "b": 2})
