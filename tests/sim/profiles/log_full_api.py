"""Profiles over logs that make every call on a handle; logs are truncated, replaced and remade."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.sim.plan import Actor, profile
from tests.sim.workloads import log, log_full_api, log_lifecycle

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (
    log.log_sweeper,
    log_full_api.versatile_log_writer,
    log_full_api.log_truncator,
    log_full_api.log_replacer,
    log_full_api.log_batch_follower,
    log_lifecycle.log_remaker,
    log_lifecycle.log_inspector,
    log_lifecycle.log_intruder,
    log_lifecycle.elector,
)
_LINKS = ("block_both", "block_one_way", "link_slow", "cut_reset")
_BOOKIES = ("kill_bookie", "power_cut", "disk_slow")
_META = ("meta_lossy", "meta_slow", "meta_lag", "meta_cut", "meta_expire")
_QUORUMS = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}
_SECRET = {"digest": "hmac-sha256", "password": b"a secret"}


def _writer(draw: Draw, **settings: Any) -> str:
    rng = draw.rng
    drawn: dict[str, Any] = {
        "quorums": {**draw.quorums(), "guaranteed_write_quorum": rng.random() < 0.1},
        "roll_entries": rng.choice((2, 5, 20, None)),
        "roll_bytes": rng.choice((None, None, 400)),
        "roll_age_s": rng.choice((None, None, 0.3, 1.0)),
        "steps": rng.choice((5, 20, 60)),
        "burst": rng.choice((1, 3, 8)),
        "bytes": rng.choice((0, 60, 400)),
        "gap": rng.choice((0.0, 0.02, 0.1)),
        "pause": rng.choice((0.1, 0.5, 2.0)),
    }
    return draw.actor("versatile_log_writer", rng.uniform(0.0, 1.0), **{**drawn, **settings})


def _protected(draw: Draw, plan: Plan) -> Plan:
    """Return the log a password, in some seeds, and have somebody try others."""
    if draw.rng.random() < 0.75:
        return plan
    intruder = Actor("intruder", "log_intruder", 0.5)
    actors = [_with_secret(actor) for actor in plan.actors]
    return replace(plan, actors=(*actors, intruder))


def _with_secret(actor: Actor) -> Actor:
    settings = actor.settings
    if "quorums" not in settings:
        return actor
    return replace(actor, settings={**settings, "quorums": {**settings["quorums"], **_SECRET}})


def _readers(draw: Draw, *counts: int) -> None:
    for _ in range(draw.rng.choice(counts)):
        draw.actor("log_batch_follower", draw.rng.uniform(0.2, 2.0))


def _plan(draw: Draw) -> Plan:
    """Have the log checked in all its lives; half of the seeds have short pages and little room in flight."""
    plan = draw.plan(
        setup="log_lives",
        head_rows_bytes=draw.rng.choice((0, 300)),
        client_settings={"max_in_flight_bytes": draw.rng.choice((600, 3000, 1 << 26))},
    )
    return _protected(draw, plan)


def _faults(draw: Draw, *, meta: int, others: int, killed: list[str]) -> None:
    for kind in _META:
        draw.some(kind, draw.clients, meta)
    for kind in _LINKS:
        draw.some(kind, draw.clients, others)
    for kind in _BOOKIES:
        draw.some(kind, list(draw.bookies), max(1, others - 1))
    draw.some("pause", draw.clients, others + 1, lasts=(0.2, 3.0))
    draw.some("kill_client", killed, 2)


@profile
def versatile_logs(draw: Draw) -> Plan:
    """Writers call all that a log's handle has, in any order, and again when it is over; readers jump."""
    for _ in range(draw.rng.choice((1, 2, 2, 3))):
        _writer(draw)
    writers = draw.clients
    _readers(draw, 1, 1, 2)
    draw.actor("log_inspector", draw.rng.uniform(0.2, 2.0))
    _faults(draw, meta=3, others=3, killed=writers)
    return _plan(draw)


@profile
def truncated_logs(draw: Draw) -> Plan:
    """Clients that write nothing truncate at any position, beside writers, adders, sweepers and readers."""
    for _ in range(draw.rng.choice((1, 1, 2))):
        _writer(draw, roll_entries=2, steps=60, gap=0.02, pause=0.2)
    for _ in range(draw.rng.choice((1, 2))):
        draw.actor("log_truncator", draw.rng.uniform(0.2, 1.0), rest=draw.rng.choice((0.05, 0.3)))
    if draw.rng.random() < 0.5:
        _replacer(draw, replaces=0.0)
    if draw.rng.random() < 0.5:
        draw.actor("log_sweeper", draw.rng.uniform(0.2, 1.0))
    victims = draw.clients
    _readers(draw, 1, 2)
    _faults(draw, meta=4, others=2, killed=victims)
    return _plan(draw)


def _replacer(draw: Draw, **settings: Any) -> str:
    rng = draw.rng
    drawn = {"quorums": _QUORUMS, "batches": 12, "rest": rng.choice((0.1, 0.5)), "replaces": 0.6}
    return draw.actor("log_replacer", rng.uniform(0.2, 2.0), **{**drawn, **settings})


@profile
def replaced_logs(draw: Draw) -> Plan:
    """All that a log has is replaced, by transactions and without, under writers, truncators and readers."""
    _writer(draw)
    for _ in range(draw.rng.choice((1, 2, 2))):
        _replacer(draw)
    if draw.rng.random() < 0.5:
        draw.actor("log_truncator", draw.rng.uniform(0.2, 1.0), rest=0.3)
    if draw.rng.random() < 0.4:
        draw.actor("log_sweeper", draw.rng.uniform(0.2, 1.0))
    victims = draw.clients
    _readers(draw, 1, 2)
    _faults(draw, meta=4, others=2, killed=victims)
    return _plan(draw)


@profile
def remade_logs(draw: Draw) -> Plan:
    """The log is deleted and made anew under its name, while old writers come back from pauses."""
    for _ in range(draw.rng.choice((1, 2))):
        _writer(draw, steps=20, pause=0.3)
    writers = draw.clients
    for _ in range(draw.rng.choice((1, 1, 2))):
        draw.actor(
            "log_remaker",
            draw.rng.uniform(0.5, 1.5),
            quorums=_QUORUMS,
            rest=draw.rng.choice((0.05, 0.3, 1.0)),
        )
    if draw.rng.random() < 0.5:
        draw.actor("log_truncator", draw.rng.uniform(0.2, 1.0), rest=draw.rng.choice((0.05, 0.3)))
    if draw.rng.random() < 0.3:
        _replacer(draw)
    if draw.rng.random() < 0.4:
        draw.actor("log_sweeper", draw.rng.uniform(0.2, 1.0))
    victims = draw.clients
    _readers(draw, 1, 2)
    if draw.rng.random() < 0.5:
        draw.actor("log_inspector", draw.rng.uniform(0.2, 2.0))
    draw.some("pause", writers, 3, lasts=(0.5, 4.0))
    _faults(draw, meta=4, others=2, killed=victims)
    return _plan(draw)


@profile
def elected_logs(draw: Draw) -> Plan:
    """Candidates stand, lead, write the log and step down, while sessions expire and the store is away."""
    for _ in range(draw.rng.choice((2, 3, 4))):
        draw.actor("elector", draw.rng.uniform(0.0, 1.0), quorums=_QUORUMS)
    electors = draw.clients
    _readers(draw, 1)
    for kind in ("meta_expire", "meta_cut"):
        draw.some(kind, electors, 4, lasts=(0.2, 4.0))
    _faults(draw, meta=3, others=2, killed=electors)
    return _plan(draw)
