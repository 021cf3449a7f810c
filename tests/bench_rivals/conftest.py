"""What tests of the rivals share."""

import pytest

from csattn.cpu.team import Team


@pytest.fixture(scope="module")
def team():
    with Team(2) as team:
        yield team
