"""How long steps take, by their number of rows."""

REMEMBERED = 256  # steps, at least
_TRUSTED = 2  # times of a number of rows: one alone may have been a compilation's
_LEAST_S = 1e-9  # a clock may not have moved
_ROW_SHARE = 0.1  # of a step of one row: what a further row is taken to cost until two numbers of rows are known


class StepTimes:
    """The shortest of the last steps' times, by number of rows; slower ones may be due to other load."""

    def __init__(self) -> None:
        self._times: dict[int, list[float]] = {}  # by rows: the shortest times of the last (up to) REMEMBERED steps
        self._before: dict[int, list[float]] = {}  # of the REMEMBERED steps before those
        self._trusted: dict[int, float] = {}  # by rows: the shortest of both, if there are enough
        self._num_steps = 0

    def count_step(self) -> None:
        """Count a step, of whatever kind: times of long ago are forgotten."""
        if self._num_steps % REMEMBERED == 0:
            self._times, self._before = {}, self._times
            self._trusted = {}
            for num_rows in self._before:
                self._trust(num_rows)
        self._num_steps += 1

    def add(self, num_rows: int, seconds: float) -> None:
        """Record a step's time."""
        self._times[num_rows] = sorted([*self._times.get(num_rows, ()), max(seconds, _LEAST_S)])[:_TRUSTED]
        self._trust(num_rows)

    def shortest(self, num_rows: int) -> float | None:
        """Return the shortest time of steps with so many rows; None if there was none."""
        known = self._known(num_rows)
        return known[0] if known else None

    def shortest_of_at_least(self, num_rows: int) -> float | None:
        """Return the shortest time of steps with so many rows or more; None if there was none."""
        most = max(self._times.keys() | self._before.keys(), default=0)
        return min(filter(None, map(self.shortest, range(num_rows, most + 1))), default=None)

    def estimate(self, num_rows: int) -> float:
        """Return the time of a step with so many rows: the shortest, or a guess from other numbers of rows."""
        trusted = self._trusted  # kept up to date, because a step asks many times
        if num_rows in trusted:
            return trusted[num_rows]
        fewer, more = [rows for rows in trusted if rows < num_rows], [rows for rows in trusted if rows > num_rows]
        if not fewer:
            return trusted[min(more)] if more else 1 + _ROW_SHARE * (num_rows - 1)
        below = max(fewer)
        if more:
            slope = (trusted[min(more)] - trusted[below]) / (min(more) - below)
        elif below > min(fewer):
            slope = (trusted[below] - trusted[min(fewer)]) / (below - min(fewer))
        else:
            slope = _ROW_SHARE * trusted[below] / (1 + _ROW_SHARE * (below - 1))
        return trusted[below] + max(0.0, slope) * (num_rows - below)

    def _trust(self, num_rows: int) -> None:
        if len(known := self._known(num_rows)) >= _TRUSTED:
            self._trusted[num_rows] = known[0]

    def _known(self, num_rows: int) -> list[float]:
        return sorted([*self._times.get(num_rows, ()), *self._before.get(num_rows, ())])
