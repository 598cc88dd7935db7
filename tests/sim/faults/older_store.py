"""The metadata store is set back: an older copy of its data is put in the place of the present ones.

Owns the kinds `metadata_set_back` and `both_set_back`, and their consequences for the history.

- A copy is taken, and put back after `lasts`. The id floor and the events are those of the copy.
- The bookies are started again. They go on where `amount` is above that of the kind. Of `both_set_back` one
  bookie's directories are copied at the same moment as the metadata, and are put back with them.
- All sessions end. Where the bookies go on and the seed is even, they live on, and what they registered is
  gone: as where another file is put in the place of an SQLite store.
- All clients end, as programs do whose store was away for long; the plan has others for afterwards. With
  `CLIENTS_GO_ON` in `other` they go on, with what they know of the metadata of before.
- A ledger whose metadata are not as in the copy is *of before* (`tests.sim.checkers.older_metadata`).
- A ledger of before that no bookie has answered for is forgotten: nothing can tell that its id is taken. The
  client that made it ends.
- With `NEWEST_RETURNS` in `other` the newest metadata come back when the faults end. Then all ledgers of
  before are checked, and those that were made meanwhile are gone. Otherwise the older copy stays, and the
  ledgers that it knows are checked.

Also owns `holder_killed`, which has a ledger change its ensemble, or kills a bookie that no change replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.ids import ledger_key
from metadata.model.ledger import LedgerMetadata
from tests.sim.checkers import older_metadata
from tests.sim.faults.files import image_of, put_back
from tests.sim.faults.kinds import kind

if TYPE_CHECKING:
    from tests.sim.checkers.invariants import History
    from tests.sim.cluster.metadata import TreeCopy
    from tests.sim.plan import Fault
    from tests.sim.simulation import Simulation

CLIENTS_GO_ON = "clients go on"
NEWEST_RETURNS = "newest comes back"
_GOES_ON_ABOVE = 0.95
_GOES_ON_ABOVE_WITH_CLIENTS = 0.5
_BACK_AFTER_S = 0.2


@kind
def metadata_set_back(simulation: Simulation, fault: Fault) -> None:
    """The metadata store is as it was `lasts` ago."""
    simulation.after(fault.lasts, _set_back, simulation, fault, simulation.tree.copied())


@kind
def both_set_back(simulation: Simulation, fault: Fault) -> None:
    """The metadata store and the directories of one bookie are as they were `lasts` ago.

    The copies are of one moment, at which all run. `target` is a bookie that is down afterwards, for as many
    seconds as `amount`; "" for none.
    """
    victim, tree = simulation.dishonest, simulation.tree.copied()
    image = image_of(simulation.disks[victim])

    def go_back() -> None:
        if not _may_be_set_back(simulation):
            return
        simulation.stop_bookie(victim, has_power=True, back_after=_BACK_AFTER_S)
        put_back(simulation, image)
        if fault.target:
            simulation.stop_bookie(fault.target, has_power=True, back_after=fault.amount)
        _set_back(simulation, fault, tree)

    simulation.after(fault.lasts, go_back)


def _may_be_set_back(simulation: Simulation) -> bool:
    return not simulation.is_healed and not simulation.is_store_set_back


def _set_back(simulation: Simulation, fault: Fault, older: TreeCopy) -> None:
    tree, history = simulation.tree, simulation.history
    if not _may_be_set_back(simulation):
        return
    clients_go_on = CLIENTS_GO_ON in fault.other
    if not clients_go_on:
        for actor in simulation.plan.actors:
            simulation.stop_client(actor.name)
    simulation.is_store_set_back = True
    starting = {
        name for name in simulation.plan.bookies if simulation.is_up(name)
    } - simulation.bookies.keys()
    simulation.starting_at_set_back |= starting
    history.is_set_back_told = False
    newest = tree.copied()
    unheard_of = _compare(simulation, older, newest)
    for ledger_id in unheard_of:
        del history.ledgers[ledger_id]
    simulation.forget_ledgers(unheard_of, are_others_chosen=clients_go_on)
    goes_on_above = _GOES_ON_ABOVE_WITH_CLIENTS if clients_go_on else _GOES_ON_ABOVE
    are_restarted = fault.kind == both_set_back.__name__ or fault.amount <= goes_on_above
    tree.set_back(older, keeps_sessions=not are_restarted and simulation.plan.seed % 2 == 0)
    history.words.set_back(older)
    history.note("fault", fault.kind, f"the metadata are as they were at {fault.at:.3f} s")
    simulation.stats[fault.kind] += 1
    if are_restarted:
        for number, name in enumerate(simulation.plan.bookies):
            back_after = _BACK_AFTER_S * (1 + number * simulation.fault_rng.random())
            simulation.stop_bookie(name, has_power=True, back_after=back_after)
    if NEWEST_RETURNS in fault.other:
        simulation.when_healing.append(lambda: _put_newest_back(simulation, newest, set(unheard_of)))


def _compare(simulation: Simulation, older: TreeCopy, newest: TreeCopy) -> list[int]:
    """Note which ledgers are of before. Returns those of them that no bookie has answered for."""
    history = simulation.history
    unheard_of = []
    for record in history.ledgers.values():
        ledger_id, key = record.ledger_id, ledger_key(record.ledger_id)
        if record.is_gone:  # The older copy may have it, or not know the deletion: a creation may try its id.
            record.metadata, record.version = None, 0
            older_metadata.begin(record, older.value(key))
            record.is_excused = True
        elif older.has_same(key, newest):
            if record.metadata is not None:
                simulation.ledgers_of_copy.append(ledger_id)
        elif _is_known(history, ledger_id):
            older_metadata.begin(record, older.value(key))
            if record.older is not None:
                simulation.ledgers_of_copy.append(ledger_id)
        else:
            unheard_of.append(ledger_id)
    return unheard_of


def _is_known(history: History, ledger_id: int) -> bool:
    """Return whether a bookie has promised anything of a ledger."""
    words = history.words
    return any(one == ledger_id for _, one in [*words.promised, *words.fenced])


def _put_newest_back(simulation: Simulation, newest: TreeCopy, unheard_of: set[int]) -> None:
    """Put the newest metadata back: what was made on the older ones is gone."""
    history = simulation.history
    simulation.tree.set_back(newest)
    history.words.set_back(newest)
    history.note("phase", "the newest metadata are back")
    for name in simulation.plan.bookies:
        simulation.stop_bookie(name, has_power=True, back_after=None)
    for record in history.ledgers.values():
        node = simulation.tree.find(ledger_key(record.ledger_id))
        if node is None or node.value is None or record.ledger_id in unheard_of:
            record.is_gone = True
            continue
        if not record.is_of_before:  # it may have been recovered meanwhile, and is not now
            record.metadata = LedgerMetadata.from_json(node.value)
            record.version = node.number
        older_metadata.end(record)


# --- ensembles that change behind the copy ---------------------------------------------------------


@kind
def holder_killed(simulation: Simulation, fault: Fault) -> bool:
    """A bookie of the newest open ledger is killed, so that another one takes its seat.

    After a set-back: a bookie that both the copy and the newest metadata have in a ledger of before. What it
    has not is on bookies that the copy does not name.
    """
    names = _holders(simulation)
    if not names:
        return False
    name = simulation.fault_rng.choice(names)
    return simulation.stop_bookie(name, has_power=True, back_after=fault.lasts)


def _holders(simulation: Simulation) -> list[str]:
    for record in reversed(simulation.history.ledgers.values()):
        metadata = record.metadata
        if metadata is None or record.is_gone or metadata.is_unbounded:
            continue
        names = set(metadata.last_fragment.bookies)
        if simulation.is_store_set_back:
            if record.older is None or record.older.is_closed:
                continue
            names &= set(record.older.last_fragment.bookies)
        elif metadata.is_closed:
            continue
        if found := sorted(name for name in names if simulation.is_up(name)):
            return found
    return []
