"""Upkeep: what bookies do unasked, so often that a run of ten seconds sees it.

Owns how often a seed's bookies scrub, look for ledgers to evict, and raise the id floor, and the check of
evictions. As shipped, the first scrubbing comes after a day, the first eviction and raise after an hour.

- ForgottenIsKeptByOthers: a bookie evicts a ledger only when it is CLOSED and names the bookie nowhere.

A bookie may evict soon only where nobody repairs. The grace period has to outlast the time from a repair's
last request to its target until the metadata name the target. Requests to the metadata store are repeated and
arrive up to 5 s late, and repairers pause for 3 s. So that time may be longer than the run. Without repairs
no CLOSED ledger ever comes to name another bookie. Then no grace is too short, whatever the clocks do.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

from bookie_aio.server.bookie import Bookie
from bookie_aio.storage.maintenance.scrubber import ScrubConfig
from metadata.ids import ledger_key
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.storage.engine import Engine
    from tests.sim.simulation import Simulation

REPAIRING = ("repairer", "healer", "caretaker", "auto_recoverer")
"""Roles that repair bounded ledgers. Of unbounded ones, nothing is ever forgotten."""


class Upkeep:
    """What a run's bookies do unasked, drawn by its seed from a source of its own."""

    def __init__(self, simulation: Simulation) -> None:
        plan = simulation.plan
        rng = random.Random(f"{plan.profile}/{plan.seed}/upkeep")
        scrubs, forgets = rng.random() < 0.5, rng.random() < 0.34
        interval_s, grace_s = rng.uniform(1.0, 4.0), rng.uniform(0.3, 3.0)
        self.scrub = ScrubConfig(interval_s=interval_s) if scrubs else ScrubConfig()
        self.sweep_interval_s, self.unnamed_grace_s = 4.0, 3600.0
        roles = {actor.role for actor in plan.actors}
        if forgets and roles and roles.isdisjoint(REPAIRING):  # what scripts do, none of them says
            self.sweep_interval_s, self.unnamed_grace_s = 1.0, grace_s
        # Drawn last: all else is as it was for seeds of before.
        self.floor_after_s = rng.uniform(0.5, 3.0) if rng.random() < 0.5 else 3600.0
        if self.floor_after_s < 10.0:
            self.sweep_interval_s = min(self.sweep_interval_s, 1.0)
        if any(fault.kind in ("metadata_set_back", "both_set_back") for fault in plan.faults):
            # So soon that it has passed the ids of before the copy when the run ends.
            self.floor_after_s, self.sweep_interval_s = min(self.floor_after_s, 0.4), 0.3
        self.bookie = _followed(simulation, self.floor_after_s)


def _followed(simulation: Simulation, floor_after_s: float) -> type[Bookie]:
    """Return the class of bookies, followed from the moment that they have an engine."""

    class FollowedBookie(Bookie):
        async def _open(self, *arguments: Any) -> None:
            await super()._open(*arguments)
            assert self._engine is not None
            assert self._ledger_gc is not None
            self._ledger_gc.floor_after_s = floor_after_s
            followed = _FollowedEngine(self._engine)
            followed.append_tombstone = _folding(simulation, self.bookie_id, self._engine)
            followed.append_forget = _forgetting(simulation, self.bookie_id, self._engine)
            self._ledger_gc._engine = cast("Engine", followed)
            _follow_scrubbing(simulation, self._engine)
            _follow_lifts(simulation, self.bookie_id, self._engine)

    return FollowedBookie


class _FollowedEngine:
    """The engine as the garbage collector sees it: a compiled engine lets nobody replace its own methods."""

    append_tombstone: Callable[..., None]
    append_forget: Callable[..., None]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _forgetting(simulation: Simulation, name: str, engine: Engine) -> Callable[..., None]:
    history, tree, forget = simulation.history, simulation.tree, engine.append_forget

    def append_forget(ledger_id: int, done: Any) -> None:
        node = tree.find(ledger_key(ledger_id))
        if node is not None and node.value is not None:
            metadata = LedgerMetadata.from_json(node.value)
            is_named = any(name in fragment.bookies for fragment in metadata.fragments)
            history.require(
                metadata.is_closed and not is_named,
                "ForgottenIsKeptByOthers",
                lambda: f"{name} forgets ledger {ledger_id}, which is {metadata}",
            )
        forget(ledger_id, done)
        history.note(name, "forgets ledger", ledger_id)
        history.words.forget(name, ledger_id)
        simulation.stats["ledger_forgotten"] += 1

    return append_forget


def _folding(simulation: Simulation, name: str, engine: Engine) -> Callable[..., None]:
    stats, history, tombstone = simulation.stats, simulation.history, engine.append_tombstone

    def append_tombstone(ledger_id: int, done: Any, *, last: int = -1) -> None:
        for one in [one for one in history.ledgers if ledger_id <= one <= max(ledger_id, last)]:
            history.words.drops(name, one)
        tombstone(ledger_id, done, last=last)
        if last >= ledger_id:
            stats["ids_folded"] += last + 1 - ledger_id

    return append_tombstone


def _follow_lifts(simulation: Simulation, name: str, engine: Engine) -> None:
    words, marking = simulation.history.words, engine.marking
    lift, end_all = marking.lift, marking.end_all

    def lift_one(ledger_id: int, number: int, term: int, done: Any) -> None:
        words.ends_doubt(name, ledger_id)
        lift(ledger_id, number, term, done)

    def end_marks(number: int, done: Any) -> None:
        words.ends_doubt(name, None)
        end_all(number, done)

    vars(marking).update(lift=lift_one, end_all=end_marks)


def _follow_scrubbing(simulation: Simulation, engine: Engine) -> None:
    scrubber, stats = engine._scrubber, simulation.stats
    real = scrubber.scrub

    async def scrub() -> None:
        known = scrubber.damaged
        await real()
        stats["scrubbed"] += 1
        if scrubber.damaged > known:
            stats["scrubbed_damage"] += scrubber.damaged - known

    vars(scrubber)["scrub"] = scrub
