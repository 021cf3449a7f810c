"""Divides the searches of a layer among workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Some rows and index heads of one search."""

    first_row: int
    num_rows: int
    first_head: int
    num_heads: int


def shares_of(worker: int, num_workers: int, num_rows: int, num_heads: int) -> list[Share]:
    """Return what one worker searches: whole heads, the same at every step, and some rows of heads shared with others.

    Together, the workers search every (row, head) once. None searches more than one above the average.
    """
    num_jobs = num_rows * num_heads  # job h * num_rows + r is row r of head h
    job, end = num_jobs * worker // num_workers, num_jobs * (worker + 1) // num_workers
    shares = []
    while job < end:
        head, row = divmod(job, num_rows)
        whole_heads = (end - job) // num_rows if row == 0 else 0
        if whole_heads:
            shares.append(Share(0, num_rows, head, whole_heads))
            job += whole_heads * num_rows
        else:
            rows = min(end - job, num_rows - row)
            shares.append(Share(row, rows, head, 1))
            job += rows
    return shares
