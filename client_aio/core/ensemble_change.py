"""A writer's changes to its ledger's metadata: ensemble changes, the close, and conflicts over both.

The theory, in the terms of ARCHITECTURE.md's rules.

*One change to the metadata* (`MetadataUpdate`, rule 10). A compare-and-set ends in one of three ways.

- It has happened: the change is done.
- It has definitely not happened, because the version was another. The metadata are read again, and the change
  is applied to the metadata found, or refused by them.
- Its outcome is unknown. Reading settles nothing, since the request may still take effect. The *same*
  compare-and-set is retried with the same token, until it has definitely happened or definitely conflicted.

*Metadata that refuse a change.* Other clients change a writer's ledger in two ways. A repair exchanges
bookies of fragments before the last one: the writer applies its change to the repaired fragments. A recovery
makes the ledger IN_RECOVERY, and then CLOSED: the writer is fenced, and fails. Only the writer and a recovery
ever change the last fragment of a ledger that is not CLOSED (rule 14). So a writer is fenced as well if the
last fragment is not the one that it knows.

*An ensemble change* (`EnsembleChangeMachine`, rule 9), step by step:

    failed ─▶ Find ─found─▶ [Copy ─copied─▶] Write ─written─▶ Reseat ─▶ done, or Find for what failed since
               │ ▲            │                └─refused: the writer withdraws
               │ └─Wait       └─a replacement failed: Abandon, then Find; below the ack quorum Find at once
               └─none found: Wait, or GiveUp below the ack quorum

- `Find` fixes the mask of seats to fill. Seats that fail while bookies are looked for are not part of it:
  together they make the next change. Fewer bookies than seats may be found. The other seats then stay failed,
  if every write set keeps Qa bookies.
- From `found` on the window is frozen. The first entry of the new fragment is captured there, once, and stays
  however often bookies are chosen again. Only the reseating or an `Abandon` unfreezes it.
- If the same bookies as before came back, nothing is written, but they are sent what they owe.
- With guaranteed write quorum the replacements hold their copies of acknowledged entries before the
  compare-and-set (`Copy`, rule 11). If one of them fails meanwhile, nobody has been told of the change yet.
  The change is then abandoned where the ack quorum holds without the replacements: writing goes on (rule 9),
  and bookies are looked for anew. Below the ack quorum the window stays frozen, and the change goes on with
  other bookies.

*A roll* begins a new fragment because the last one is large. It changes the whole ensemble, with nothing
outstanding:

    asked for ─▶ FindAll ─found─▶ Drain ─drained─▶ Write ─written─▶ Reseat ─▶ done
                    └─none found, or only seats that stay empty: the same ensemble goes on, and is written

- While the window drains it holds the entries that are added. A seat that fails meanwhile is replaced first
  if the drain depends on it; else the new fragment does without that bookie.
- So every entry below the new fragment's first is acknowledged when the change is written, and none is sent
  again.

Owns the order of these steps. Does not own the choice of bookies, sending, the timing of retries, or the
store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from metadata.model.ledger import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from client_aio.core.add_window import AddWindow
    from metadata.model.ledger import Fragment
    from metadata.store import Version

Token = TypeVar("Token")
Apply = Callable[[LedgerMetadata], LedgerMetadata | None]


@dataclass(frozen=True, slots=True)
class EnsembleChange:
    """The change to a new last fragment. `known` is the last fragment as the writer last wrote it."""

    first_entry: int
    bookies: tuple[str, ...]
    known: Fragment
    length: int = 0
    """Payload bytes below `first_entry`, which the metadata keep: no closing reads an earlier fragment."""

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return the metadata to write in place of these; None if they show that the writer is fenced."""
        if metadata.state is not LedgerState.OPEN or metadata.last_fragment != self.known:
            return None
        return metadata.change_ensemble(self.first_entry, self.bookies, length=self.length)

    def is_met_by(self, metadata: LedgerMetadata) -> bool:
        """Return whether metadata that refuse the change show that it has happened.

        Nobody else begins such a fragment. This decides when the answer was lost, and more repairs followed
        than the store remembers tokens.
        """
        made = replace(self.known, first_entry=self.first_entry, bookies=self.bookies)
        return metadata.state is LedgerState.OPEN and metadata.last_fragment == made


@dataclass(frozen=True, slots=True)
class Closing:
    """The change to CLOSED behind the writer's LAC."""

    last_entry: int
    length: int
    known: Fragment
    below_write_quorum_from: int | None = None
    """With guaranteed write quorum: the first entry that may have fewer than Qw copies."""

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return the metadata to write in place of these; None if the writer may not close the ledger."""
        if metadata.state is not LedgerState.OPEN or metadata.last_fragment != self.known:
            return None
        return metadata.close(
            self.last_entry, self.length, below_write_quorum_from=self.below_write_quorum_from
        )

    def is_met_by(self, metadata: LedgerMetadata) -> bool:
        """Return whether a recovery closed the ledger at the same end: the close has succeeded (rule 10)."""
        return metadata.is_closed and metadata.last_entry == self.last_entry


class Attempt(NamedTuple):
    """A compare-and-set to make. Each value of `number` needs a new token."""

    metadata: LedgerMetadata
    version: Version
    number: int


class MetadataUpdate:
    """One change to the metadata, until its outcome is definite.

    The caller makes each `attempt`, and reports a definite outcome with `written` or `conflicted`. An attempt
    whose outcome is unknown is not reported: `attempt` returns it again.
    """

    def __init__(self, metadata: LedgerMetadata, version: Version, apply: Apply) -> None:
        self.metadata = metadata
        self.version = version
        self._apply = apply
        self._number = 0
        self._wanted = apply(metadata)

    @property
    def is_refused(self) -> bool:
        """Return whether `metadata`, as other clients changed them, refuse the change."""
        return self._wanted is None

    def attempt(self) -> Attempt:
        """Return the compare-and-set to make now. Must not be called when the change is refused."""
        assert self._wanted is not None
        return Attempt(self._wanted, self.version, self._number)

    def written(self, version: Version) -> None:
        """Note that the attempt has definitely happened."""
        assert self._wanted is not None
        self.metadata, self.version = self._wanted, version

    def conflicted(self, metadata: LedgerMetadata, version: Version) -> None:
        """Note that the attempt has definitely not happened, and the metadata that are there instead."""
        self.metadata, self.version = metadata, version
        self._number += 1
        self._wanted = self._apply(metadata)


class Find(NamedTuple):
    """Find bookies for these seats, a mask of `target`; answer with `found` or `not_found`."""

    seats: int


class Wait(NamedTuple):
    """There are no bookies now: ask for the `next` step again after a pause.

    `is_frozen`: nothing is acknowledged until bookies are found; else writing goes on at the ack quorum.
    """

    is_frozen: bool


class Copy(NamedTuple):
    """Seat the replacements and send them the copies that they owe (`window.seat_replacements`).

    Answer with `copied` once the window awaits no copies. Then all copies are made, or a replacement has
    failed, perhaps one of an earlier `Copy` of the same change.
    """

    bookies: tuple[str, ...]
    seats: int


class Abandon(NamedTuple):
    """Vacate the replacements' seats and unfreeze (`window.abandon_change`); answer with `abandoned`."""


class FindAll(NamedTuple):
    """Find bookies for a whole new fragment; answer with `found_all`, `not_found_all`, or `roll_later`."""


class Drain(NamedTuple):
    """Wait until everything sent is acknowledged, or a seat fails that is not in the mask `failed`.

    Answer with `drained`.
    """

    failed: int


class Write(NamedTuple):
    """Write the change; answer with `written`. If the change is refused, the writer has failed."""

    change: EnsembleChange


class Reseat(NamedTuple):
    """Put the bookies into these seats and unfreeze (`window.commit_change`); answer with `reseated`."""

    bookies: tuple[str, ...]
    seats: int


class GiveUp(NamedTuple):
    """Writing cannot go on."""

    why: str


Step = Find | Wait | Copy | Abandon | FindAll | Drain | Write | Reseat | GiveUp | None
"""None: nothing is to be done."""


class EnsembleChangeMachine(Generic[Token]):
    """Decides the steps of ensemble changes, one change at a time.

    Args:
        fragment: the last one of the ledger's metadata.
        changes_max: how many changes there may be in all. A roll resets the count.
    """

    def __init__(self, window: AddWindow[Token], fragment: Fragment, changes_max: int) -> None:
        self._window = window
        self._changes_max = changes_max
        self._asked = 0  # the seats of the last `Find`
        self._seats = 0  # seats of the change under way
        self._first_entry: int | None = None
        self.is_roll_due = False
        self._is_another_due = False  # requested when a roll had begun
        # The bookies of the roll, and the mask of seats whose bookies are new. No bookies: the ensemble that
        # is seated when the roll is written.
        self._rolling: tuple[tuple[str, ...], int] | None = None
        self._is_rolled = False  # the change under way is the roll itself
        self.fragment = fragment
        self.target = fragment.bookies
        self.changes = 0

    @classmethod
    def of(cls, window: AddWindow[Token], metadata: LedgerMetadata, changes_max: int) -> Self:
        """Begin with the last fragment, and allow only as many changes as the metadata have room for."""
        return cls(window, metadata.last_fragment, metadata.changes_that_fit(changes_max))

    @property
    def is_rolling(self) -> bool:
        """Return whether a roll has begun."""
        return self._rolling is not None

    def roll(self) -> None:
        """Request a new fragment, after the change under way; `next` returns its steps.

        A roll that has begun holds back the entries added since. They lie in its new fragment. If another
        roll is requested meanwhile, it comes after them.
        """
        self._is_another_due = self._rolling is not None
        self.is_roll_due = True

    def next(self) -> Step:
        """Return the step to make about seats that have failed, and about a roll that is due."""
        if self._rolling is not None and self._first_entry is None:
            return self.drained()
        self._asked = self._window.failed
        if not self._asked:
            return FindAll() if self.is_roll_due else None
        if self.changes >= self._changes_max and self._first_entry is None:
            return self._go_on_without(
                f"its ensemble has been changed {self.changes} times, which is all there may be"
            )
        return Find(self._asked)

    def not_found(self) -> Step:
        """Go on without replacements while every write set keeps its ack quorum (rule 9)."""
        return self._go_on_without("there is no other bookie")

    def _go_on_without(self, why: str) -> Step:
        if self._first_entry is not None:
            return Wait(is_frozen=True)
        if not self._window.can_acknowledge:
            return GiveUp(f"some write set has fewer than {self._window.ack_quorum} bookies left, and {why}")
        if self._rolling is not None:
            return Drain(self._window.failed)
        if self.is_roll_due:
            return self.not_found_all()
        return Wait(is_frozen=False)

    def found_all(self, bookies: tuple[str, ...]) -> Step:
        """Begin a roll to new bookies, which are connected."""
        return self._begin_roll(bookies, (1 << len(bookies)) - 1)

    def not_found_all(self) -> Step:
        """Begin a roll to the same bookies, including failed ones."""
        return self._begin_roll((), 0)

    def roll_later(self) -> Step:
        """Drop the roll: it may be requested again later."""
        self.is_roll_due = False
        return self.next()

    def _begin_roll(self, bookies: tuple[str, ...], seats: int) -> Step:
        self._rolling = bookies, seats
        self._window.is_holding = True
        return self.drained()

    def drained(self) -> Step:
        """Write the new fragment if everything sent is acknowledged; else go on draining."""
        assert self._rolling is not None
        if not self._window.is_drained:
            self._asked = self._window.failed
            is_stuck = self._asked and not self._window.can_acknowledge
            return Find(self._asked) if is_stuck else Drain(self._window.failed)
        self._is_rolled = True
        self._first_entry = self._window.begin_change()
        bookies, self._seats = self._rolling
        # The present ensemble may have changed since the roll began.
        self.target = bookies or self.fragment.bookies
        return Write(self._change_at(self._first_entry))

    def found(self, bookies: tuple[str, ...], filled: int | None = None) -> Step:
        """Begin, or continue, the change to an ensemble whose new bookies are connected.

        Args:
            filled: the mask of the seats that have new bookies; None for all that were asked for. The others
                stay failed, with the bookies that they have: the caller has found that Qa holds in each
                write set (rule 9).
        """
        filled = self._asked if filled is None else filled
        if self._first_entry is None:
            self._first_entry = self._window.begin_change()
        self.target = bookies
        self._seats |= filled
        if self._window.copies_first:
            return Copy(bookies, filled)
        return self._write()

    def copied(self) -> Step:
        """Write the change if the replacements hold their copies; go on without them if one has failed."""
        if self._window.failed & self._seats:
            return Abandon() if self._window.can_abandon else self.next()
        assert not self._window.seats_owing & self._window.replacements
        return self._write()

    def abandoned(self) -> Step:
        """Note that the window goes on with the ensemble of the metadata; bookies are looked for anew."""
        self.target = self.fragment.bookies
        self._first_entry, self._seats = None, 0
        return self.next()

    def _write(self) -> Step:
        assert self._first_entry is not None
        if self.target == self.fragment.bookies:
            return Reseat(self.target, self._seats)
        return Write(self._change_at(self._first_entry))

    def _change_at(self, first_entry: int) -> EnsembleChange:
        return EnsembleChange(first_entry, self.target, self.fragment, self._window.length_before_change)

    def written(self) -> Step:
        """Note that the compare-and-set has definitely happened."""
        assert self._first_entry is not None
        self.fragment = replace(self.fragment, first_entry=self._first_entry, bookies=self.target)
        self.changes = 0 if self._is_rolled else self.changes + 1
        return Reseat(self.target, self._seats)

    def reseated(self) -> Step:
        """Note that the window goes on; seats that failed meanwhile make the next change."""
        if self._is_rolled:
            self._rolling, self._window.is_holding = None, False
            self.is_roll_due, self._is_another_due = self._is_another_due, False
        self._first_entry, self._seats, self._is_rolled = None, 0, False
        return self.next()
