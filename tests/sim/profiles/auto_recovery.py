"""Profiles over auto recovery: auditors and workers beside everything that changes ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING

# For their tables of roles, setups and checks.
import tests.sim.checkers.auto_recovery
import tests.sim.workloads.auto_recovery  # noqa: F401
from tests.sim.plan import profile

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

_FIVE = ("b1", "b2", "b3", "b4", "b5")


def _recoverers(draw: Draw) -> list[str]:
    """Add two or three processes that run auto recovery."""
    return [
        draw.actor("auto_recoverer", draw.rng.uniform(0.1, 1.0), lives=draw.rng.choice((0.0, 0.0, 2.0, 4.0)))
        for _ in range(draw.rng.choice((2, 3)))
    ]


@profile
def auto_recovery(draw: Draw) -> Plan:
    """Bookies go, for good or for a while; ledgers are written, recovered and deleted meanwhile."""
    draw.bookies, draw.dishonest = _FIVE, draw.rng.choice(_FIVE)
    rng = draw.rng
    recoverers = _recoverers(draw)
    draw.crowd(ack_at_least=2)
    if rng.random() < 0.5:
        draw.actor("deleter", rng.uniform(0.5, 3.0))
    if rng.random() < 0.7:
        draw.fault("disk_wiped", draw.dishonest, at=rng.uniform(1.0, draw.duration * 0.6))
    for _ in range(rng.randint(0, 3)):
        # Longer than the delay, or shorter.
        at, lasts = rng.uniform(0.5, draw.duration * 0.8), rng.choice((0.2, 0.6, 1.5, 4.0))
        draw.fault(rng.choice(("kill_bookie", "power_cut")), rng.choice(_FIVE), at=at, lasts=lasts)
    for _ in range(rng.randint(0, 2)):
        draw.fault("kill_client", rng.choice(recoverers), at=rng.uniform(2.0, draw.duration))
    for kind in ("disk_slow", "kill_bookie", "power_cut"):
        draw.some(kind, list(draw.bookies), 2)
    if draw.allows("blinding"):
        for kind in ("meta_lossy", "meta_lag", "meta_cut", "meta_expire", "pause"):
            draw.some(kind, [*recoverers, *recoverers, *draw.clients, *draw.bookies], 3)
        for kind in ("block_both", "block_one_way"):
            draw.some(kind, draw.clients, 2)
    draw.some("cut_reset", draw.clients, 3)
    # Answers that hold a few entries only, so that a copy takes several.
    settings = {"read_ahead_bytes": rng.choice((600, 1500, 1 << 20))}
    return draw.plan(setup="auto_recovery", client_settings=settings)


@profile
def rolling_absences(draw: Draw) -> Plan:
    """One bookie after another is away for a moment: nobody loses a seat, and every copy comes back."""
    draw.bookies, draw.dishonest = _FIVE, "b1"
    rng = draw.rng
    _recoverers(draw)
    draw.crowd(ack_at_least=2)
    at = 0.8
    while at < draw.duration:
        for bookie in _FIVE:
            kind = rng.choice(("kill_bookie", "power_cut", "pause"))
            draw.fault(kind, bookie, at=at, lasts=rng.uniform(0.02, 0.3))
            at += rng.uniform(0.3, 1.0)
    return draw.plan(setup="auto_recovery", power_cut_at_end=rng.random() < 0.5)


@profile
def abandoned_ledgers(draw: Draw) -> Plan:
    """Writers and recoverers die, and bookies go for good: auto recovery ends the ledgers that are left."""
    draw.bookies, draw.dishonest = _FIVE, draw.rng.choice(_FIVE)
    rng = draw.rng
    after_s = rng.choice((0.5, 1.0, 2.0))
    for _ in range(2):
        draw.actor("auto_recoverer", rng.uniform(0.1, 1.0), recover_after_s=after_s)
    draw.crowd(recoverers=2, ack_at_least=2)
    writers = [actor for actor in draw.clients if actor not in draw.clients[:2]]
    for _ in range(rng.randint(1, 3)):
        draw.fault("kill_client", rng.choice(writers), at=rng.uniform(1.0, draw.duration * 0.7))
    if rng.random() < 0.5:
        draw.fault("disk_wiped", draw.dishonest, at=rng.uniform(1.0, draw.duration * 0.5))
    for _ in range(rng.randint(1, 3)):
        at, lasts = rng.uniform(0.5, draw.duration * 0.6), rng.choice((0.6, 4.0, draw.duration))
        draw.fault(rng.choice(("kill_bookie", "power_cut")), rng.choice(_FIVE), at=at, lasts=lasts)
    if draw.allows("blinding"):
        for kind in ("meta_lossy", "meta_lag", "meta_cut", "pause"):
            draw.some(kind, [*draw.clients, *draw.bookies], 3)
        draw.some("block_both", draw.clients, 2)
    draw.some("cut_reset", draw.clients, 3)
    return draw.plan(setup="auto_recovery")


@profile
def repaired_by_hand(draw: Draw) -> Plan:
    """One or two operators repair the whole cluster, some beside auto recovery; bookies go meanwhile."""
    draw.bookies, draw.dishonest = _FIVE, draw.rng.choice(_FIVE)
    rng = draw.rng
    operators = [
        draw.actor("operator", rng.uniform(0.3, 1.5), rest=rng.choice((0.3, 1.0, 2.0)))
        for _ in range(rng.choice((1, 2)))
    ]
    if rng.random() < 0.6:
        draw.actor("auto_recoverer", rng.uniform(0.1, 1.0))
    draw.crowd(ack_at_least=2)
    if rng.random() < 0.5:
        draw.actor("deleter", rng.uniform(0.5, 3.0))
    if rng.random() < 0.7:
        draw.fault("disk_wiped", draw.dishonest, at=rng.uniform(1.0, draw.duration * 0.6))
    for _ in range(rng.randint(1, 4)):
        at, lasts = rng.uniform(0.5, draw.duration * 0.8), rng.choice((0.2, 0.6, 1.5, 4.0))
        draw.fault(rng.choice(("kill_bookie", "power_cut")), rng.choice(_FIVE), at=at, lasts=lasts)
    for _ in range(rng.randint(0, 2)):
        draw.fault("kill_client", rng.choice(operators), at=rng.uniform(2.0, draw.duration))
    if draw.allows("blinding"):
        for kind in ("meta_lossy", "meta_lag", "meta_cut", "meta_expire", "pause"):
            draw.some(kind, [*operators, *operators, *draw.clients, *draw.bookies], 3)
    draw.some("cut_reset", draw.clients, 3)
    settings = {"read_ahead_bytes": rng.choice((600, 1500, 1 << 20))}
    return draw.plan(setup="auto_recovery", client_settings=settings)


@profile
def leaving_bookie(draw: Draw) -> Plan:
    """A bookie leaves beside writers, recoveries and repairs; its drain is killed, and begun again."""
    draw.bookies, draw.dishonest = _FIVE, "b1"
    rng = draw.rng
    recoverers = _recoverers(draw) if rng.random() < 0.5 else []
    draw.crowd(recoverers=rng.choice((1, 2)), ack_at_least=rng.choice((1, 2)))
    if rng.random() < 0.4:
        draw.actor("repairer", rng.uniform(0.5, 2.0))
    if rng.random() < 0.3:
        draw.actor("deleter", rng.uniform(0.5, 3.0))
    leaver, successor = rng.sample(_FIVE, 2)
    settings = {
        "bookie": leaver,
        "successor": rng.choice(("", "", successor)),
        "recover_after_s": rng.choice((None, 0.5, 1.0)),
    }
    drainers = [
        draw.actor("drainer", rng.uniform(0.5, draw.duration * 0.5), **settings)
        for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    for name in drainers[:-1]:
        draw.fault("kill_client", name, at=rng.uniform(1.0, draw.duration * 0.8))
    for kind in ("kill_bookie", "power_cut", "pause"):
        draw.some(kind, [leaver, leaver, *draw.bookies], 2)
    if draw.allows("blinding"):
        for kind in ("meta_lossy", "meta_lag", "meta_cut", "meta_expire", "pause"):
            draw.some(kind, [leaver, leaver, *drainers, *recoverers, *draw.clients, *draw.bookies], 3)
        draw.some("block_both", draw.clients, 2)
    draw.some("cut_reset", draw.clients, 3)
    settings = {"read_ahead_bytes": rng.choice((600, 1500, 1 << 20))}
    return draw.plan(setup="auto_recovery", client_settings=settings)
