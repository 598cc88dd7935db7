"""Profiles over an unbounded ledger: holders of terms that fight, die in the middle, roll and trim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.plan import profile
from tests.sim.workloads import unbounded

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (unbounded.term_holder, unbounded.term_streamer, unbounded.term_follower)
"""What these profiles are played by."""
_LINKS = ("block_both", "block_one_way", "cut_reset", "link_slow")


def _holders(draw: Draw, count: int, **settings: Any) -> list[str]:
    rng = draw.rng
    sizes = rng.choice(((3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (3, 3, 1)))
    drawn: dict[str, Any] = {
        "quorums": dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True)),
        "fragment_bytes": rng.choice((400, 2000, 100_000)),
        "bursts": rng.choice((3, 10, 30)),
        "burst": rng.choice((1, 3, 8)),
        "gap": rng.choice((0.02, 0.1)),
        "rest": rng.choice((0.2, 1.0, 2.0)),
        "trims": 0.0,
    }
    return [draw.actor("term_holder", rng.uniform(0.0, 1.5), **{**drawn, **settings}) for _ in range(count)]


@profile
def duelling_holders(draw: Draw) -> Plan:
    """Several take one unbounded ledger from one another all the time, behind bad links."""
    holders = _holders(draw, draw.rng.choice((2, 3, 5)))
    draw.actor("term_follower", 0.5)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 4)
    draw.some("pause", holders, 4, lasts=(0.3, 2.0))
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 3)
    draw.some("kill_client", holders[1:], 1)
    for kind in ("meta_lossy", "meta_lag", "meta_slow"):
        draw.some(kind, draw.clients, 3)
    return draw.plan()


@profile
def healing_terms(draw: Draw) -> Plan:
    """Two of three bookies are away for a while, again and again, under writers with much in flight."""
    rng = draw.rng
    draw.bookies = ("b1", "b2", "b3")
    for _ in range(rng.choice((1, 1, 2))):
        draw.actor(
            "term_streamer",
            0.0,
            quorums={"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2},
            fragment_bytes=rng.choice((100, 1000, 1_000_000)),
            burst=rng.choice((1, 3, 10)),
            bulks=rng.choice((0.0, 0.2)),
            step_s=rng.choice((0.03, 0.1)),
            append_timeout_s=rng.choice((60.0, 60.0, 1.5)),
        )
    draw.actor("term_follower", rng.uniform(0.2, 2.0))
    draw.lose_two_of_three()
    return draw.plan(client_settings={"add_timeout_s": 0.5})


@profile
def dirty_entries(draw: Draw) -> Plan:
    """Holders write through partial partitions: entries stay on single bookies, which leave and come back."""
    holders = _holders(draw, 3, burst=draw.rng.choice((1, 2)), bursts=10, rest=0.5)
    for _ in range(2):
        draw.actor("term_follower", 0.5)
    for _ in range(draw.rng.randint(6, 14)):
        draw.fault(
            draw.rng.choice(("block_one_way", "block_both", "isolate")),
            draw.rng.choice(holders),
            other=draw.rng.choice(draw.bookies),
            lasts=draw.rng.uniform(0.2, 2.5),
            amount=draw.rng.random(),
        )
    draw.some("power_cut", list(draw.bookies), 2)
    draw.some("meta_lag", draw.clients, 3)
    return draw.plan()


@profile
def partial_takeovers(draw: Draw) -> Plan:
    """Takeovers die in the middle, and the answers of the metadata store get lost."""
    holders = _holders(draw, 4, bursts=3, rest=0.3)
    draw.actor("term_follower", 0.5)
    for holder in holders[1:]:
        draw.fault("kill_client", holder, at=draw.rng.uniform(0.5, draw.duration))
    for _ in range(draw.rng.randint(2, 6)):
        draw.fault(
            "meta_lossy", draw.rng.choice(holders), lasts=draw.rng.uniform(0.3, 1.5), amount=draw.rng.random()
        )
    for kind in ("kill_bookie", "disk_slow", "power_cut"):
        draw.some(kind, list(draw.bookies), 4)
    draw.some("block_both", draw.clients, 4)
    return draw.plan()


@profile
def trimming_terms(draw: Draw) -> Plan:
    """Small fragments are rolled and trimmed all the time, under one holder after another."""
    holders = _holders(draw, 2, fragment_bytes=300, trims=0.2, bursts=30, rest=0.5)
    draw.actor("term_follower", 0.5)
    for kind in ("kill_bookie", "power_cut"):
        draw.some(kind, list(draw.bookies), 4)
    for kind in ("meta_lossy", "meta_slow"):
        draw.some(kind, draw.clients, 3)
    draw.some("block_both", draw.clients, 3)
    draw.some("kill_client", holders[1:], 1)
    return draw.plan(segment_bytes=24 * 1024)


@profile
def stale_followers(draw: Draw) -> Plan:
    """Followers hear late of what the metadata store says, while holders leave entries on single bookies."""
    sizes = draw.rng.choice(((3, 3, 2), (4, 2, 2), (4, 3, 2), (3, 2, 2)))
    quorums = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))
    holders = _holders(
        draw, 2, burst=2, bursts=4, gap=0.05, rest=0.3, quorums=quorums, fragment_bytes=100_000
    )
    followers = [draw.actor("term_follower", 0.3) for _ in range(3)]
    for follower in followers:
        draw.fault("meta_slow", follower, at=0.2, lasts=60.0, amount=1.0)
    for _ in range(draw.rng.randint(8, 18)):
        draw.fault(
            "block_one_way",
            draw.rng.choice(holders),
            other=draw.rng.choice(draw.bookies),
            lasts=draw.rng.uniform(0.1, 1.5),
            amount=draw.rng.random() * 0.5,
        )
    return draw.plan()


@profile
def scarce_holders(draw: Draw) -> Plan:
    """Takeovers, rolls and trims without a spare bookie, while bookies are down for long."""
    rng = draw.rng
    draw.bookies, draw.dishonest = draw.bookies[:3], "b1"
    sizes = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": rng.choice((2, 2, 1))}
    holders = _holders(draw, rng.choice((2, 3)), quorums=sizes, fragment_bytes=400, trims=0.2, rest=0.5)
    draw.actor("term_follower", 0.5)
    at = 0.2
    while at < draw.duration:
        lasts = rng.uniform(0.5, 4.0)
        kind = rng.choice(("kill_bookie", "kill_bookie", "power_cut", "pause"))
        draw.fault(kind, rng.choice(draw.bookies), at=at, lasts=lasts, amount=rng.random())
        at += lasts * rng.uniform(0.5, 1.2)
    draw.some("kill_client", holders[1:], 1)
    for kind in ("block_one_way", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()
