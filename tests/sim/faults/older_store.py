"""The metadata store is set back: an older copy of its data is put in the place of the present ones.

Owns the kind `metadata_set_back`, and its consequences for the history.

- A copy is taken, and put back after `lasts`. All sessions end. All clients end, as programs do whose store
  was away for long; the plan has others for afterwards. The bookies are started again. They go on where
  `amount` is above 0.95. The id floor is that of the copy.
- A ledger whose metadata are not as in the copy is *of before*. Nobody is to read it now. Its bookies have to
  keep it, since the newest metadata may come back.
- A ledger of before that no bookie has answered for is forgotten: nothing can tell that its id is taken.
- In half of the runs the newest metadata come back when the faults end. Then all ledgers of before are
  checked, and those that were made meanwhile are gone. In the others the older copy stays, and the ledgers
  that it knows are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.ids import KEY_ID_FLOOR, ledger_key
from metadata.model.ledger import LedgerMetadata
from tests.sim.faults.kinds import kind

if TYPE_CHECKING:
    from tests.sim.checkers.invariants import History
    from tests.sim.cluster.metadata import TreeCopy
    from tests.sim.plan import Fault
    from tests.sim.simulation import Simulation

KIND = "metadata_set_back"
_GOES_ON_ABOVE = 0.95
_BACK_AFTER_S = 0.2


@kind
def metadata_set_back(simulation: Simulation, fault: Fault) -> None:
    """The metadata store is as it was `lasts` ago."""
    simulation.after(fault.lasts, _set_back, simulation, fault, simulation.tree.copied())


def _set_back(simulation: Simulation, fault: Fault, older: TreeCopy) -> None:
    tree, history = simulation.tree, simulation.history
    if simulation.is_healed or simulation.is_store_set_back:
        return
    for actor in simulation.plan.actors:
        simulation.stop_client(actor.name)
    simulation.is_store_set_back = True
    newest = tree.copied()
    for record in history.ledgers.values():
        key = ledger_key(record.ledger_id)
        record.is_of_before = not older.has_same(key, newest) and not record.is_gone
        if record.is_gone:  # The older copy may have it, or not know the deletion: a creation may try its id.
            record.metadata, record.version = None, 0
    unheard_of = [
        one for one in history.ledgers if history.ledger(one).is_of_before and not _is_known(history, one)
    ]
    for ledger_id in unheard_of:
        del history.ledgers[ledger_id]
    simulation.forget_ledgers(unheard_of)
    tree.set_back(older)
    history.words.floor_set_back(older.value(KEY_ID_FLOOR))
    history.note("fault", fault.kind, f"the metadata are as they were at {fault.at:.3f} s")
    simulation.stats[fault.kind] += 1
    if fault.amount <= _GOES_ON_ABOVE:
        for number, name in enumerate(simulation.plan.bookies):
            back_after = _BACK_AFTER_S * (1 + number * simulation.fault_rng.random())
            simulation.stop_bookie(name, has_power=True, back_after=back_after)
    if fault.other == "newest comes back":
        simulation.when_healing.append(lambda: _put_newest_back(simulation, newest, set(unheard_of)))


def _is_known(history: History, ledger_id: int) -> bool:
    """Return whether a bookie has promised anything of a ledger."""
    words = history.words
    return any(one == ledger_id for _, one in [*words.promised, *words.fenced])


def _put_newest_back(simulation: Simulation, newest: TreeCopy, unheard_of: set[int]) -> None:
    """Put the newest metadata back: what was made on the older ones is gone."""
    history = simulation.history
    simulation.tree.set_back(newest)
    history.words.floor_set_back(newest.value(KEY_ID_FLOOR))
    history.note("phase", "the newest metadata are back")
    for name in simulation.plan.bookies:
        simulation.stop_bookie(name, has_power=True, back_after=None)
    for record in history.ledgers.values():
        node = simulation.tree.find(ledger_key(record.ledger_id))
        if node is None or node.value is None or record.ledger_id in unheard_of:
            record.is_gone = True
        elif record.is_of_before:
            record.is_of_before = False
        else:  # it may have been recovered meanwhile, and is not now
            record.metadata = LedgerMetadata.from_json(node.value)
            record.version = node.number
