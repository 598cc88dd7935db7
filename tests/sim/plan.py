"""A plan: everything that is decided about a run before it starts, as data.

Owns the form of plans, how they are drawn from a profile and a seed, and the table of profiles. A plan can be
shown, shrunk (`tests.sim.campaign.shrinking`) and run (`tests.sim.simulation`). The same plan and seed give
the same run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.sim.cluster.loop import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


@dataclass(frozen=True)
class Fault:
    """One fault: what, to whom, from when, for how long. Times in seconds."""

    at: float
    kind: str
    target: str
    other: str = ""
    lasts: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        other = f" {self.other}" if self.other else ""
        return f"{self.at:.3f} s {self.kind} {self.target}{other} for {self.lasts:.2f} s ({self.amount:.2f})"


@dataclass(frozen=True)
class Actor:
    """One client process: its role (a name in `tests.sim.workloads.ledger`) and what it is to do."""

    name: str
    role: str
    starts_at: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One run."""

    profile: str
    seed: int
    bookies: tuple[str, ...]
    actors: tuple[Actor, ...]
    faults: tuple[Fault, ...]
    duration: float
    order: Order
    segment_bytes: int
    dishonest: str
    """The one bookie whose medium may lie; see the fault budget in `tests.sim.cluster.hardware`."""
    directories: int = 1
    """How many data directories a bookie has. Each may be full by itself."""
    power_cut_at_end: bool = True
    client_settings: dict[str, Any] = field(default_factory=dict)
    setup: str = ""
    """Name of a further step in `tests.sim.workloads.ledger.SETUPS`, run before the actors start."""
    head_rows_bytes: int = 0
    """How much of a paged list its head holds, so that a short run comes to pages; 0: as shipped."""

    @property
    def command(self) -> str:
        """Return the one command that runs this again."""
        return f"python -m tests.sim --profile {self.profile} --seed {self.seed} --shrink"

    def without(self, faults: Collection[int] = (), actors: Collection[str] = ()) -> Plan:
        """Return the plan without some faults (by their number) and actors (by name)."""
        return replace(
            self,
            faults=tuple(fault for number, fault in enumerate(self.faults) if number not in faults),
            actors=tuple(actor for actor in self.actors if actor.name not in actors),
        )


_WAITS = ("gap", "rest", "pause")
"""Settings of actors that say for how long they do nothing, in seconds."""
_PACES = (1.0, 2.0, 4.0, 8.0)
"""How much longer all of a seed's actors wait than their profile says; drawn by the seed."""


class Draw:
    """Draws a plan: a source of randomness with the vocabulary of plans.

    A profile is a function that takes one of these and returns `draw.plan(...)`.

    How much happens between two faults is drawn as well as which faults there are: a crowded history shows
    what needs many calls at once, a sparse one what a crowd would hide (the next call mends it), for a third
    of the processor time. `pace` sets it, for seeds that failed before it was drawn.
    """

    def __init__(self, profile: str, seed: int, *, pace: float | None = None) -> None:
        self.profile = profile
        self.seed = seed
        # From a source of its own: all else of the plan is the same at every pace.
        self._pace = random.Random(f"{profile}/{seed}/pace").choice(_PACES) if pace is None else pace
        self.rng = random.Random(f"{profile}/{seed}/plan")
        self.duration = self.rng.uniform(8.0, 14.0)
        self.bookies = tuple(f"b{number}" for number in range(1, self.rng.choice((4, 4, 5)) + 1))
        self.dishonest = self.rng.choice(self.bookies)
        self._actors: list[Actor] = []
        self._faults: list[Fault] = []
        # Swarm testing: a run that has all faults at once hides what a few of them alone would show.
        self._swarm: dict[str, bool] = {}

    # --- actors --------------------------------------------------------------------------------

    def quorums(self, *, ack_at_least: int = 1) -> dict[str, Any]:
        """Draw E, Qw and Qa, and the rare options of a ledger."""
        sizes = self.rng.choice(
            [
                (3, 3, 2),
                (3, 3, 2),
                (3, 3, 2),
                (3, 2, 2),
                (3, 2, 1),
                (4, 3, 2),
                (2, 2, 1),
                (3, 3, 1),
                (3, 3, 3),
            ]
        )
        if sizes[2] < ack_at_least:
            sizes = (3, 3, 2)
        return {
            "ensemble_size": sizes[0],
            "write_quorum": sizes[1],
            "ack_quorum": sizes[2],
            "guaranteed_write_quorum": self.rng.random() < 0.15,
        }

    def actor(self, role: str, starts_at: float, **settings: Any) -> str:
        """Add a client process; gives its name."""
        name = f"c{len(self._actors) + 1}"
        settings |= {key: settings[key] * self._pace for key in _WAITS if key in settings}
        self._actors.append(Actor(name, role, starts_at, settings))
        return name

    def starts(self, name: str, at: float) -> None:
        """Have an actor start at another time than the one that was drawn."""
        self._actors = [replace(one, starts_at=at) if one.name == name else one for one in self._actors]

    def writer(self, *, ack_at_least: int = 1, **settings: Any) -> str:
        """Add a writer of ledgers, one after another."""
        rng = self.rng
        drawn: dict[str, Any] = {
            "quorums": self.quorums(ack_at_least=ack_at_least),
            "entries": rng.choice((3, 8, 20, 40)),
            "burst": rng.choice((1, 1, 3, 8)),
            "gap": rng.choice((0.05, 0.2, 0.4)),
            "rest": rng.choice((0.2, 0.6, 1.2)),
            "bytes": rng.choice((20, 200, 1200)),
            "closes": rng.random() < 0.6,
        }
        return self.actor("writer", rng.uniform(0.0, 0.5), **{**drawn, **settings})

    def crowd(self, *, recoverers: int = 1, ack_at_least: int = 1) -> None:
        """Add the usual clients: one or two writers, one who tails, one who reads, and recoverers."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2))):
            self.writer(ack_at_least=ack_at_least)
        self.actor("tailer", rng.uniform(0.5, 2.0))
        if rng.random() < 0.5:
            self.actor("reader", rng.uniform(0.5, 3.0))
        for _ in range(recoverers):
            self.actor("recoverer", rng.uniform(1.0, self.duration * 0.9))

    @property
    def clients(self) -> list[str]:
        """Return the names of the clients so far."""
        return [actor.name for actor in self._actors]

    # --- faults --------------------------------------------------------------------------------

    def allows(self, kind: str) -> bool:
        """Return whether this seed has that kind of fault switched on (swarm testing)."""
        if kind not in self._swarm:
            self._swarm[kind] = self.rng.random() < 0.5
        return self._swarm[kind]

    def fault(self, kind: str, target: str, *, at: float | None = None, **more: Any) -> None:
        """Add a fault, at any time of the run unless one is given."""
        if at is None:
            at = self.rng.uniform(0.3, self.duration)
        self._faults.append(Fault(at=at, kind=kind, target=target, **more))

    def some(
        self, kind: str, targets: list[str], count: int, *, lasts: tuple[float, float] = (0.2, 3.0)
    ) -> None:
        """Add up to `count` faults of a kind to any of the targets, if this seed has that kind."""
        if not targets or not self.allows(kind):
            return
        for _ in range(self.rng.randint(1, count)):
            pair = kind.startswith(("link", "block", "cut"))
            target = self.rng.choice(targets)
            self.fault(
                kind,
                target,
                other=self.rng.choice(self.bookies) if pair else "",
                lasts=self.rng.uniform(*lasts),
                amount=self.rng.random(),
            )

    def lose_two_of_three(self) -> None:
        """Take two of three bookies away for a while, again and again, beside some other faults."""
        rng = self.rng
        self.duration, at = 14.0, 1.5
        while at < self.duration - 2:
            kind = rng.choice(("kill_bookie", "power_cut", "pause"))
            for name in rng.sample(self.bookies, 2):
                self.fault(
                    kind, name, at=at + rng.choice((0.0, 0.001, 0.05, 0.3)) * rng.random(),
                    lasts=rng.uniform(0.6, 2.0), amount=rng.random(),
                )  # fmt: skip
            at += rng.uniform(2.5, 5.0)
        for each in ("meta_lossy", "meta_slow", "meta_cut"):
            self.some(each, self.clients, 2, lasts=(0.2, 1.5))
        self.some("pause", self.clients, 2)
        self.some("block_both", self.clients, 2)

    def plan(self, **more: Any) -> Plan:
        """Return the plan drawn so far."""
        return Plan(
            **{
                "profile": self.profile,
                "seed": self.seed,
                "bookies": self.bookies,
                "actors": tuple(self._actors),
                "faults": tuple(sorted(self._faults, key=lambda fault: fault.at)),
                "duration": self.duration,
                "dishonest": self.dishonest,
                "order": self.rng.choice((Order.FIFO, Order.FIFO, Order.SHUFFLE, Order.PCT)),
                "segment_bytes": self.rng.choice((24, 32, 64, 128)) * 1024,
                "directories": self.rng.choice((1, 1, 2)),
                **more,
            }
        )


PROFILES: dict[str, Callable[[Draw], Plan]] = {}
"""The table of profiles; importing `tests.sim.profiles` fills it."""


def profile(function: Callable[[Draw], Plan]) -> Callable[[Draw], Plan]:
    """Enter a function into the table of profiles, under its name with hyphens."""
    PROFILES[function.__name__.replace("_", "-")] = function
    return function
