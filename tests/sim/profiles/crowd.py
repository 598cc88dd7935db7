"""Profiles of clients with many ledgers: their adds share frames, and bookies refuse some of them.

A bookie judges each block of an ADDS by itself. So these profiles bring ledgers of one client into different
states: fenced, deleted, damaged, locked, or at a bookie that takes no adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.plan import profile
from tests.sim.workloads import crowd

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (crowd.juggler,)
"""What these profiles are played by."""


def _juggler(draw: Draw, *, ack_at_least: int = 1, **settings: Any) -> str:
    rng = draw.rng
    drawn: dict[str, Any] = {
        "quorums": [draw.quorums(ack_at_least=ack_at_least) for _ in range(3)],
        "ledgers": rng.choice((4, 8, 16)),
        "at_once": rng.choice((3, 8, 16)),
        "gap": rng.choice((0.05, 0.1, 0.2)),
        "bytes": rng.choice((20, 20, 200)),
        "retires": rng.choice((0.0, 0.02, 0.05)),
        "deferred": rng.choice((0.0, 0.3)),
        "secret": rng.choice((0.0, 0.3)),
    }
    return draw.actor("juggler", rng.uniform(0.0, 0.5), **{**drawn, **settings})


def _readers(draw: Draw) -> None:
    draw.actor("tailer", draw.rng.uniform(0.5, 2.0))
    if draw.rng.random() < 0.5:
        draw.actor("reader", draw.rng.uniform(0.5, 3.0))


@profile
def many_ledgers(draw: Draw) -> Plan:
    """Many ledgers of a client, and a bit of every fault."""
    writers = [_juggler(draw) for _ in range(draw.rng.choice((1, 1, 2)))]
    _readers(draw)
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration * 0.8), times=4, gap=1.0)
    for kind in ("kill_bookie", "power_cut", "disk_slow", "disk_full", "shut_down"):
        draw.some(kind, list(draw.bookies), 2)
    for kind in ("block_both", "block_one_way", "cut_reset", "link_slow"):
        draw.some(kind, draw.clients, 2)
    for kind in ("meta_lossy", "pause", "meta_cut"):
        draw.some(kind, [*draw.bookies, *draw.clients], 2)
    draw.some("kill_client", writers, 1)
    return draw.plan(power_cut_at_end=draw.rng.random() < 0.3)


@profile
def fenced_among_many(draw: Draw) -> Plan:
    """Some ledgers of a client are recovered or deleted; the others go on in the same frames."""
    rng = draw.rng
    writer = _juggler(draw, gap=rng.choice((0.02, 0.05)), retires=0.0, ledgers=rng.choice((8, 16)))
    _readers(draw)
    for _ in range(rng.choice((1, 2, 3))):
        draw.actor("recoverer", rng.uniform(0.7, 3.0), of=writer, times=8, gap=1.0)
    if rng.random() < 0.7:
        draw.actor("deleter", rng.uniform(1.0, 3.0))
    for kind in ("block_both", "block_one_way", "cut_reset"):
        draw.some(kind, draw.clients, 2)
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    return draw.plan()


@profile
def damaged_among_many(draw: Draw) -> Plan:
    """One bookie loses data of some ledgers of a client, and takes no more adds to those."""
    rng = draw.rng
    _juggler(draw, ack_at_least=2, retires=0.02, gap=rng.choice((0.02, 0.1)))
    _readers(draw)
    draw.actor("recoverer", rng.uniform(1.0, draw.duration * 0.8), times=4)
    if rng.random() < 0.5:
        draw.actor("healer", rng.uniform(2.0, 4.0))
    victim = draw.dishonest
    for _ in range(rng.randint(1, 3)):
        at = rng.uniform(1.0, draw.duration)
        kind = rng.choice(("disk_bit_flip", "disk_lost_write", "disk_misdirected_write"))
        draw.fault(kind, victim, at=at, amount=rng.random())
        if rng.random() < 0.6:
            draw.fault("kill_bookie", victim, at=at + 0.3, lasts=rng.uniform(0.1, 0.5))
    for kind in ("disk_full", "shut_down", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("cut_reset", draw.clients, 2)
    return draw.plan(segment_bytes=rng.choice((24, 32)) * 1024)


@profile
def forced_among_many(draw: Draw) -> Plan:
    """Ledgers of deferred sync share frames with others, and power is lost on several hosts."""
    rng = draw.rng
    _juggler(draw, deferred=0.5, gap=rng.choice((0.02, 0.05)), retires=0.02)
    _readers(draw)
    for _ in range(rng.choice((0, 1, 2))):
        draw.actor("recoverer", rng.uniform(1.0, draw.duration * 0.9), times=3)
    for _ in range(rng.randint(2, 4)):
        draw.fault("power_cut_many", "", lasts=rng.uniform(0.05, 1.5), amount=rng.uniform(0.3, 1.0))
    for kind in ("disk_slow", "kill_bookie", "disk_full"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("cut_reset", draw.clients, 3)
    return draw.plan()
