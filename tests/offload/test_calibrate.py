"""The faster way is chosen, for a stated reason."""

import pytest
import torch

from offload.calibrate import Calibration, calibrate, choose
from offload.pinned import PinnedRows


@pytest.mark.parametrize(
    ("direct_gbps", "staged_gbps", "chosen", "reason"),
    [
        (None, 1.0, "staged", "cannot read the context's rows (no memory)"),
        (50.0, 40.0, "direct", "as fast or faster"),
        (50.0, 54.9, "direct", "as fast or faster"),
        (10.0, 20.0, "staged", "2.00 times as fast"),
    ],
)
def test_the_faster_way_is_chosen(direct_gbps: float | None, staged_gbps: float, chosen: str, reason: str) -> None:
    got, why = choose(direct_gbps, staged_gbps, "no memory")
    assert got == chosen and reason in why


def test_a_calibration_reads_as_a_sentence() -> None:
    calibration = Calibration(55.4, None, 31.2, "staged", "it has to be")
    assert str(calibration) == "staged: it has to be (link 55.4 GB/s, direct not possible, staged 31.2 GB/s)"


@pytest.mark.gpu
def test_both_ways_are_measured() -> None:
    rows = PinnedRows(list(torch.zeros(2, 8, 20_000, 2, 64)))
    calibration = calibrate(rows, 1000, torch.device("cuda"))
    rows.close()
    print(calibration)
    assert calibration.link_gbps > 0 and calibration.staged_gbps > 0
    assert calibration.direct_gbps is not None and calibration.direct_gbps > 0
    unpinned = calibrate(rows, 50_000, torch.device("cuda"))
    assert unpinned.chosen == "staged"
