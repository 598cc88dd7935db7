"""A pytest plugin that plants one bug before anything is collected: for those that no simulation runs."""

from __future__ import annotations

import os

from tests.sim.mutants.__main__ import everything

# No name of ours (BOOKIE_AIO_): the commands that a test starts refuse variables that are no settings.
_number = int(os.environ["PLANTED_MUTANT"])
next(mutant for mutant in everything() if mutant.number == _number).plant()
