"""The functions of a search's stages, compiled when the first search needs them.

`work` calls them by address. Compiled into one kernel, they would be optimised again in every function that calls
another, which takes three times as long.
"""

from csattn.cpu.addresses import Stage
from csattn.search import choose, score, sketch_stages

# For each stage, the function of a piece and the one that ends the stage. Arguments: addresses of SEARCH and SCRATCH,
# job, piece. Returns 0: done; from the latter, 1: run all pieces again.
SKETCH_STAGES: tuple[Stage, ...] = (
    sketch_stages.project_piece,
    sketch_stages.quantise_job,
    sketch_stages.score_piece,
    sketch_stages.guess_job,
    sketch_stages.copy_piece,
    choose.choose_job,
)
REST_STAGE: tuple[Stage, ...] = sketch_stages.attend_piece, sketch_stages.join_job  # after those, if the rest is wanted
LIST_STAGES: tuple[Stage, ...] = (
    score.match_piece,
    score.number_lists_job,
    score.score_piece,
    choose.guess_job,
    choose.copy_piece,
    choose.choose_job,
)
