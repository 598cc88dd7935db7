"""Seeds that once failed: each found a bug in this project's own code, and stays here."""

from __future__ import annotations

import pytest

from tests.sim.crashstates import record
from tests.sim.quiet import quiet


@pytest.mark.parametrize("seed", [25, 30])
def test_a_bookie_that_compacts_can_be_closed(seed: int) -> None:
    """Closing waited for a compaction, whose copies waited for a segment that came and was not taken."""
    with quiet():
        assert record(seed)  # or it raises that nobody will ever close the engine
