"""Profiles: from a seed to a plan.

A profile decides which clients there are, how they are set, and which faults meet them. Each module has the
profiles over the workloads of its name; importing this package enters all of them into the table. Read first:
`tests.sim.plan` (the form of a plan, and the table), then `ledger`. docs/SIMULATION.md says how to add one.
"""

from tests.sim.plan import PROFILES, Draw, Plan
from tests.sim.profiles import (
    accepted_losses,
    auto_recovery,
    crowd,
    ledger,
    ledger_full_api,
    log,
    log_full_api,
    lost_data,
    prompt,
    refusals,
    set_back,
    terms,
    unbounded,
    volume,
)

__all__ = [
    "accepted_losses",
    "all_profiles",
    "auto_recovery",
    "crowd",
    "draw_plan",
    "ledger",
    "ledger_full_api",
    "log",
    "log_full_api",
    "lost_data",
    "prompt",
    "refusals",
    "set_back",
    "terms",
    "unbounded",
    "volume",
]


def all_profiles() -> list[str]:
    """Return the names of all profiles, in order."""
    return sorted(PROFILES)


def draw_plan(name: str, seed: int, *, pace: float | None = None) -> Plan:
    """Draw the plan of a seed; `pace` as in `Draw`."""
    return PROFILES[name](Draw(name, seed, pace=pace))
