"""Profiles over logs: writers that fight for one, that die between any two steps, and readers that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.sim.plan import profile
from tests.sim.workloads import log, log_owners

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (
    log.log_writer,
    log.log_streamer,
    log.log_follower,
    log.log_sweeper,
    log.log_adder,
    log_owners.shared_adder,
)


def _writer(draw: Draw, **settings: Any) -> str:
    rng = draw.rng
    drawn: dict[str, Any] = {
        "quorums": {**draw.quorums(), "guaranteed_write_quorum": False},
        "roll_entries": rng.choice((2, 5, 20)),
        "bursts": rng.choice((3, 10, 30)),
        "burst": rng.choice((1, 3, 8)),
        "gap": rng.choice((0.0, 0.02, 0.1)),
        "pause": rng.choice((0.2, 1.0, 2.0)),
        "rolls": rng.choice((0.0, 0.1, 0.4)),
        "truncates": 0.0,
    }
    return draw.actor("log_writer", rng.uniform(0.0, 1.0), **{**drawn, **settings})


@profile
def duelling_logs(draw: Draw) -> Plan:
    """Several writers fight for one log; links break, processes pause; a reader follows."""
    for _ in range(draw.rng.choice((2, 2, 3))):
        _writer(draw)
    draw.actor("log_follower", draw.rng.uniform(0.2, 2.0))
    draw.some("pause", draw.clients, 5, lasts=(0.2, 3.0))
    draw.some("kill_client", draw.clients[:-1], 2)
    for kind in ("block_both", "block_one_way", "link_slow", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    for kind in ("meta_lossy", "meta_slow", "meta_lag", "meta_cut"):
        draw.some(kind, draw.clients, 3)
    return draw.plan()


@profile
def log_crashes(draw: Draw) -> Plan:
    """Writers die between two steps of opening, rolling and truncating, and others take over."""
    at = 0.3
    while at < draw.duration - 1:
        # Each lives for a moment; what it has begun is left to the next.
        name = _writer(
            draw, roll_entries=2, bursts=30, gap=0.02, pause=0.0, rolls=0.4,
            truncates=draw.rng.choice((0.0, 0.3)),
        )  # fmt: skip
        draw._actors[-1] = replace(draw._actors[-1], starts_at=at)
        life = draw.rng.uniform(0.05, 1.2)
        draw.fault("kill_client", name, at=at + life)
        at += life * draw.rng.uniform(0.3, 1.3)
    draw.actor("log_follower", draw.rng.uniform(0.2, 2.0))
    draw.some("meta_lossy", draw.clients, 4)
    draw.some("meta_slow", draw.clients, 4)
    draw.some("power_cut", list(draw.bookies), 2)
    return draw.plan()


@profile
def swept_logs(draw: Draw) -> Plan:
    """A sweeper and truncations run beside writers that roll often, with a slow and lossy metadata store."""
    for _ in range(draw.rng.choice((1, 2))):
        _writer(draw, roll_entries=2, rolls=0.5, truncates=0.2)
    for _ in range(draw.rng.choice((1, 1, 2))):
        draw.actor("log_sweeper", draw.rng.uniform(0.2, 1.0))
    draw.actor("log_follower", draw.rng.uniform(0.2, 2.0))
    for kind in ("meta_slow", "meta_lossy", "meta_lag"):
        draw.some(kind, draw.clients, 6)
    draw.some("pause", draw.clients, 3)
    draw.some("kill_client", draw.clients[:-1], 1)
    return draw.plan()


@profile
def added_logs(draw: Draw) -> Plan:
    """Ledgers are added by transactions, whose answers are lost, beside writers."""
    _writer(draw, pause=1.0)
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor(
            "log_adder", draw.rng.uniform(0.2, 2.0), batches=4,
            quorums={"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2},
        )  # fmt: skip
    draw.actor("log_follower", draw.rng.uniform(0.2, 2.0))
    draw.some("meta_lossy", draw.clients, 8)
    draw.some("meta_slow", draw.clients, 4)
    draw.some("kill_bookie", list(draw.bookies), 2)
    return draw.plan()


@profile
def healing_logs(draw: Draw) -> Plan:
    """Two of three bookies are away for a while, again and again, under writers with much in flight."""
    rng = draw.rng
    draw.bookies = ("b1", "b2", "b3")
    for _ in range(rng.choice((1, 1, 2))):
        draw.actor(
            "log_streamer",
            0.0,
            quorums={"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2},
            roll_entries=rng.choice((5, 20, 1000)),
            burst=rng.choice((1, 3, 10)),
            step_s=rng.choice((0.03, 0.1)),
            append_timeout_s=rng.choice((60.0, 60.0, 1.5)),
        )
    draw.actor("log_follower", rng.uniform(0.2, 2.0))
    draw.lose_two_of_three()
    return draw.plan(client_settings={"add_timeout_s": 0.5})


@profile
def scarce_logs(draw: Draw) -> Plan:
    """Writers take a log over from one another, and roll, without a spare bookie."""
    rng = draw.rng
    draw.bookies, draw.dishonest = draw.bookies[:3], "b1"
    quorums = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
    writers = [_writer(draw, quorums=quorums, roll_entries=3) for _ in range(rng.choice((2, 3)))]
    draw.actor("log_follower", rng.uniform(0.2, 2.0))
    at = 0.2
    while at < draw.duration:
        lasts = rng.uniform(0.5, 4.0)
        kind = rng.choice(("kill_bookie", "kill_bookie", "power_cut", "pause"))
        draw.fault(kind, rng.choice(draw.bookies), at=at, lasts=lasts, amount=rng.random())
        at += lasts * rng.uniform(0.8, 1.5)
    draw.some("kill_client", writers[1:], 2)
    for kind in ("block_one_way", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()


@profile
def owned_ledgers(draw: Draw) -> Plan:
    """Two logs want the same ledgers; clocks are days apart; ledgers are freed, swept, and deleted."""
    rng = draw.rng
    # With one copy of each entry, a bookie that is away keeps a ledger from being read.
    sizes = rng.choice(((3, 3, 2), (1, 1, 1)))
    quorums = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))

    def add(role: str, **settings: Any) -> None:
        skew_s = rng.choice((0.0, log_owners.DAYS_S, -log_owners.DAYS_S))
        drawn: dict[str, Any] = {"rest": rng.choice((0.1, 0.3)), "skew_s": skew_s, "quorums": quorums}
        draw.actor(role, rng.uniform(0.1, 1.0), **{**drawn, **settings})

    for _ in range(rng.choice((2, 3))):
        add("shared_adder")
    for _ in range(rng.choice((1, 2))):
        add("owner_sweeper")
    add("young_maker")
    if rng.random() < 0.7:
        add("owner_deleter", rest=0.5)
    add("gap_reader")
    for kind in ("meta_lossy", "meta_lag"):
        draw.some(kind, draw.clients, 5)
    draw.some("meta_slow", draw.clients[:3], 8, lasts=(0.5, 4.0))
    draw.some("pause", draw.clients, 3)
    draw.some("kill_client", draw.clients[:2], 1)
    draw.some("kill_bookie", list(draw.bookies), 4)
    return draw.plan()
