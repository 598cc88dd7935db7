"""Faults do what they say for as long as they say, and are counted when they did it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.core.identity import Action
from bookie_aio.server import registration
from bookie_aio.server.ledger_gc import LedgerGarbageCollector
from metadata.errors import NoSuchKeyError
from metadata.ids import cookie_key
from tests.sim.cluster.hardware import PAGE, Inode
from tests.sim.cluster.loop import Order, SimLoop
from tests.sim.cluster.network import SimNetwork
from tests.sim.faults.lasting import Lasting
from tests.sim.plan import Actor, Fault, Plan
from tests.sim.simulation import Simulation, run_plan

if TYPE_CHECKING:
    from bookie_aio.config import BookieConfig
    from bookie_aio.core.identity import DirectoryState
    from metadata.store import MetadataStore


def _seen(*spans: tuple[float, float, str]) -> list[tuple[float, str]]:
    """Return what is seen of faults from one time to another, each time that something begins or ends."""
    seen: list[tuple[float, str]] = []
    events: list[tuple[float, partial[object]]] = []
    now, state = 0.0, {"value": ""}
    lasting = Lasting(lambda seconds, *call: events.append((now + seconds, partial(*call))))
    set_it = partial(state.__setitem__, "value")
    for start, end, value in spans:
        begin = partial(lasting.begin, "key", end - start, partial(set_it, value), partial(set_it, ""))
        events.append((start, begin))
    while events:
        first = min(events, key=lambda event: event[0])
        events.remove(first)
        now = first[0]
        first[1]()
        seen.append((now, state["value"]))
    return seen


def test_a_fault_that_ends_does_not_end_one_that_began_after_it() -> None:
    assert _seen((1, 4, "a"), (2, 6, "b")) == [(1, "a"), (2, "b"), (4, "b"), (6, "")]


def test_a_fault_that_ends_leaves_the_one_that_began_before_it() -> None:
    assert _seen((1, 6, "a"), (2, 4, "b")) == [(1, "a"), (2, "b"), (4, "a"), (6, "")]


def test_of_three_faults_each_lasts_as_long_as_it_is_to() -> None:
    spans = ((1, 9, "a"), (2, 8, "b"), (3, 4, "c"))
    assert _seen(*spans) == [(1, "a"), (2, "b"), (3, "c"), (4, "b"), (8, "a"), (9, "")]


def test_what_was_healed_does_not_end_again() -> None:
    ends: list[tuple[object, ...]] = []
    lasting, happened = Lasting(lambda _, *call: ends.append(call)), list[str]()
    lasting.begin("key", 1.0, partial(happened.append, "begin"), partial(happened.append, "end"))
    lasting.forget()
    call, *arguments = ends[0]
    assert callable(call)
    call(*arguments)
    assert happened == ["begin"]


def _plan(*faults: Fault, seed: int = 1, actors: tuple[Actor, ...] = ()) -> Plan:
    return Plan(
        profile="faults", seed=seed, bookies=("b1", "b2", "b3"), actors=actors, faults=faults, duration=2.0,
        order=Order.FIFO, segment_bytes=64 * 1024, dishonest="b1", power_cut_at_end=False,
    )  # fmt: skip


WRITER = Actor(
    "c1", "writer", 0.0,
    {
        "quorums": {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}, "entries": 20, "burst": 1,
        "gap": 0.05, "rest": 0.2, "bytes": 20, "closes": True,
    },
)  # fmt: skip
WAITING = ("power_cut", "disk_write_error", "disk_sync_error", "disk_lost_write", "disk_misdirected_write")
ON_LINKS = ("block_both", "block_one_way", "link_slow")


def test_only_what_took_effect_is_counted() -> None:
    faults = [Fault(1.0, kind, "b1", lasts=0.2) for kind in WAITING]
    faults += [Fault(1.0, kind, "c1", other="b1", lasts=0.2) for kind in ON_LINKS]
    idle, busy = run_plan(_plan(*faults)), run_plan(_plan(*faults, actors=(WRITER,)))
    assert idle.is_good, idle.text
    assert busy.is_good, busy.text
    assert idle.stats is not None
    assert busy.stats is not None
    assert not {*WAITING, *ON_LINKS} & set(idle.stats)
    assert set(ON_LINKS) <= set(busy.stats)
    assert busy.stats["disk_write_error"] == 1


def test_a_bookie_that_lost_its_disk_is_started_and_refuses() -> None:
    result = run_plan(_plan(Fault(1.0, "disk_wiped", "b1", lasts=0.3), actors=(WRITER,)))
    assert result.is_good, result.text
    assert result.stats is not None
    assert result.stats["disk_wiped"] == 1
    assert result.stats["wiped_bookie_refused"] > 0


def test_a_bookie_that_serves_from_an_empty_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registration._format

    async def format_anew(config: BookieConfig, store: MetadataStore, *more: Any) -> Any:
        with suppress(NoSuchKeyError):
            await store.delete(cookie_key(config.bookie_id))
        return await real(config, store, *more)

    def decide(states: list[DirectoryState], *_: object, **__: object) -> Action:
        return Action.GO_ON if all(state.cookie for state in states) else Action.FORMAT

    monkeypatch.setattr(registration, "decide", decide)
    monkeypatch.setattr(registration, "_format", format_anew)
    plan = _plan(Fault(1.0, "disk_wiped", "b1", lasts=0.3), actors=(WRITER,))
    result = run_plan(replace(plan, duration=6.0))  # until the session before has ended, at least
    assert result.name == "WipedBookiesDoNotServe", result.text


def test_bookies_scrub_in_a_part_of_the_seeds() -> None:
    sees, sees_not = run_plan(_plan(seed=9)), run_plan(_plan(seed=3))
    assert sees.stats is not None
    assert sees_not.stats is not None
    assert sees.stats["scrubbed"] >= len(_plan().bookies)
    assert "scrubbed" not in sees_not.stats


def test_bookies_do_not_forget_soon_where_somebody_repairs() -> None:
    repairer = Actor("c2", "repairer", 0.0)
    assert Simulation(_plan(seed=9, actors=(WRITER,))).upkeep.unnamed_grace_s < 3.0
    assert Simulation(_plan(seed=9, actors=(WRITER, repairer))).upkeep.unnamed_grace_s == 3600.0
    assert Simulation(_plan(seed=3, actors=(WRITER,))).upkeep.unnamed_grace_s == 3600.0


def test_a_bookie_that_forgets_what_it_is_to_keep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_kept_by_others(*_: object) -> bool:
        return True

    monkeypatch.setattr(LedgerGarbageCollector, "_is_kept_by_others", is_kept_by_others)
    result = run_plan(replace(_plan(seed=9, actors=(WRITER,)), duration=6.0))
    assert result.name == "ForgottenIsKeptByOthers", result.text


class _Told(asyncio.BufferedProtocol):
    """Tells when its connection is lost."""

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


@pytest.mark.parametrize("writes", ["while it is off", "when it is up"])
def test_whoever_writes_to_a_host_that_has_lost_power_hears_of_it_once_that_is_up(writes: str) -> None:
    """A connection that was idle when the power went is no black hole for ever."""
    loop = SimLoop(random.Random(1))
    network = SimNetwork(loop, random.Random(1), Counter())

    async def run() -> float:
        server, client = network.boot("b"), network.boot("c")
        network.listen(server, _Told, "b", 1)
        transport, told = await network.connect(client, _Told, "b", 1)
        network.die(server, has_power=False)
        if writes == "while it is off":
            transport.write(b"x")
        await asyncio.sleep(2.0)
        assert not told.lost.done()
        network.boot("b")
        if writes == "when it is up":
            transport.write(b"x")
        assert isinstance(await told.lost, ConnectionResetError)
        return loop.now

    assert 2.0 < loop.run(run(), until=100.0) < 3.0


def test_a_sync_that_ends_late_takes_back_nothing_of_a_later_one() -> None:
    inode = Inode(1)
    inode.write([b"1" * PAGE], 0)
    slow = inode.snapshot()
    inode.write([b"2" * PAGE], 0)
    inode.write([b"tail"], PAGE)
    inode.make_durable(inode.snapshot())
    inode.make_durable(slow)
    assert inode.durable == b"2" * PAGE + b"tail"
    assert not inode.dirty
    assert not inode.size_is_dirty
