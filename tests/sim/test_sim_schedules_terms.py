"""The counterexamples of unbounded ledgers, played step by step in simulation: what must not happen does not.

Three are those of docs/UNBOUNDED.md, which `tests/integration/test_unbounded_counterexamples.py` plays on
real bookies: here no time passes, and everything that the run's record knows is checked. The last one is of
our own: a displaced holder who has read the metadata again, and seals. Each is played a second time with the
rule taken out that forbids it, and must then break.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from metadata.errors import BookieUnavailableError, LedgerFencedError
from tests.sim.checkers.unbounded_calls import EVERYTHING, Calls
from tests.sim.checkers.unbounded_lifecycle import NAME, Lives
from tests.sim.mutants.__main__ import everything
from tests.sim.mutants.planting import Edit, Mutant
from tests.sim.simulation import run_script
from tests.sim.test_sim_schedules import PLAN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio import Client
    from tests.sim.checkers.unbounded_lifecycle import Handle, Life
    from tests.sim.plan import Plan
    from tests.sim.simulation import Simulation

    Job = Callable[[Client, Calls], Awaitable[Any]]

THREE = replace(PLAN, bookies=("b1", "b2", "b3"))


class Terms:
    """A running cluster, and clients that do as they are told: w1, w2 … take over in turn; r reads."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.lives = Lives.of(simulation)
        self._orders: dict[str, asyncio.Queue[tuple[Job, asyncio.Future[Any]]]] = {}

    async def enter(self, *names: str) -> None:
        """Bring clients in, once all bookies serve."""
        await asyncio.sleep(0.5)
        for name in names:
            self._orders[name] = asyncio.Queue()
            self.simulation.spawn_client(name, self._obey, name)

    async def _obey(self, simulation: Simulation, name: str, client: Client) -> None:
        calls, tasks = Calls(simulation, name, random.Random(name)), []

        async def carry_out(job: Job, done: asyncio.Future[Any]) -> None:
            try:
                done.set_result(await job(client, calls))
            except Exception as error:
                done.set_exception(error)

        while True:
            tasks.append(asyncio.create_task(carry_out(*await self._orders[name].get())))

    def begin(self, name: str, job: Job) -> asyncio.Future[Any]:
        """Have a client do something."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._orders[name].put_nowait((job, done))
        return done

    async def meet(self, name: str, *bookies: str) -> None:
        """Have a client connect to bookies."""

        async def job(client: Client, calls: Calls) -> None:
            for bookie in bookies:
                await client._context.pool.get(bookie)

        await self.begin(name, job)

    def taking_over(self, name: str) -> asyncio.Future[Any]:
        """Have a client take the ledger over; the future gives its handle."""

        async def job(client: Client, calls: Calls) -> Handle:
            handle = await calls.take_over(client, NAME, cuts=0.0)
            assert handle is not None
            return handle

        return self.begin(name, job)

    async def add(self, name: str, handle: Handle, count: int = 1) -> None:
        """Have a client add entries, and give them a while."""

        async def job(client: Client, calls: Calls) -> None:
            for _ in range(count):
                value = calls.lives.value(handle, 10)
                calls.lives.issued(handle, handle.ledger.add_entry(value), value)

        await self.begin(name, job)
        await asyncio.sleep(0.3)

    async def read(self, last: int) -> None:
        """Have r read all up to an entry, many times, so that each bookie is asked first."""

        async def job(client: Client, calls: Calls) -> None:
            reader = await client.open_ledger(NAME)
            ledger_id = reader.ledger_id
            await calls.iterate(reader.tail(0), ledger_id, 0, -1, last + 1)
            for _ in range(6):
                await calls.iterate(reader.read(0, last), ledger_id, 0, last, EVERYTHING)

        await self.begin("r", job)

    async def term(self, number: int) -> None:
        """Return when the metadata say that a term has begun, before its holder hears so."""
        begun, watchers = asyncio.Event(), self.simulation.tree.watchers

        def changed(*_: object) -> None:
            if self.life.term == number:
                begun.set()

        watchers.append(changed)  # Behind the record's own, which has noted the term by then.
        await begun.wait()
        watchers.remove(changed)

    def cut(self, *links: str) -> None:
        """Let nothing pass from one host to another: "w1>b2"."""
        for link in links:
            self.simulation.network.block(*link.split(">"))

    def join(self, *links: str) -> None:
        """Let everything pass again, what waited first."""
        for link in links:
            self.simulation.network.open(*link.split(">"))

    def part(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts."""
        self.cut(f"{one}>{other}", f"{other}>{one}")

    @property
    def life(self) -> Life:
        """Return the ledger's record."""
        (life,) = self.lives.alive()
        return life

    @property
    def ensemble(self) -> tuple[str, ...]:
        """Return the bookies of the last fragment."""
        assert self.life.metadata is not None
        return self.life.metadata.last_fragment.bookies


async def entry_on_one_bookie(simulation: Simulation) -> None:
    """B stays on one bookie; a takeover that does not hear of it goes on, and adds another entry 1."""
    on = Terms(simulation)
    await on.enter("w1", "w2", "r")
    first = await on.taking_over("w1")
    await on.add("w1", first)
    one, two, three = on.ensemble
    on.cut(f"w1>{two}", f"w1>{three}")
    await on.add("w1", first)
    await on.meet("w2", one, two, three)
    on.part("w2", one)
    second = await on.taking_over("w2")
    assert second.ledger.last_add_confirmed == 0
    assert one in on.ensemble
    await on.add("w2", second)
    assert second.ledger.last_add_confirmed == 1
    await on.read(1)


async def bookie_that_comes_back(simulation: Simulation) -> None:
    """A bookie leaves with 1, 2 and 3 of term 1; term 2 does without it; in term 3 it is back."""
    on = Terms(simulation)
    await on.enter("w1", "w2", "w3", "w4", "r")
    first = await on.taking_over("w1")
    await on.add("w1", first)
    dirty, *others = on.ensemble
    (fourth,) = set(simulation.plan.bookies) - {dirty, *others}
    on.cut(*(f"w1>{name}" for name in others))
    await on.add("w1", first, 3)
    on.part("w2", dirty)
    second = await on.taking_over("w2")
    assert dirty not in on.ensemble
    await on.add("w2", second)
    on.part("w3", fourth)
    third = await on.taking_over("w3")
    assert dirty in on.ensemble
    on.cut(f"w3>{dirty}")
    await on.add("w3", third)
    assert third.ledger.last_add_confirmed == 2
    await on.read(2)
    # Nor does the next takeover find what it left, which asks it about entry 3, and one of the others.
    await on.meet("w4", dirty, *others)
    on.part("w4", others[0])
    fourth_holder = await on.taking_over("w4")
    end = fourth_holder.ledger.last_add_confirmed
    on.lives.require(end == 2, "NoLogDivergence", f"term 4 begins behind {end}, which is of term 1")


async def lac_with_old_fragments(simulation: Simulation) -> None:
    """A reader knows of term 2, and of fragments of term 1 only, when it is told a LAC of content term 2."""
    on = Terms(simulation)
    await on.enter("w1", "w2", "r")
    first = await on.taking_over("w1")
    one, two, three = on.ensemble
    on.cut(f"w1>{two}", f"w1>{three}")
    await on.add("w1", first)
    await on.meet("w2", one, two, three)
    on.part("w2", one)
    taking = on.taking_over("w2")
    await on.term(2)  # Two bookies have answered that they can be reached. None has been fenced yet.
    on.cut(f"{two}>w2", f"{three}>w2")

    async def tail(client: Client, calls: Calls) -> None:
        reader = await client.open_ledger(NAME)
        assert (reader.metadata.term, reader.metadata.last_fragment.content_term) == (2, 1)
        assert not taking.done()
        simulation.metadata_faults("r").delay = (1.9, 1.9)  # It hears late of what changes.
        on.join(f"{two}>w2", f"{three}>w2")
        await calls.iterate(reader.tail(0), reader.ledger_id, 0, -1, 1)

    tailing = on.begin("r", tail)
    second = await taking
    await on.add("w2", second)
    assert second.ledger.last_add_confirmed == 0
    await tailing


async def displaced_holder_that_seals(simulation: Simulation) -> None:
    """A holder that hears of no bookie reads the metadata again, for a read, and seals what is another's."""
    on = Terms(simulation)
    await on.enter("w1", "w2", "r")
    first = await on.taking_over("w1")
    await on.add("w1", first, 3)
    await asyncio.sleep(1.0)
    for bookie in simulation.plan.bookies:
        on.part("w1", bookie)
    second = await on.taking_over("w2")
    await on.add("w2", second, 2)

    async def read_and_seal(client: Client, calls: Calls) -> None:
        with contextlib.suppress(BookieUnavailableError):
            await calls.read(first, 0, 2, EVERYTHING)
        with contextlib.suppress(LedgerFencedError):
            await calls.close(first, seal=True)

    await on.begin("w1", read_and_seal)
    await on.read(4)


def _of_mutant(number: int) -> Mutant:
    return next(mutant for mutant in everything() if mutant.number == number)


IMPATIENT = replace(PLAN, client_settings={"read_timeout_s": 1.0})
SEALS_WHAT_IT_FINDS = Mutant(
    0, "the writer seals behind the last fragment that it has read, whoever wrote it",
    (Edit("client_aio.ledger.writer:LedgerWriter._close_metadata", "self._changes.fragment, short_from)",
          "self._held.current.last_fragment, short_from)"),),
)  # fmt: skip
SCRIPTS: dict[str, tuple[Any, Plan, Mutant, str]] = {
    "an entry on one bookie only": (entry_on_one_bookie, THREE, _of_mutant(21), "NoLogDivergence"),
    "a bookie that leaves and comes back": (bookie_that_comes_back, PLAN, _of_mutant(21), "NoLogDivergence"),
    "a LAC that is read with the wrong fragments": (
        lac_with_old_fragments, THREE, _of_mutant(22), "NoLogDivergence",
    ),
    "a displaced holder that seals": (
        displaced_holder_that_seals, IMPATIENT, SEALS_WHAT_IT_FINDS, "SealsAreKept",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_counterexample_of_terms_breaks_nothing(name: str) -> None:
    script, plan, _, _ = SCRIPTS[name]
    result = run_script(plan, script)
    assert result.is_good, f"{result.text}\n{result.story}"


def _broken(name: str) -> str:
    script, plan, mutant, _ = SCRIPTS[name]
    mutant.plant()
    return run_script(plan, script).name


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_schedule_breaks_terms_that_lack_their_rule(name: str) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_broken, (name,)) == SCRIPTS[name][3]
