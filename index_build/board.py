"""How far prefill is. In a file of its own: the process that keeps it needs neither torch nor transformers."""


class Board:
    """An actor that keeps where each job's prefill is until it is asked for."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, int]] = {}

    def put(self, job_idx: int, layer_idx: int, num_rows: int) -> None:
        self._latest[job_idx] = (layer_idx, num_rows)

    def take(self) -> dict[int, tuple[int, int]]:
        latest, self._latest = self._latest, {}
        return latest
