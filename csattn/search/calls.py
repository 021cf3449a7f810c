"""The functions of a search's stages, compiled when the first search needs them, and where they are.

`work` calls them by address. Compiled into one kernel they would be optimised again in every function that calls
another: that takes three times as long.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types

from csattn.jit import c_function
from csattn.search import choose, score, sketch_stages

Stage = Callable[[int, int, int, int], int]  # addresses of SEARCH and SCRATCH, job, piece -> 0: done

# of each stage, what does a piece and what ends it
SKETCH_STAGES: tuple[Stage, ...] = (
    sketch_stages.project_piece,
    sketch_stages.weigh_job,
    sketch_stages.score_piece,
    sketch_stages.guess_job,
    sketch_stages.copy_piece,
    choose.choose_job,
)
REST_STAGE: tuple[Stage, ...] = sketch_stages.attend_piece, sketch_stages.join_job  # follows those, if it is asked for
LIST_STAGES: tuple[Stage, ...] = (
    score.match_piece,
    score.weigh_job,
    score.score_piece,
    choose.guess_job,
    choose.copy_piece,
    choose.choose_job,
)
_KEPT: list[Any] = []  # so that the code is not freed


@cache
def compiled_address(stage: Stage) -> int:
    """Where the compiled function is; it stays there."""
    compiled = c_function(stage, types.int64(types.int64, types.int64, types.int64, types.int64))
    _KEPT.append(compiled)
    return int(compiled.address)
