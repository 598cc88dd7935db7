"""Published counterexamples, played step by step on production code.

The sources are the TLA+ models of BookKeeper's replication (Vanlightly, 2021-2023) and the discussions around
them. Each schedule is played a second time with the rule taken out that forbids it, and must then break. That
shows that the schedule is the one that the rule is about. Those of unbounded ledgers are in
`test_sim_schedules_terms`. The last schedule is of our own: a close that waits for an ensemble change.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from metadata.errors import BookKeeperError
from tests.sim.checkers.log import Chains
from tests.sim.cluster.loop import Order
from tests.sim.mutants.__main__ import everything
from tests.sim.plan import Plan
from tests.sim.simulation import run_script
from tests.sim.workloads.ledger import payload
from tests.sim.workloads.log import LOG

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from client_aio import Client
    from client_aio.ledger.writer import LedgerWriter
    from tests.sim.simulation import Simulation

    Script = Callable[[Simulation], Coroutine[object, object, None]]

PLAN = Plan(
    profile="schedule", seed=1, bookies=("b1", "b2", "b3", "b4"), actors=(), faults=(), duration=1.0,
    order=Order.FIFO, segment_bytes=64 * 1024, dishonest="b1",
    client_settings={"add_timeout_s": 30.0, "read_timeout_s": 30.0, "ensemble_change_timeout_s": 30.0},
)  # fmt: skip


class Stage:
    """A running cluster with two clients: a writer (w) and whoever else comes (r)."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.ledger: LedgerWriter | None = None
        self._orders: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    def cut(self, *links: str) -> None:
        """Let nothing pass from one host to another: "w>b2"."""
        for link in links:
            self.simulation.network.block(*link.split(">"))

    def join(self, *links: str) -> None:
        """Let everything pass again, what waited first."""
        for link in links:
            self.simulation.network.open(*link.split(">"))

    async def write(self, *, write_quorum: int = 3) -> None:
        """Have w create a ledger on three bookies, two of which must acknowledge, and keep it open."""
        await asyncio.sleep(0.5)  # until all bookies serve
        opened = asyncio.Event()
        self.simulation.spawn_client("w", self._writer, opened, write_quorum)
        await opened.wait()

    async def _writer(
        self, simulation: Simulation, opened: asyncio.Event, write_quorum: int, client: Client
    ) -> None:
        self.ledger = await client.create_ledger(ensemble_size=3, write_quorum=write_quorum, ack_quorum=2)
        simulation.created("w", self.ledger.ledger_id)
        opened.set()
        while True:
            count, _ = await self._orders.get()
            for _ in range(int(count)):
                number = len(simulation.history.ledger(self.ledger.ledger_id).issued)
                data = payload(self.ledger.ledger_id, number, 20)
                simulation.history.issued("w", self.ledger.ledger_id, data, self.ledger.add_entry(data))

    def add(self, count: int = 1) -> None:
        """Have w add entries, at once; nobody waits for them."""
        self._orders.put_nowait((str(count), None))

    def recover(self, name: str = "r") -> asyncio.Task[object]:
        """Have another client recover the ledger."""

        async def recoverer(simulation: Simulation, client: Client) -> None:
            assert self.ledger is not None
            reader = await client.open_ledger(self.ledger.ledger_id, recover=True)
            simulation.history.note(name, "recovered up to", reader.last_add_confirmed)

        return self.simulation.spawn_client(name, recoverer)

    @property
    def ensemble(self) -> tuple[str, ...]:
        """Return the bookies of the ledger's last fragment."""
        assert self.ledger is not None
        return self.ledger.metadata.last_fragment.bookies


async def late_add_meets_recovery(simulation: Simulation) -> None:
    """An add reaches one bookie; recovery asks the others, finds nothing, closes; then the add reaches them.

    "Recovery reads without fencing": with unfenced bookies the late add would be acknowledged behind the end.
    """
    stage = Stage(simulation)
    await stage.write()
    one, two, three = stage.ensemble
    stage.cut(f"w>{two}", f"w>{three}")
    stage.add()
    await asyncio.sleep(0.2)
    stage.cut(f"{one}>r", f"r>{one}")  # what the first bookie has to say comes too late
    done = stage.recover()
    await asyncio.sleep(1.0)
    stage.join(f"w>{two}", f"w>{three}")
    await asyncio.sleep(1.0)
    stage.join(f"{one}>r", f"r>{one}")
    await done


async def change_of_ensemble_meets_recovery(simulation: Simulation) -> None:
    """A writer that lost a bookie replaces it while its ledger is being recovered: "the invalid fragment".

    Its compare-and-set comes too late, and it must acknowledge nothing on an ensemble that nobody else knows.
    """
    stage = Stage(simulation)
    await stage.write()
    _, _, three = stage.ensemble
    stage.add(2)
    await asyncio.sleep(0.2)
    simulation.metadata_faults("w").delay = (0.3, 0.35)
    simulation.stop_bookie(three, has_power=True, back_after=None)
    await asyncio.sleep(0.05)
    stage.add(2)
    done = stage.recover()
    await done
    await asyncio.sleep(4.0)
    stage.add(1)
    await asyncio.sleep(1.0)


async def log_is_taken_from_a_living_writer(simulation: Simulation) -> None:
    """A log changes hands while its writer goes on, with the ledger that it will roll to listed already.

    "Fencing only one of the last two ledgers": the writer would go on in the one before the last.
    """
    await asyncio.sleep(0.5)  # until all bookies serve
    chains, wrote = Chains.of(simulation), asyncio.Event()

    async def write(simulation: Simulation, who: str, pause: float, client: Client) -> None:
        try:
            async with client.open_log(LOG, roll_entries=10) as log:
                for number in range(20):
                    record = f"{who}.1.{number}".encode()
                    chains.issued(who, record, log.append(record))
                    await asyncio.sleep(pause)
                    if number == 7:
                        wrote.set()
        except BookKeeperError as error:
            simulation.history.note(who, "lost the log:", repr(error))

    first = simulation.spawn_client("w", write, "w", 0.2)
    await wrote.wait()
    await simulation.spawn_client("r", write, "r", 0.05)
    await first


async def close_waits_for_copies_and_then_for_the_metadata_store(simulation: Simulation) -> None:
    """A close outlasts an ensemble change that takes longer than the timeout of copies (rule 11).

    One of three bookies acknowledges an entry, another one dies. The answer of the third comes after 0.7 s,
    that of the replacement 0.7 s later, and the compare-and-set takes 1.4 s more. The LAFR does not move
    meanwhile. The timeout of copies is 1 s. Each copy is progress, and the timeout runs only while copies are
    missing.
    """
    await asyncio.sleep(0.5)  # until all bookies serve
    network = simulation.network

    async def write(simulation: Simulation, client: Client) -> None:
        ledger = await client.create_ledger(
            ensemble_size=3, write_quorum=3, ack_quorum=1, guaranteed_write_quorum=True
        )
        simulation.created("w", ledger.ledger_id)
        first, dying, late = ledger.metadata.last_fragment.bookies
        network.block("w", dying)
        network.block(late, "w")
        data = payload(ledger.ledger_id, 0, 20)
        future = ledger.add_entry(data)
        simulation.history.issued("w", ledger.ledger_id, data, future)
        await future
        simulation.stop_bookie(dying, has_power=True, back_after=None)
        network.open("w", dying)
        closing = asyncio.ensure_future(ledger.close())
        while not ledger._window.replacements:  # noqa: ASYNC110 — nothing else tells of a seat
            await asyncio.sleep(0.001)
        (newcomer,) = set(ledger._replicator.bookies) - {first, dying, late}
        network.block(newcomer, "w")
        simulation.metadata_faults("w").delay = (0.7, 0.7)
        for bookie_id in (late, newcomer):
            await asyncio.sleep(0.7)
            assert not closing.done()
            network.open(bookie_id, "w")
        closed = await closing
        assert newcomer in closed.last_fragment.bookies

    await simulation.spawn_client("w", write)


SCRIPTS: dict[str, tuple[Script, int]] = {
    "recovery reads without fencing": (late_add_meets_recovery, 4),
    "the invalid fragment": (change_of_ensemble_meets_recovery, 13),
    "fencing only one of the last two ledgers": (log_is_taken_from_a_living_writer, 24),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_counterexample_breaks_nothing(name: str) -> None:
    result = run_script(PLAN, SCRIPTS[name][0])
    assert result.is_good, f"{result.text}\n{result.story}"


def _broken(name: str) -> str:
    script, number = SCRIPTS[name]
    next(mutant for mutant in everything() if mutant.number == number).plant()
    return run_script(PLAN, script).name


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_schedule_breaks_code_that_lacks_its_rule(name: str) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_broken, (name,))


def test_a_close_does_not_fail_for_want_of_copies_that_have_come() -> None:
    """It failed while the change to the bookies that had them was written, and its error named no bookie."""
    settings = {**PLAN.client_settings, "add_quorum_timeout_s": 1.0}
    result = run_script(
        replace(PLAN, client_settings=settings), close_waits_for_copies_and_then_for_the_metadata_store
    )
    assert result.is_good, f"{result.text}\n{result.story}"
