"""Profiles over unbounded ledgers that use the whole API: fenced, sealed, remade, and repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.checkers import unbounded_after_healing
from tests.sim.plan import profile
from tests.sim.workloads import terms, terms_readers

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

PLAYED_BY = (terms, terms_readers, unbounded_after_healing)
"""What these profiles are played and checked by."""
QUIET_S = 32.0
"""Without faults, but for those that last: longer than any call may take."""
_LINKS = ("block_both", "block_one_way", "cut_reset", "link_slow")
_META = ("meta_lossy", "meta_lag", "meta_slow", "meta_cut")


def _quorums(draw: Draw) -> dict[str, int]:
    sizes = draw.rng.choice(((3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (3, 3, 1)))
    return dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))


def _holders(draw: Draw, count: int, **settings: Any) -> list[str]:
    rng = draw.rng
    drawn: dict[str, Any] = {
        "quorums": _quorums(draw),
        "fragment_bytes": rng.choice((400, 2000, 100_000)),
        "steps": rng.choice((3, 10, 30)),
        "burst": rng.choice((1, 3, 8)),
        "gap": rng.choice((0.02, 0.1)),
        "rest": rng.choice((0.1, 0.5, 1.5)),
        "trims": rng.choice((0.0, 0.5, 1.0)),
        "pokes": 0.3,
        "creates": 1.0,
        "seals": 0.0,
        "seals_after": draw.duration * 0.75,
        "until": draw.duration,
        "password": rng.choice((b"", b"", b"", b"secret")),
    }
    return [
        draw.actor("versatile_holder", rng.uniform(0.0, 1.5), **{**drawn, **settings}) for _ in range(count)
    ]


def _followers(draw: Draw, count: int) -> None:
    for _ in range(count):
        draw.actor("versatile_follower", draw.rng.uniform(0.2, 1.5), rest=0.5, until=draw.duration)


def _faults(draw: Draw, count: int) -> None:
    clients, bookies = draw.clients, list(draw.bookies)
    for kind in _LINKS:
        draw.some(kind, clients, count)
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, bookies, count)
    for kind in _META:
        draw.some(kind, [*clients, *clients, *bookies], count)
    draw.some("pause", clients, count, lasts=(0.3, 2.0))


def _room(draw: Draw) -> dict[str, Any]:
    """Draw how little a head holds and how little may be in flight."""
    rng = draw.rng
    in_flight = rng.choice((0, 0, 1500))
    return {
        "head_rows_bytes": rng.choice((0, 300)),
        "client_settings": {"max_in_flight_bytes": in_flight} if in_flight else {},
    }


def _ending(draw: Draw, *, deletes: bool) -> dict[str, Any]:
    """Have some runs end with the end of all ledgers, and a time of quiet in which all calls must end."""
    if draw.rng.random() < 0.5:
        return {}
    draw.actor("finisher", draw.duration + 4.0, deletes=deletes)
    return {"duration": draw.duration + QUIET_S}


@profile
def versatile_terms(draw: Draw) -> Plan:
    """Holders use all that there is, now and then seal in the end, and readers do so too."""
    holders = _holders(draw, draw.rng.choice((1, 2, 3)), seals=draw.rng.choice((0.0, 0.3)))
    _followers(draw, 2)
    _faults(draw, 3)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(**_room(draw))


@profile
def displaced_holders(draw: Draw) -> Plan:
    """Holders that were displaced call everything once more; then faults stop, and every call must end."""
    holders = _holders(draw, 3, pokes=1.0, steps=draw.rng.choice((2, 5)), rest=0.3, gap=0.03, closes=True)
    _followers(draw, 1)
    for _ in range(draw.rng.randint(3, 8)):
        draw.fault(
            draw.rng.choice(("block_one_way", "block_both", "isolate", "pause")),
            draw.rng.choice(holders),
            other=draw.rng.choice(draw.bookies),
            lasts=draw.rng.uniform(0.2, 2.0),
            amount=draw.rng.random(),
        )
    _faults(draw, 2)
    return draw.plan(duration=draw.duration + QUIET_S, **_room(draw))


@profile
def sealed_terms(draw: Draw) -> Plan:
    """Ledgers are sealed by holders who may be displaced by then, while answers of the store get lost."""
    _holders(
        draw, draw.rng.choice((2, 3)), seals=0.6, seals_after=draw.rng.uniform(0.5, 6.0), pokes=0.5, steps=5,
        rest=0.3,
    )  # fmt: skip
    _followers(draw, 3)
    if draw.rng.random() < 0.6:
        draw.actor("remaker", 2.0, quorums=_quorums(draw), rest=3.0, until=draw.duration)
    for _ in range(draw.rng.randint(1, 5)):
        draw.fault(
            "meta_lossy", draw.rng.choice(draw.clients), lasts=draw.rng.uniform(0.3, 1.5),
            amount=draw.rng.random(),
        )  # fmt: skip
    _faults(draw, 2)
    return draw.plan(**_ending(draw, deletes=False), **_room(draw))


@profile
def remade_ledgers(draw: Draw) -> Plan:
    """The ledger is deleted by its name and made anew, under the hands of who holds and reads it."""
    holders = _holders(draw, draw.rng.choice((2, 3)), creates=0.9, steps=8, rest=0.3, seals=0.2)
    _followers(draw, 2)
    for _ in range(draw.rng.choice((1, 1, 2))):
        draw.actor(
            "remaker", draw.rng.uniform(0.5, 2.0), quorums=_quorums(draw),
            rest=draw.rng.choice((0.5, 1.5, 3.0)), until=draw.duration,
        )  # fmt: skip
    _faults(draw, 3)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(**_ending(draw, deletes=True), **_room(draw))


@profile
def recovered_terms(draw: Draw) -> Plan:
    """Auditors and workers beside holders that take over from one another, roll and trim small fragments."""
    holders = _holders(draw, 2, fragment_bytes=300, steps=30, rest=0.3, trims=0.5, pokes=0.2)
    _followers(draw, 1)
    for _ in range(2):
        draw.actor("auto_recoverer", draw.rng.uniform(0.3, 1.0), of_unbounded=True)
    for _ in range(draw.rng.randint(1, 3)):
        # Longer than the delay, or shorter.
        at, lasts = draw.rng.uniform(0.5, draw.duration * 0.7), draw.rng.choice((0.5, 2.0, 5.0))
        draw.fault("kill_bookie", draw.rng.choice(draw.bookies), at=at, lasts=lasts)
    _faults(draw, 2)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(segment_bytes=24 * 1024, setup="auto_recovery", **_room(draw))


@profile
def leaving_holders_bookie(draw: Draw) -> Plan:
    """A bookie leaves beside holders that take over from one another, roll and trim small fragments."""
    draw.bookies = ("b1", "b2", "b3", "b4", "b5")
    draw.dishonest = "b1"
    holders = _holders(draw, 2, fragment_bytes=300, steps=30, rest=0.3, trims=0.5, pokes=0.2)
    _followers(draw, 1)
    if draw.rng.random() < 0.5:
        draw.actor("auto_recoverer", draw.rng.uniform(0.3, 1.0), of_unbounded=True)
    leaver, successor = draw.rng.sample(draw.bookies, 2)
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor(
            "drainer", draw.rng.uniform(0.5, 4.0), bookie=leaver, successor=draw.rng.choice(("", successor)),
            recover_after_s=draw.rng.choice((None, 1.0)), of_unbounded=True,
        )  # fmt: skip
    _faults(draw, 2)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(segment_bytes=24 * 1024, setup="auto_recovery", **_room(draw))


@profile
def mended_terms(draw: Draw) -> Plan:
    """Repairs run beside holders, also displaced ones, that roll and trim small fragments."""
    holders = _holders(draw, 2, fragment_bytes=300, steps=30, rest=0.3, trims=0.3, pokes=0.2)
    _followers(draw, 1)
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor("mender", draw.rng.uniform(0.5, 2.0), rest=0.8, until=draw.duration)
    _faults(draw, 3)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(segment_bytes=24 * 1024, **_room(draw))
