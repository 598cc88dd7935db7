"""Faults: what each kind does to a running simulation, and how it ends.

Owns the meaning of `Fault.kind`. The plan decides when faults happen.

The statistics of a run count, under a kind's name, how many faults of that kind took effect, not how many
were drawn. A kind's function returns True if it struck something, and False if there was nothing to strike.
It returns None if it waits for its moment, which may never come, and is counted then. A power cut waits until
the power goes, a failing write until a write fails, a full disk until somebody finds no room. A link that is
slow or blocked is counted only if both ends are alive. It is slow or blocked all the same, since they may
start.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.cluster.hardware import DiskFaults

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.plan import Fault
    from tests.sim.simulation import Simulation

KINDS: dict[str, Callable[[Simulation, Fault], bool | None]] = {}


def kind(
    function: Callable[[Simulation, Fault], bool | None],
) -> Callable[[Simulation, Fault], bool | None]:
    """Enter a function into the table of kinds, under its name."""
    KINDS[function.__name__] = function
    return function


def strike(simulation: Simulation, fault: Fault) -> None:
    """Carry out a fault."""
    if simulation.is_healed:
        return
    took_effect = KINDS[fault.kind](simulation, fault)
    simulation.history.note(
        "fault", str(fault), {True: "", False: "(meets nobody)", None: "(waits)"}[took_effect]
    )
    if took_effect:
        simulation.stats[fault.kind] += 1


# --- processes and power -------------------------------------------------------------------------


@kind
def kill_bookie(simulation: Simulation, fault: Fault) -> bool:
    """`kill -9`, and a restart."""
    return simulation.stop_bookie(fault.target, has_power=True, back_after=fault.lasts)


@kind
def power_cut(simulation: Simulation, fault: Fault) -> bool | None:
    """A bookie's host loses power, mostly while it writes; what was not synced is partly lost."""
    if not simulation.is_up(fault.target):
        return False
    cut = partial(_cut_power, simulation, fault, [fault.target])
    if fault.amount < 0.8:
        simulation.disks[fault.target].when_busy.append(cut)
    else:
        cut()
    return None


def _cut_power(simulation: Simulation, fault: Fault, names: list[str]) -> None:
    """Cut the power of those that are up by now; one that is left of many counts as one."""
    if simulation.is_healed:
        return
    cut = 0
    for index, name in enumerate(names):
        back_after = fault.lasts * (1 + index * 0.2)
        cut += simulation.stop_bookie(name, has_power=False, back_after=back_after)
    if cut:
        simulation.stats[fault.kind if cut == len(names) or cut > 1 else "power_cut"] += 1


@kind
def power_cut_many(simulation: Simulation, fault: Fault) -> bool | None:
    """Several hosts lose power at one moment, while one of them writes: `amount` of all bookies."""
    names = [name for name in simulation.plan.bookies if simulation.is_up(name)]
    simulation.fault_rng.shuffle(names)
    hit = names[: max(2, round(fault.amount * len(names)))]
    if not hit:
        return False
    simulation.disks[hit[0]].when_busy.append(partial(_cut_power, simulation, fault, hit))
    return None


@kind
def kill_client(simulation: Simulation, fault: Fault) -> bool:
    """A client dies and does not come back."""
    return simulation.stop_client(fault.target)


@kind
def pause(simulation: Simulation, fault: Fault) -> bool:
    """SIGSTOP and SIGCONT."""
    process = simulation.network.processes.get(fault.target)
    if process is None or not process.is_alive or process.is_paused:
        return False
    simulation.loop.pause(process)
    simulation.cut_metadata(fault.target, fault.lasts, is_paused=True)
    simulation.after(fault.lasts, simulation.loop.resume, process)
    return True


@kind
def busy(simulation: Simulation, fault: Fault) -> bool:
    """A client computes in slices: it runs what is ready, and then stands still for a second at most."""
    loop, process = simulation.loop, simulation.network.processes.get(fault.target)
    if process is None or not process.is_alive or process.is_paused:
        return False
    ends_at, longest_s = loop.now + fault.lasts, 0.1 + 0.9 * fault.amount

    def compute() -> None:
        if process.is_alive and not process.is_paused and loop.now < ends_at and not simulation.is_healed:
            loop.pause(process)
            simulation.after(simulation.fault_rng.uniform(0.05, longest_s), go_on)

    def go_on() -> None:
        loop.resume(process)
        simulation.after(0.0, compute)  # behind all that is ready

    compute()
    return True


_OWNED = (
    "ensemble change of", "look at ledger", "healing of", "rolls of log", "bookie directory",
    "orders to bookies", "metadata of ledger",
)  # fmt: skip
"""How the names begin of a client's tasks that only their owner ends (`metadata.owned_task`)."""


@kind
def cancel_tasks(simulation: Simulation, fault: Fault) -> bool:
    """The application cancels tasks that its client owns: all of them, or one."""
    process = simulation.network.processes.get(fault.target)
    if process is None or not process.is_alive:
        return False
    owned = [task for task in process.tasks if not task.done() and task.get_name().startswith(_OWNED)]
    if not owned:
        return False
    for task in owned if fault.amount < 0.5 else [owned[int(fault.amount * 1009) % len(owned)]]:
        simulation.loop.post(process, 0.0, task.cancel)
    return True


@kind
def clock_jump(simulation: Simulation, fault: Fault) -> bool:
    """A process's clocks jump ahead."""
    process = simulation.network.processes.get(fault.target)
    if process is None or not process.is_alive:
        return False
    simulation.loop.jump_clock(process, fault.amount * 20)
    return True


@kind
def shut_down(simulation: Simulation, fault: Fault) -> bool:
    """SIGTERM, and a restart: a bookie answers what it has accepted, refuses what comes, and ends."""
    return simulation.close_bookie(fault.target, back_after=fault.lasts)


# --- links -----------------------------------------------------------------------------------------


@kind
def block_both(simulation: Simulation, fault: Fault) -> bool:
    """A black hole between two hosts."""
    return _block(simulation, fault, (fault.target, fault.other), (fault.other, fault.target))


@kind
def block_one_way(simulation: Simulation, fault: Fault) -> bool:
    """A black hole in one direction."""
    pair = (fault.target, fault.other) if fault.amount < 0.5 else (fault.other, fault.target)
    return _block(simulation, fault, pair)


def _block(simulation: Simulation, fault: Fault, *pairs: tuple[str, str]) -> bool:
    for source, target in pairs:
        simulation.lasting.begin(
            ("block", source, target),
            fault.lasts,
            partial(simulation.network.block, source, target),
            partial(simulation.network.open, source, target),
        )
    return any(_is_linked(simulation, source, target) for source, target in pairs)


def _is_linked(simulation: Simulation, source: str, target: str) -> bool:
    return source != target and simulation.is_up(source) and simulation.is_up(target)


@kind
def cut_reset(simulation: Simulation, fault: Fault) -> bool:
    """The connections between two hosts are reset."""
    return simulation.network.cut(fault.target, fault.other, is_clean=False) > 0


@kind
def cut_clean(simulation: Simulation, fault: Fault) -> bool:
    """The connections between two hosts end as if each had closed them."""
    return simulation.network.cut(fault.target, fault.other, is_clean=True) > 0


@kind
def link_slow(simulation: Simulation, fault: Fault) -> bool:
    """A link is slow both ways, up to 300 times slower."""
    factor = 2 + 300 * fault.amount**2
    slow = simulation.network.slow
    for pair in ((fault.target, fault.other), (fault.other, fault.target)):
        simulation.lasting.begin(
            ("slow", *pair),
            fault.lasts,
            partial(slow.__setitem__, pair, factor),
            partial(slow.pop, pair, None),
        )
    return _is_linked(simulation, fault.target, fault.other)


@kind
def isolate(simulation: Simulation, fault: Fault) -> bool:
    """A host is cut off from all bookies but `other`, one way or both; the metadata store stays in reach."""
    pairs = []
    for bookie in simulation.plan.bookies:
        if bookie != fault.other:
            pairs.append((fault.target, bookie))
            if fault.amount < 0.7:
                pairs.append((bookie, fault.target))
    return _block(simulation, fault, *pairs)


# --- disks -----------------------------------------------------------------------------------------


@kind
def disk_cold(simulation: Simulation, fault: Fault) -> bool:
    """Nothing that is read is in memory, and the medium takes up to 50 ms to give it."""
    faults = simulation.disks[fault.target].faults
    changes = {"cold_reads": 1.0, "read_time": 0.001 + 0.05 * fault.amount}
    _change(simulation, fault, faults, changes)
    return simulation.is_up(fault.target)


def _change(simulation: Simulation, fault: Fault, faults: object, changes: dict[str, Any]) -> None:
    """Change what is wrong with a disk or a link for as long as the fault lasts."""
    usual = {name: getattr(type(faults), name) for name in changes}
    begin, end = partial(_set, faults, changes), partial(_set, faults, usual)
    simulation.lasting.begin((fault.kind, fault.target), fault.lasts, begin, end)


def _set(faults: object, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(faults, name, value)


def warm(faults: DiskFaults) -> None:
    """Have a disk's reads take as long as they usually do."""
    faults.cold_reads, faults.read_time = DiskFaults.cold_reads, DiskFaults.read_time


@kind
def disk_slow(simulation: Simulation, fault: Fault) -> bool:
    """A disk is up to 400 times slower."""
    faults = simulation.disks[fault.target].faults
    _change(simulation, fault, faults, {"slow_factor": 2 + 400 * fault.amount**2})
    return simulation.is_up(fault.target)


@kind
def disk_full(simulation: Simulation, fault: Fault) -> None:
    """No space is left for a while, in one of the data directories or in all of them."""
    disk = simulation.disks[fault.target]
    faults = disk.faults
    all_of_them = tuple(simulation.directories_of(fault.target))
    among = 2 * len(all_of_them)
    number = int(fault.amount * among)
    full = all_of_them[number : number + 1] or all_of_them
    disk.await_effect(fault.kind, fault.lasts)
    if len(full) < len(all_of_them):
        disk.await_effect("disk_full_of_several", fault.lasts)
    for directory in full:
        simulation.lasting.begin(
            (fault.kind, directory),
            fault.lasts,
            partial(faults.full.setdefault, directory),
            partial(faults.full.pop, directory),
        )


@kind
def disk_write_error(simulation: Simulation, fault: Fault) -> None:
    """The next write fails halfway with EIO, or the next change of a name or of a size, with no effect."""
    faults = simulation.disks[fault.target].faults
    if fault.amount < 0.5:
        faults.fail_next_write = True
    else:
        faults.fail_next_change = True


@kind
def disk_sync_error(simulation: Simulation, fault: Fault) -> None:
    """The next sync fails with EIO, or the next one of a directory, which are rare among the journal's."""
    faults = simulation.disks[fault.target].faults
    if fault.amount < 0.6:
        faults.fail_next_sync = True
    else:
        faults.fail_next_sync_of_names = True


@kind
def disk_read_errors(simulation: Simulation, fault: Fault) -> None:
    """Reads fail with EIO, most of them or some, and succeed again later."""
    disk = simulation.disks[fault.target]
    disk.await_effect(fault.kind, fault.lasts)
    _change(simulation, fault, disk.faults, {"failing_reads": fault.amount})


@kind
def disk_bit_flip(simulation: Simulation, fault: Fault) -> bool:
    """Bits flip in what is stored."""
    disk = simulation.disks[simulation.dishonest]
    return sum(disk.flip_bit() for _ in range(1 + int(fault.amount * 4))) > 0


@kind
def disk_lost_write(simulation: Simulation, fault: Fault) -> None:
    """A group is reported durable and is not written."""
    simulation.disks[simulation.dishonest].faults.lose_next_write = True


@kind
def disk_misdirected_write(simulation: Simulation, fault: Fault) -> None:
    """A group is written elsewhere in its file."""
    simulation.disks[simulation.dishonest].faults.misdirect_next_write = True


@kind
def disk_wiped(simulation: Simulation, fault: Fault) -> bool:
    """A bookie's disk is replaced by an empty one: it is started on that, and is to refuse (rule 6)."""
    back_after = fault.lasts or simulation.fault_rng.uniform(0.3, 4.0)
    return simulation.wipe(simulation.dishonest, back_after=back_after)


# --- the metadata store ----------------------------------------------------------------------------


@kind
def meta_cut(simulation: Simulation, fault: Fault) -> bool:
    """A process does not reach the metadata store; its session ends if that lasts."""
    return simulation.cut_metadata(fault.target, fault.lasts) and simulation.is_up(fault.target)


@kind
def meta_lossy(simulation: Simulation, fault: Fault) -> bool:
    """Requests and answers are lost or late."""
    changes = {"lose_answer": 0.3 * fault.amount + 0.1, "late_request": 0.1, "lose_request": 0.1}
    _change(simulation, fault, simulation.metadata_faults(fault.target), changes)
    return simulation.is_up(fault.target)


@kind
def meta_slow(simulation: Simulation, fault: Fault) -> bool:
    """The store answers slowly."""
    changes = {"delay": (0.01, 0.05 + 0.8 * fault.amount)}
    _change(simulation, fault, simulation.metadata_faults(fault.target), changes)
    return simulation.is_up(fault.target)


@kind
def meta_lag(simulation: Simulation, fault: Fault) -> bool:
    """A process reads from a server that lags."""
    _change(simulation, fault, simulation.metadata_faults(fault.target), {"lags": True})
    return simulation.is_up(fault.target)


@kind
def meta_expire(simulation: Simulation, fault: Fault) -> bool:
    """A session ends though its client lives."""
    store = simulation.stores.get(fault.target)
    if store is None or not store.process.is_alive:
        return False
    store.expire_session()
    return True
