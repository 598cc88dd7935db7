"""A pytest plugin that plants one bug before anything is collected: for those that no simulation runs."""

from __future__ import annotations

import os

from tests.sim.mutants.__main__ import everything

_number = int(os.environ["BOOKIE_AIO_MUTANT"])
next(mutant for mutant in everything() if mutant.number == _number).plant()
