"""Changes of an unbounded ledger's head: which are legal, and who may make them.

Owns the check of one change, for `tests.sim.checkers.unbounded_lifecycle`. The head does not say who wrote
it. So a client that is about to trim, to seal or to repair tells the record first, with its term. A new
fragment begins where the term's holder, whose handle the record has, acknowledges nothing more until it is
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from metadata.model.ledger import Fragment, LedgerMetadata
    from tests.sim.checkers.unbounded_lifecycle import Life, Lives

_OPEN, _TAKEN, _SEALED = LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED


def check_change(lives: Lives, life: Life, before: LedgerMetadata, listed: list[Fragment]) -> None:
    """Check a change of a ledger's head.

    Args:
        listed: the fragments that there were before, those in pages too.
    """
    after, new = life.metadata, life.fragments
    assert after is not None
    what = f"ledger {life.ledger_id}, {_shown(before, listed)} ⇒ {_shown(after, new)}"
    terms = [fragment.content_term for fragment in new]
    lives.require(terms == sorted(terms), "TermsCount", what)
    if after.first_entry != before.first_entry:
        _check_trim(lives, life, before, after, what)
    old = [each for each in listed if each.first_entry >= after.first_entry]
    _check_length(lives, life, after, what)
    if after.term != before.term:
        is_taken = after.term == before.term + 1 and after.state is _TAKEN and before.state is not _SEALED
        lives.require(is_taken, "TermsCount", what)
        lives.require(old == new, "HeadsChangeAsWritten", what)
        return
    match before.state, after.state:
        case (LedgerState.IN_RECOVERY, LedgerState.OPEN):
            lives.require(_is_opening(old, new, after.term), "HeadsChangeAsWritten", what)
            _check_behind(lives, life, after)
        case (LedgerState.OPEN, LedgerState.OPEN) if old != new and not _is_repair(old, new):
            is_written = new[:-1] in (old, old[:-1]) and new[-1].content_term == after.term
            lives.require(is_written, "HeadsChangeAsWritten", what)
            _check_behind(lives, life, after)
            _check_frozen(lives, life, after, what)
        case (LedgerState.OPEN, LedgerState.CLOSED):
            lives.require(old == new, "HeadsChangeAsWritten", what)
            _check_seal(lives, life, after, what)
        case _:
            lives.require(before.state is after.state, "HeadsChangeAsWritten", what)
            if before.is_closed:
                is_same = (before.last_entry, before.length) == (after.last_entry, after.length)
                lives.require(is_same, "SealsAreKept", what)
            if old != new:
                is_repair = _is_repair(old, new, is_sealed=after.is_closed)
                lives.require(is_repair, "HeadsChangeAsWritten", what)
                _check_repair(lives, life, after, old, new, what)


def _check_length(lives: Lives, life: Life, after: LedgerMetadata, what: str) -> None:
    assert after.unbounded is not None
    given, end = after.length_before, after.last_fragment.first_entry
    if after.length is not None and after.last_entry is not None:
        given, end = after.length, after.last_entry + 1
    length = life.length_below(end)
    text = f"length {given} below {end}, which is {length}: {what}"
    lives.require(length in (None, given), "LengthsAreRight", text)


def _is_opening(old: list[Fragment], new: list[Fragment], term: int) -> bool:
    """Return whether a takeover has opened a term: what it found, perhaps on other bookies, and its own."""
    *kept, own = new
    settled, found = old[:-1], kept[len(old) - 1 :]
    return (
        own.content_term == term
        and kept[: len(settled)] == settled
        and all(each.content_term == old[-1].content_term for each in found)
    )


def _is_repair(old: list[Fragment], new: list[Fragment], *, is_sealed: bool = False) -> bool:
    """Return whether bookies are exchanged in one fragment that is not the last, or is a sealed ledger's."""
    if [(each.first_entry, each.content_term) for each in old] != [
        (each.first_entry, each.content_term) for each in new
    ]:
        return False
    changed = [(was, now) for was, now in zip(old, new, strict=True) if was != now]
    return len(changed) == 1 and (is_sealed or changed[0][0] is not old[-1])


def _check_repair(
    lives: Lives, life: Life, after: LedgerMetadata, old: list[Fragment], new: list[Fragment], what: str
) -> None:
    index = next(index for index, was in enumerate(old) if was != new[index])
    lost = set(old[index].bookies) - set(new[index].bookies)
    took = set(new[index].bookies) - set(old[index].bookies)
    lives.require(len(lost) == 1 and lost <= life.repairs, "HeadsChangeAsWritten", what)
    following = new[index + 1].first_entry if index + 1 < len(new) else (after.last_entry or 0) + 1
    # Entries that no bookie returned are recorded, and their number (`Absent`).
    absent = sum(
        one.entries
        for one in after.absent
        if one.first_entry == new[index].first_entry and one.bookie in lost
    )
    size, has_shown = after.ensemble_size, lives.words.has_shown
    for bookie in took:
        owed = [
            entry_id
            for entry_id in range(new[index].first_entry, following)
            if bookie in [new[index].bookies[(entry_id + each) % size] for each in range(after.write_quorum)]
        ]
        lacking = [entry_id for entry_id in owed if not has_shown(bookie, life.ledger_id, entry_id)]
        text = f"{bookie} has never shown {lacking}, with {absent} recorded as absent: {what}"
        lives.require(len(lacking) <= absent, "RepairsCopyFirst", text)


def _check_trim(lives: Lives, life: Life, before: LedgerMetadata, after: LedgerMetadata, what: str) -> None:
    first = after.first_entry
    holder = life.holder(after.term)
    asked = -1 if holder is None else holder.trims
    firsts = [first_entry for first_entry, _ in life.listed]
    text = f"the holder of term {after.term} asked for {asked}: {what}"
    is_asked = before.first_entry < first <= asked and first in firsts
    lives.require(is_asked, "TrimsAreAskedFor", text)


def _check_seal(lives: Lives, life: Life, after: LedgerMetadata, what: str) -> None:
    handle, last = life.holder(after.term), after.last_entry
    lives.require(handle is not None and handle.seals, "SealsAreKept", f"nobody asked: {what}")
    assert last is not None
    if handle is not None:
        lac = handle.ledger.last_add_confirmed
        lives.require(lac == last, "SealsAreKept", f"its holder's last entry is {lac}: {what}")
    beyond = sorted(entry_id for entry_id in life.known() if entry_id > last)
    lives.require(not beyond, "SealsAreKept", f"acknowledged or read are {beyond}: {what}")


def _check_behind(lives: Lives, life: Life, after: LedgerMetadata) -> None:
    first = after.last_fragment.first_entry
    beyond = sorted(entry_id for entry_id in life.known() if entry_id >= first)
    text = f"term {after.term} has a fragment at {first}; acknowledged or read are {beyond}"
    lives.require(not beyond, "AllCommittedIdsAreReadable", text)


def _check_frozen(lives: Lives, life: Life, after: LedgerMetadata, what: str) -> None:
    handle = life.holder(after.term)
    if handle is not None:
        lac = handle.ledger.last_add_confirmed
        is_next = after.last_fragment.first_entry == lac + 1
        lives.require(is_next, "HeadsChangeAsWritten", f"its holder's last entry is {lac}: {what}")


def _shown(metadata: LedgerMetadata, fragments: list[Fragment]) -> str:
    rows = " ".join(f"{each.first_entry}·{each.content_term}:{','.join(each.bookies)}" for each in fragments)
    span = f"{metadata.first_entry} to {metadata.last_entry}"
    return f"{metadata.state.value} {metadata.term} from {span} [{rows}]"
