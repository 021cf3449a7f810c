"""How the searches of a layer are shared out among workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Some rows and index heads of one search."""

    first_row: int
    num_rows: int
    first_head: int
    num_heads: int


def shares_of(worker: int, num_workers: int, num_rows: int, num_heads: int) -> list[Share]:
    """What one worker searches: whole heads, the same ones at every step, and rows of heads that it shares.

    All workers together search every row for every head once; none searches more than one row and head above average.
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
