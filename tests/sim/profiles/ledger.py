"""Profiles over bounded ledgers: which clients there are, and which faults meet them.

Uniform chaos hardly ever finds a bug of fencing or of recovery. So most profiles bring about the one
situation that a rule is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.plan import profile

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

_LINKS = ("block_both", "block_one_way", "cut_reset", "cut_clean", "link_slow")
_META = ("meta_cut", "meta_lossy", "meta_slow", "meta_lag", "meta_expire")
_FIVE = ("b1", "b2", "b3", "b4", "b5")
"""One more than any ensemble takes: where one never comes back, some ledgers could else never be closed."""


@profile
def chaos(draw: Draw) -> Plan:
    """A bit of everything, each seed another subset of it (swarm testing)."""
    media = draw.allows("media")
    draw.crowd(recoverers=draw.rng.choice((1, 1, 2)), ack_at_least=2 if media else 1)
    bookies, everybody = list(draw.bookies), [*draw.bookies, *draw.clients]
    for kind in ("kill_bookie", "power_cut", "disk_slow", "disk_full", "disk_write_error", "disk_sync_error"):
        draw.some(kind, bookies, 2)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 3)
    for kind in (*_META, "pause", "clock_jump"):
        draw.some(kind, everybody, 2)
    draw.some("kill_client", draw.clients, 1)
    if media:
        for kind in ("disk_bit_flip", "disk_lost_write", "disk_misdirected_write"):
            draw.some(kind, bookies, 2)
    return draw.plan()


@profile
def split_brain(draw: Draw) -> Plan:
    """The writer lives behind a partial partition while others take its ledger over."""
    writer = draw.writer(entries=40, gap=draw.rng.choice((0.02, 0.1)))
    draw.actor("tailer", 0.5)
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor("recoverer", draw.rng.uniform(0.7, 3.0), times=4, gap=2.0)
    for _ in range(draw.rng.randint(1, 4)):
        draw.fault(
            "isolate", writer, other=draw.rng.choice((*draw.bookies, "")),
            lasts=draw.rng.uniform(0.3, 3.0), amount=draw.rng.random(),
        )  # fmt: skip
    draw.some("pause", [writer], 2, lasts=(0.5, 4.0))
    draw.some("block_one_way", draw.clients, 3)
    draw.some("block_both", draw.clients, 3)
    draw.some("power_cut", list(draw.bookies), 2)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()


@profile
def rolling_restarts(draw: Draw) -> Plan:
    """The bookies are restarted one after another while clients work."""
    draw.crowd()
    at, has_power = 0.5, draw.rng.random() < 0.5
    while at < draw.duration:
        for bookie in draw.bookies:
            kind = "kill_bookie" if has_power else "power_cut"
            draw.fault(kind, bookie, at=at, lasts=draw.rng.uniform(0.05, 0.8))
            at += draw.rng.uniform(0.4, 1.5)
    draw.some("disk_slow", list(draw.bookies), 2)
    return draw.plan(power_cut_at_end=draw.rng.random() < 0.7)


@profile
def power_cuts(draw: Draw) -> Plan:
    """Several hosts lose power at one moment, with adds under way."""
    draw.crowd()
    for _ in range(draw.rng.randint(2, 4)):
        draw.fault("power_cut_many", "", lasts=draw.rng.uniform(0.05, 1.5), amount=draw.rng.uniform(0.3, 1.0))
    draw.some("kill_client", draw.clients, 1)
    draw.some("disk_slow", list(draw.bookies), 2)
    draw.some("cut_reset", draw.clients, 2)
    return draw.plan()


@profile
def short_answers(draw: Draw) -> Plan:
    """Recoveries ask again and again, since an answer holds few entries, and change ensembles meanwhile."""
    rng = draw.rng
    ensemble_size, write_quorum, ack_quorum = rng.choice(((3, 3, 3), (3, 3, 2), (3, 2, 2), (4, 3, 3)))
    quorums = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}
    for _ in range(2):
        draw.writer(entries=40, gap=0.05, burst=8, bytes=200, closes=False, quorums=quorums)
    for _ in range(3):
        draw.actor("recoverer", rng.uniform(0.5, 3.0), times=6, gap=1.0)
    for _ in range(rng.randint(3, 8)):
        at = rng.uniform(0.5, draw.duration)
        draw.fault("kill_bookie", rng.choice(draw.bookies), at=at, lasts=rng.uniform(0.05, 2.0))
    draw.some("kill_client", draw.clients, 2)
    draw.some("cut_reset", draw.clients, 3)
    draw.some("block_one_way", draw.clients, 3)
    draw.some("disk_slow", list(draw.bookies), 3)
    return draw.plan(client_settings={"read_ahead_bytes": rng.choice((200, 600, 1500))})


@profile
def slow_bookie(draw: Draw) -> Plan:
    """One or two bookies are slow: disks, links, or pauses."""
    draw.crowd()
    slow = draw.rng.sample(draw.bookies, draw.rng.choice((1, 1, 2)))
    for kind in ("disk_slow", "pause"):
        draw.some(kind, slow, 4, lasts=(0.5, 4.0))
    for _ in range(draw.rng.randint(1, 4)):
        draw.fault(
            "link_slow", draw.rng.choice(draw.clients), other=draw.rng.choice(slow),
            lasts=draw.rng.uniform(0.5, 5.0), amount=draw.rng.random(),
        )  # fmt: skip
    draw.some("kill_client", draw.clients, 1)
    draw.some("power_cut", slow, 1)
    return draw.plan()


@profile
def disk_faults(draw: Draw) -> Plan:
    """Disks fail, fill up, and lie, within the fault budget."""
    draw.crowd(ack_at_least=2)
    for kind in ("disk_bit_flip", "disk_lost_write", "disk_misdirected_write"):
        draw.some(kind, list(draw.bookies), 4)
    for _ in range(draw.rng.randint(0, 4)):
        # Early: it counts only once more was written behind it.
        at = draw.rng.uniform(0.3, draw.duration * 0.6)
        draw.fault("disk_misdirected_write", draw.dishonest, at=at)
    for _ in range(draw.rng.randint(0, 4)):
        # Damage to what a start replays, and a start.
        at = draw.rng.uniform(1.0, draw.duration)
        draw.fault("disk_bit_flip", draw.dishonest, at=at, amount=0.99)
        draw.fault("kill_bookie", draw.dishonest, at=at + 0.01, lasts=0.1)
    if draw.rng.random() < 0.15:
        draw.bookies = _FIVE
        draw.fault("disk_wiped", draw.dishonest)
    for kind in ("disk_write_error", "disk_sync_error", "disk_full", "kill_bookie", "power_cut"):
        draw.some(kind, list(draw.bookies), 3)
    return draw.plan()


@profile
def full_starts(draw: Draw) -> Plan:
    """Bookies start on full disks again and again, killed or cut off meanwhile, some with damage."""
    draw.crowd(ack_at_least=2)
    rng = draw.rng
    for _ in range(rng.randint(2, 4)):
        at, bookie = rng.uniform(0.8, draw.duration * 0.8), rng.choice(draw.bookies)
        if rng.random() < 0.5:
            bookie = draw.dishonest
            for _ in range(rng.randint(1, 3)):
                draw.fault("disk_bit_flip", bookie, at=at - 0.02, amount=0.99)
        amount = rng.uniform(0.4, 1.0)
        draw.fault("disk_full", bookie, at=at - 0.01, lasts=rng.uniform(0.5, 3.0), amount=amount)
        for _ in range(rng.randint(2, 5)):
            kind = rng.choice(("kill_bookie", "kill_bookie", "power_cut"))
            draw.fault(kind, bookie, at=at, lasts=0.05)
            at += 0.06 + rng.choice((0.01, 0.05, 0.3)) * rng.random()
    return draw.plan()


@profile
def first_starts(draw: Draw) -> Plan:
    """Bookies are killed again and again while they are formatted, and lose their power later."""
    draw.crowd(ack_at_least=2)
    rng = draw.rng
    for bookie in draw.bookies:
        at = rng.uniform(0.0, 0.25)
        for _ in range(rng.randint(1, 4)):
            kind = rng.choice(("kill_bookie", "kill_bookie", "power_cut"))
            draw.fault(kind, bookie, at=at, lasts=0.05)
            at += 0.06 + rng.choice((0.05, 0.3)) * rng.random()
    for _ in range(rng.randint(1, 3)):
        at = rng.uniform(1.0, draw.duration)
        draw.fault("power_cut_many", "", at=at, lasts=rng.uniform(0.05, 1.5), amount=rng.uniform(0.3, 1.0))
    return draw.plan()


@profile
def healed_disks(draw: Draw) -> Plan:
    """A bookie's disk loses data again and again, and its ledgers are repaired in its place meanwhile."""
    draw.crowd(recoverers=2, ack_at_least=2)
    rng, bookie = draw.rng, draw.dishonest
    for _ in range(2):
        draw.actor("healer", rng.uniform(0.5, 3.0))
    draw.actor("reader", rng.uniform(0.5, 3.0))
    for _ in range(rng.randint(1, 4)):
        # Damage to what a start replays, a start, and often another one amid the lifting.
        at = rng.uniform(0.8, draw.duration * 0.8)
        for _ in range(rng.randint(1, 3)):
            draw.fault("disk_bit_flip", bookie, at=at, amount=rng.choice((0.5, 0.99)))
        draw.fault("kill_bookie", bookie, at=at + 0.01, lasts=0.1)
        for _ in range(rng.randint(0, 3)):
            at += rng.uniform(0.2, 1.5)
            draw.fault(rng.choice(("kill_bookie", "power_cut")), bookie, at=at, lasts=0.05)
    for kind in ("disk_slow", "disk_full"):
        draw.some(kind, [bookie], 2)
    for kind in ("meta_lossy", "meta_lag", "meta_cut"):
        draw.some(kind, [*draw.bookies, *draw.clients], 2)
    draw.some("kill_client", draw.clients, 1)
    return draw.plan(segment_bytes=rng.choice((24, 64, 128)) * 1024)


@profile
def wiped_disks(draw: Draw) -> Plan:
    """A bookie's disk is gone for good while ledgers are written, recovered, repaired and deleted."""
    draw.bookies = _FIVE
    draw.crowd(ack_at_least=2)
    for role in ("repairer", "repairer", "recoverer", "reader", "deleter"):
        draw.actor(role, draw.rng.uniform(0.5, draw.duration * 0.8))
    draw.fault("disk_wiped", draw.dishonest)
    for kind in ("kill_bookie", "power_cut", "disk_slow", "disk_full", "disk_sync_error"):
        draw.some(kind, list(draw.bookies), 2)
    for kind in _LINKS:
        draw.some(kind, draw.clients, 2)
    for kind in _META:
        draw.some(kind, [*draw.bookies, *draw.clients], 1)
    draw.some("kill_client", draw.clients, 1)
    return draw.plan()


@profile
def read_errors(draw: Draw) -> Plan:
    """Disks fail to give what they hold, while it is read, replayed, compacted and recovered, and then do."""
    for _ in range(2):
        draw.writer(entries=24, gap=0.1, burst=8, bytes=1200)
    for role in ("tailer", "reader", "reader", "recoverer", "recoverer", "deleter", "repairer"):
        draw.actor(role, draw.rng.uniform(0.5, draw.duration * 0.8))
    for _ in range(draw.rng.randint(2, 8)):
        at, bookie = draw.rng.uniform(0.5, draw.duration), draw.rng.choice(draw.bookies)
        amount = draw.rng.choice((0.1, 0.5, 1.0))
        draw.fault("disk_read_errors", bookie, at=at, lasts=draw.rng.uniform(0.2, 4.0), amount=amount)
        if draw.rng.random() < 0.5:  # and a start meanwhile
            draw.fault(draw.rng.choice(("kill_bookie", "power_cut")), bookie, at=at + 0.1, lasts=0.1)
    draw.some("disk_slow", list(draw.bookies), 2)
    draw.some("disk_full", list(draw.bookies), 2)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32)) * 1024)


@profile
def metadata_faults(draw: Draw) -> Plan:
    """The metadata store answers late, or not, or with old values, and sessions end."""
    draw.crowd(recoverers=2)
    for kind in _META:
        draw.some(kind, [*draw.clients, *draw.clients, *draw.bookies], 5)
    draw.some("kill_bookie", list(draw.bookies), 3)
    draw.some("cut_reset", draw.clients, 3)
    draw.some("kill_client", draw.clients, 1)
    return draw.plan()


@profile
def duelling_recoverers(draw: Draw) -> Plan:
    """Several clients recover the same ledgers at once while their writer goes on."""
    draw.writer(entries=draw.rng.choice((8, 20)), gap=0.05, closes=draw.rng.random() < 0.3)
    draw.actor("tailer", 0.5)
    for _ in range(draw.rng.choice((2, 3))):
        draw.actor("recoverer", draw.rng.uniform(0.6, 1.5), times=6, gap=1.0)
    draw.some("kill_client", draw.clients[2:], 2)
    for kind in ("block_both", "block_one_way", "link_slow"):
        draw.some(kind, draw.clients, 4)
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()


@profile
def repair_in_parallel(draw: Draw) -> Plan:
    """Repairs run beside writers and recoveries."""
    draw.crowd()
    draw.actor("repairer", draw.rng.uniform(0.5, 2.0))
    if draw.rng.random() < 0.3:
        draw.actor("repairer", draw.rng.uniform(0.5, 2.0))
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in ("block_both", "block_one_way", "cut_reset"):
        draw.some(kind, draw.clients, 3)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()


@profile
def deletions(draw: Draw) -> Plan:
    """Ledgers are deleted under their writers' hands."""
    draw.crowd()
    draw.actor("deleter", draw.rng.uniform(0.5, 2.0))
    for kind in ("kill_bookie", "power_cut"):
        draw.some(kind, list(draw.bookies), 3)
    for kind in ("meta_lag", "meta_lossy", "meta_cut"):
        draw.some(kind, [*draw.clients, *draw.bookies], 3)
    draw.some("block_both", draw.clients, 3)
    return draw.plan()


@profile
def guaranteed_quorum(draw: Draw) -> Plan:
    """Ledgers with guaranteed write quorum: bookies are replaced while entries wait for their last copy."""
    sizes = draw.rng.choice(((3, 3, 2), (3, 3, 1), (4, 3, 2)))
    quorums = {
        "ensemble_size": sizes[0], "write_quorum": sizes[1], "ack_quorum": sizes[2],
        "guaranteed_write_quorum": True,
    }  # fmt: skip
    at_ack_quorum = draw.rng.choice((0.0, 0.0, 0.5))
    draw.writer(quorums=quorums, gap=0.05, at_ack_quorum=at_ack_quorum)
    draw.actor("tailer", 0.5)
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration), at_ack_quorum=at_ack_quorum)
    for kind in ("disk_slow", "kill_bookie", "power_cut", "pause"):
        draw.some(kind, list(draw.bookies), 4)
    for kind in ("block_both", "link_slow", "cut_reset"):
        draw.some(kind, draw.clients, 5)
    draw.some("kill_client", draw.clients[:1], 1)
    return draw.plan()


@profile
def fenced_restarts(draw: Draw) -> Plan:
    """Bookies lose power between the fence and the displaced writer's next adds, which come from a pause."""
    # No spare: the writer takes a bookie that comes back into its own seat, and changes no metadata.
    draw.bookies, draw.dishonest = draw.bookies[:3], "b1"
    quorums = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
    writer = draw.writer(entries=40, gap=0.05, rest=0.05, burst=3, bytes=600, quorums=quorums)
    for _ in range(2):
        draw.actor("recoverer", draw.rng.uniform(0.5, 1.5), times=8, gap=1.0)
    at = 0.8
    while at < draw.duration:
        hold = draw.rng.uniform(0.5, 1.5)
        if draw.rng.random() < 0.5:
            draw.fault("pause", writer, at=at, lasts=hold)
        else:
            draw.fault("isolate", writer, at=at, other="", lasts=hold, amount=0.0)
        draw.fault(
            "power_cut_many",
            "",
            at=at + hold * draw.rng.uniform(0.1, 0.9),
            lasts=0.05,
            amount=draw.rng.random(),
        )
        at += hold + draw.rng.uniform(0.2, 1.0)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32)) * 1024)


@profile
def resends(draw: Draw) -> Plan:
    """Connections break and bookies are slow: entries are sent again while a first copy is on its way."""
    draw.bookies, draw.dishonest = draw.bookies[:3], "b1"
    for _ in range(draw.rng.choice((1, 2))):
        draw.writer(entries=40, gap=0.02)
    draw.actor("recoverer", draw.rng.uniform(1.0, draw.duration), times=4)
    for _ in range(draw.rng.randint(4, 12)):
        draw.fault("cut_reset", draw.clients[0], other=draw.rng.choice(draw.bookies))
    for kind in ("disk_slow", "power_cut"):
        for _ in range(draw.rng.randint(1, 4)):
            draw.fault(
                kind,
                draw.rng.choice(draw.bookies),
                lasts=draw.rng.uniform(0.1, 1.5),
                amount=draw.rng.random(),
            )
    return draw.plan()


@profile
def recycling(draw: Draw) -> Plan:
    """Ledgers come and go, so that segments are given up and their files used again, and power fails."""
    for _ in range(2):
        draw.writer(entries=24, gap=0.15, burst=8, bytes=1200, closes=True)
    draw.actor("deleter", 1.0)
    draw.actor("deleter", 1.5)
    for kind in ("power_cut", "kill_bookie"):
        for _ in range(draw.rng.randint(1, 4)):
            draw.fault(
                kind,
                draw.rng.choice(draw.bookies),
                lasts=draw.rng.uniform(0.1, 1.0),
                amount=draw.rng.random(),
            )
    return draw.plan(segment_bytes=24 * 1024)


@profile
def late_adds(draw: Draw) -> Plan:
    """Every link has a slowness of its own, so that adds arrive while and after a ledger is recovered."""
    writer = draw.writer(entries=40, gap=0.05, burst=draw.rng.choice((1, 3)), bytes=20, closes=False)
    recoverers = [
        draw.actor("recoverer", draw.rng.uniform(0.5, 1.0), times=8, gap=1.0)
        for _ in range(draw.rng.choice((1, 2, 3)))
    ]
    for client in [writer, *recoverers]:
        for bookie in draw.bookies:
            if draw.rng.random() < 0.6:
                draw.fault("link_slow", client, other=bookie, at=0.1, lasts=60.0, amount=draw.rng.random())
    for _ in range(draw.rng.randint(0, 12)):  # answers that do not come
        draw.fault(
            "block_one_way", draw.rng.choice(draw.bookies), other=draw.rng.choice(recoverers),
            lasts=draw.rng.uniform(0.8, 2.5), amount=0.0,
        )  # fmt: skip
    draw.some("pause", [writer], 3, lasts=(0.5, 2.0))
    draw.some("kill_client", [writer], 1)
    return draw.plan()


@profile
def lost_changes(draw: Draw) -> Plan:
    """Ensembles change while some acknowledgements are late, and the store's answers to that are lost."""
    draw.bookies = draw.bookies[:4]
    draw.dishonest = "b1"
    sizes = draw.rng.choice(((3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 3, 1)))
    quorums = {"ensemble_size": sizes[0], "write_quorum": sizes[1], "ack_quorum": sizes[2]}
    writer = draw.writer(entries=40, gap=0.05, burst=2, quorums=quorums)
    draw.actor("recoverer", draw.rng.uniform(2.0, draw.duration), times=3)
    at = 0.5
    while at < draw.duration:
        gone = draw.rng.choice(draw.bookies)
        draw.fault("meta_lossy", writer, at=at, lasts=1.0, amount=1.0)
        for slow in draw.bookies:
            if slow != gone and draw.rng.random() < 0.8:
                draw.fault("disk_slow", slow, at=at, lasts=3.0, amount=draw.rng.uniform(0.2, 0.6))
        kind = draw.rng.choice(("kill_bookie", "power_cut", "cut_reset"))
        other = gone if kind == "cut_reset" else ""
        draw.fault(kind, writer if other else gone, other=other, at=at + 0.2, lasts=1.0, amount=0.9)
        at += draw.rng.uniform(1.5, 3.0)
    return draw.plan()


@profile
def refusals(draw: Draw) -> Plan:
    """Bookies run out of space while earlier adds are still on their way to a slow disk."""
    draw.writer(entries=40, gap=0.03, rest=0.05, burst=3, bytes=600)
    draw.writer(entries=40, gap=0.03, rest=0.05, burst=3, bytes=600)
    draw.actor("recoverer", draw.rng.uniform(2.0, draw.duration))
    at = 0.4
    while at < draw.duration:
        bookie = draw.rng.choice(draw.bookies)
        draw.fault("disk_slow", bookie, at=at, lasts=1.5, amount=draw.rng.uniform(0.3, 1.0))
        draw.fault("disk_full", bookie, at=at + draw.rng.uniform(0.0, 0.5), lasts=1.0)
        at += draw.rng.uniform(0.5, 1.5)
    return draw.plan(segment_bytes=24 * 1024)


@profile
def scarce_bookies(draw: Draw) -> Plan:
    """Ledgers begin, are written and recovered on fewer live bookies than they have seats.

    There is no spare. Bookies are down when ledgers begin, and come back without having heard of them.
    """
    rng = draw.rng
    sizes = rng.choice(((3, 3, 2), (3, 3, 2), (3, 3, 2), (4, 3, 2), (5, 3, 2), (4, 4, 2), (3, 3, 1)))
    draw.bookies = _FIVE[: sizes[0]]
    draw.dishonest = draw.bookies[0]
    quorums = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))
    for _ in range(rng.choice((1, 2))):
        draw.writer(
            quorums={**quorums, "guaranteed_write_quorum": rng.random() < 0.3},
            entries=rng.choice((3, 8)), closes=rng.random() < 0.4, rest=0.2, at_ack_quorum=0.5,
        )  # fmt: skip
    draw.actor("tailer", 1.0)
    for _ in range(2):
        draw.actor("recoverer", rng.uniform(0.5, 2.0), times=8, gap=1.0, at_ack_quorum=0.5)
    at = 0.2
    while at < draw.duration:
        lasts = rng.uniform(0.5, 4.0)
        kind = rng.choice(("kill_bookie", "kill_bookie", "power_cut", "pause"))
        draw.fault(kind, rng.choice(draw.bookies), at=at, lasts=lasts, amount=rng.random())
        at += lasts * rng.uniform(0.5, 1.2)
    draw.some("kill_client", draw.clients[:1], 1)
    for kind in ("block_one_way", "cut_reset", "link_slow"):
        draw.some(kind, draw.clients, 3)
    draw.some("meta_lossy", draw.clients, 2)
    return draw.plan()
