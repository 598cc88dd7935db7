"""Shrinking: a plan that fails is cut down to one that still fails and is easier to read.

Owns the search. A smaller plan still fails if the same invariant is broken. Liveness and Unexpected say
little, so there the same kind of error has to be met as well. The search tries fewer faults (halves first,
then one by one), fewer clients, and an earlier end. It stops when nothing helps any more or the budget of
runs is used up.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.sim.simulation import Result, run_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan


def shrink(plan: Plan, failed: Result, *, runs_max: int = 150) -> Result:
    """Return the run of the smallest plan found that fails as this one did."""
    best, name, wanted = plan, failed.name, _type_of(failed)
    runs = 0
    progress = True
    while progress and runs < runs_max:
        progress = False
        for smaller in _smaller(best):
            if runs >= runs_max:
                break
            runs += 1
            found = run_plan(smaller)
            if (found.name, _type_of(found)) == (name, wanted):
                best, progress = smaller, True
                break
    return run_plan(best, wants_story=True)


def _type_of(result: Result) -> str:
    """Return the type of the error that a result tells of, where its name says little; else nothing."""
    lines = result.text.splitlines() if result.name in ("Liveness", "Unexpected") else []
    for line in (*lines[:1], *lines[-1:]):  # what went wrong, or a traceback, which ends with it
        if found := re.search(r"\b\w+Error\b", line):
            return found.group()
    return ""


def _smaller(plan: Plan) -> Iterator[Plan]:
    faults, count = plan.faults, len(plan.faults)
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield replace(plan, faults=faults[:start] + faults[start + size :])
        size //= 2
    for actor in plan.actors:
        yield plan.without(actors=[actor.name])
    if plan.duration > 1.0:
        for part in (0.5, 0.75, 0.9):
            yield replace(plan, duration=plan.duration * part)
    if plan.power_cut_at_end:
        yield replace(plan, power_cut_at_end=False)


def describe(plan: Plan) -> str:
    """Tell a plan: clients and faults."""
    size = f"{len(plan.bookies)} bookies, {plan.duration:.1f} s"
    lines = [f"{plan.profile} seed {plan.seed}: {size}, order {plan.order.value}"]
    lines += [
        f"  {actor.name} {actor.role} from {actor.starts_at:.2f} s {actor.settings}" for actor in plan.actors
    ]
    lines += [f"  {fault}" for fault in plan.faults]
    return "\n".join(lines)
