"""Profiles over bounded ledgers that use everything the handles offer, in all their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.checkers.handles import CALM_S
from tests.sim.plan import profile
from tests.sim.workloads import ledger_full_api

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (
    ledger_full_api.versatile_writer, ledger_full_api.versatile_reader, ledger_full_api.inspector,
    ledger_full_api.caretaker,
)  # fmt: skip
"""What these profiles are played by."""
_LINKS = ("block_both", "block_one_way", "cut_reset", "cut_clean", "link_slow")
_META = ("meta_cut", "meta_lossy", "meta_slow", "meta_lag", "meta_expire")
_CLOSES = ("close", "close twice", "close at once", "close behind adds", "close beside adds")


def _writer(draw: Draw, *, ack_at_least: int = 1, **settings: Any) -> str:
    rng = draw.rng
    drawn: dict[str, Any] = {
        "quorums": draw.quorums(ack_at_least=ack_at_least),
        "steps": rng.choice((5, 15, 40)),
        "burst": rng.choice((1, 3, 8)),
        "gap": rng.choice((0.02, 0.1, 0.3)),
        "rest": rng.choice((0.1, 0.5)),
        "bytes": rng.choice((20, 200, 1200)),
        "reads": 2,
        "interrupts": rng.choice((0.0, 0.15, 0.4)),
        "advanced": rng.choice((0.0, 0.3)),
        "deferred": rng.choice((0.0, 0.3)),
        "ends": (),
        "closes_client": 0.04,
    }
    return draw.actor("versatile_writer", rng.uniform(0.0, 0.5), **{**drawn, **settings})


def _reader(draw: Draw, **settings: float) -> str:
    drawn = {"interrupts": 0.4, "recovers": 0.02, "closes_client": 0.02}
    return draw.actor("versatile_reader", draw.rng.uniform(0.3, 1.5), **{**drawn, **settings})


def _plan(draw: Draw, **more: Any) -> Plan:
    """Return the plan, with limits that are met: writers that must wait, and entries that are too large."""
    in_flight = draw.rng.choice((1_000, 4_000, 100_000))
    settings = {"max_in_flight_bytes": in_flight, "entry_bytes_max": 10_000}
    return draw.plan(client_settings=settings, **more)


@profile
def all_uses(draw: Draw) -> Plan:
    """Writers, readers and inspectors that make every call there is, under any faults."""
    media = draw.allows("media")
    writers = [_writer(draw, ack_at_least=2 if media else 1) for _ in range(draw.rng.choice((1, 1, 2)))]
    for _ in range(draw.rng.choice((1, 2))):
        _reader(draw)
    draw.actor("inspector", draw.rng.uniform(0.3, 1.0))
    draw.actor("tailer", draw.rng.uniform(0.5, 2.0))
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration * 0.9))
    for kind in ("kill_bookie", "power_cut", "disk_slow", "disk_full", "disk_write_error", "disk_sync_error"):
        draw.some(kind, list(draw.bookies), 2)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 3)
    for kind in (*_META, "pause", "clock_jump"):
        draw.some(kind, [*draw.bookies, *draw.clients], 2)
    draw.some("kill_client", writers, 1)
    if media:
        for kind in ("disk_bit_flip", "disk_lost_write", "disk_misdirected_write"):
            draw.some(kind, list(draw.bookies), 2)
    return _plan(draw)


@profile
def forced_entries(draw: Draw) -> Plan:
    """Deferred sync: what a force covers outlives power cuts that take what was only received."""
    for _ in range(draw.rng.choice((1, 1, 2))):
        _writer(draw, deferred=1.0, closes_client=0.0)
    _reader(draw)
    if draw.rng.random() < 0.5:
        draw.actor("tailer", draw.rng.uniform(0.5, 2.0))
    for _ in range(draw.rng.choice((0, 1, 2))):
        draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration * 0.9), times=3)
    for _ in range(draw.rng.randint(2, 5)):
        draw.fault("power_cut_many", "", lasts=draw.rng.uniform(0.05, 1.5), amount=draw.rng.uniform(0.3, 1.0))
    for kind in ("disk_slow", "kill_bookie", "disk_full"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 3)
    draw.some("meta_lossy", draw.clients, 2)
    return _plan(draw)


@profile
def own_reads(draw: Draw) -> Plan:
    """Writers read what they write while repairs replace bookies beneath them, and ledgers are deleted."""
    for _ in range(draw.rng.choice((1, 1, 2))):
        _writer(draw, reads=10, steps=draw.rng.choice((20, 40)), interrupts=0.1, closes_client=0.0)
    _reader(draw)
    draw.actor("inspector", draw.rng.uniform(0.3, 1.0))
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor("repairer", draw.rng.uniform(0.3, 1.0))
    if draw.rng.random() < 0.5:
        draw.actor("deleter", draw.rng.uniform(1.0, 3.0))
    if draw.rng.random() < 0.5:
        draw.actor("caretaker", draw.rng.uniform(0.3, 1.0), deletes=draw.rng.choice((0.0, 0.1)))
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in ("block_both", "block_one_way", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    for kind in ("meta_lossy", "meta_lag"):
        draw.some(kind, draw.clients, 2)
    return _plan(draw)


@profile
def racing_closers(draw: Draw) -> Plan:
    """Writers close their ledgers, twice and at once, while others recover, repair and delete them."""
    writers = [
        _writer(draw, steps=draw.rng.choice((2, 5)), rest=0.05, ends=_CLOSES * 2)
        for _ in range(draw.rng.choice((1, 2)))
    ]
    for _ in range(draw.rng.choice((1, 2, 3))):
        draw.actor("recoverer", draw.rng.uniform(0.3, 1.0), times=20, tries=3, gap=0.5)
    if draw.rng.random() < 0.3:
        draw.actor("repairer", draw.rng.uniform(0.3, 1.0))
    if draw.rng.random() < 0.3:
        draw.actor("deleter", draw.rng.uniform(0.5, 2.0))
    _reader(draw, recovers=0.3)
    for kind in ("meta_lossy", "meta_slow", "meta_cut", "meta_lag"):
        draw.some(kind, draw.clients, 4)
    for kind in ("block_both", "link_slow", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    for kind in ("kill_bookie", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("pause", writers, 3, lasts=(0.2, 2.0))
    return _plan(draw)


@profile
def cut_short(draw: Draw) -> Plan:
    """Most calls are cancelled in their middle, behind slow links and disks; their handles go on."""
    for _ in range(draw.rng.choice((1, 2))):
        _writer(draw, interrupts=0.6, steps=40, ends=("close, interrupted",) * 8, closes_client=0.1)
    for _ in range(draw.rng.choice((1, 2))):
        _reader(draw, interrupts=0.8, recovers=0.1, closes_client=0.1)
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration * 0.9), times=4)
    draw.actor("caretaker", draw.rng.uniform(0.3, 1.0), deletes=0.1)
    for _ in range(draw.rng.randint(1, 6)):
        draw.fault(
            "link_slow", draw.rng.choice(draw.clients), other=draw.rng.choice(draw.bookies),
            lasts=draw.rng.uniform(0.5, 5.0), amount=draw.rng.random(),
        )  # fmt: skip
    for kind in ("disk_slow", "kill_bookie", "power_cut", "pause"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in ("cut_reset", "block_both", "meta_slow", "meta_lossy"):
        draw.some(kind, draw.clients, 3)
    return _plan(draw)


@profile
def calm_after_storm(draw: Draw) -> Plan:
    """Faults of all kinds, and then none for long: what lived through them works again, and nothing hangs."""
    for _ in range(draw.rng.choice((1, 1, 2))):
        _writer(
            draw, steps=draw.rng.choice((5, 15)), rest=draw.rng.choice((0.5, 2.0)), closes_client=0.0,
            deferred=draw.rng.choice((0.0, 0.5)),
        )  # fmt: skip
    _reader(draw, closes_client=0.0, recovers=0.0)
    draw.actor("tailer", draw.rng.uniform(0.5, 2.0))
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration * 0.9))
    if draw.rng.random() < 0.3:
        draw.actor("repairer", draw.rng.uniform(0.3, 1.0))
    for kind in ("kill_bookie", "power_cut", "disk_slow", "disk_full", "disk_write_error", "disk_sync_error"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 4)
    for kind in (*_META, "pause", "clock_jump"):
        draw.some(kind, [*draw.bookies, *draw.clients], 3)
    return _plan(draw, duration=draw.duration + CALM_S, setup="calm")
