"""The add window: adds in flight, what is acknowledged, and what an ensemble change does to both.

The theory, in the terms of ARCHITECTURE.md's rules:

- All adds of one turn of the loop form a *turn* (while an earlier one is under way, those of several):
  contiguous entry ids, cut into one *batch* per write set (a single batch where E = Qw). A batch is the unit
  that is sent, stored and acknowledged.
- A batch is replicated when Qa bookies of its write set have acknowledged it. A turn is acknowledged when
  its batches are replicated and every earlier turn is acknowledged: then the LAC is its last entry (rule 1).
- A failed bookie's acknowledgements stay valid until it is replaced: it stored what it acknowledged. While
  it is not replaced, nothing is sent to it, and the window goes on as long as every write set keeps Qa
  bookies (rule 9).
- `begin_change` captures the first entry of the new fragment, LAC + 1, once, and freezes the LAC: from
  then until the outcome of the compare-and-set is known nothing is acknowledged. `commit_change` puts the
  new bookies in, forgets the acknowledgements of the replaced ones, and says what is to be resent: every
  batch not acknowledged that a new bookie owes. Each seat (index in the ensemble) has an *epoch* that
  counts its occupants' turns; an acknowledgement names the epoch it was sent under, and one of an earlier
  epoch counts for nothing.

- With *guaranteed write quorum* (rule 11) a turn that was acknowledged is *retained*, with what it takes to
  send it again, until the whole write set of each of its batches has it; the last entry of the last turn
  released so is the LAFR. An ensemble change then starts at LAFR + 1, and `seat_newcomers` gives the new
  bookies what they owe of (LAFR, LAC] before the compare-and-set; `owes_copies` tells whether they have it.
  Until then `abandon_change` takes all of it back: the seats are empty, as those of failed bookies are.
- A window that *holds* takes entries and forms no turns of them, so that all that was sent can be
  acknowledged: then the next id is LAC + 1, and a fragment that begins there begins with nothing outstanding.
- With *deferred sync* an acknowledgement says no more than that a bookie has received a batch. A turn that
  Qa bookies received is reported, and retained until Qa of those bookies have answered a *force* that was
  sent to them behind it over the same connection, which is to say to the same process: only then does the
  LAC pass it. A new occupant of a seat has received nothing and forced nothing.

Owns: entry ids, running length, LAC, LAP, who acknowledged what. Does not own: sockets, timers, metadata.

Invariants: retained turns, turns, and what is not sent yet are contiguous, in this order, and end at LAP;
LAFR ≤ LAC; neither moves while frozen; batch.acks holds only seats of the batch's write set, in their present
epoch, and batch.forced only seats of batch.acks.

Entry ids that the application assigns: what arrives out of order waits until it is contiguous.

Owns the entries behind a gap. An id may be given once: one that has been taken, or waits, is refused, since
two payloads under one id cannot both be what the reader gets.

Invariant: every id below `following` was taken; no id that waits is `following`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Generic, NamedTuple, TypeVar

from bookie_aio.wire.blocks import encode_block
from client_aio.core.quorum import can_acknowledge, indexes_of, write_set_masks
from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY

Token = TypeVar("Token")

BATCH_ENTRIES_MAX = 4096
BATCH_BYTES_MAX = 512 * 1024
_SPREAD_MAX = 8
"""Of how many batches the bytes of a turn are taken together at most."""
GATHERED_BYTES_MAX = 64 * 1024
ENTRY_OVERHEAD_BYTES = 128
"""What an entry in flight costs beyond its payload; counted, so that empty entries are bounded too."""

Codes = Callable[[int, int, Sequence[int], Sequence[int], Sequence[bytes]], Sequence[bytes]]


class Batch:
    """Entries of one turn and one write set, encoded once and sent as they are to each bookie."""

    __slots__ = ("acks", "block", "count", "first_entry", "forced", "mask")

    def __init__(self, first_entry: int, count: int, mask: int, block: bytes) -> None:
        self.first_entry = first_entry
        self.count = count
        self.mask = mask
        self.block = block
        self.acks = 0
        self.forced = 0


class AddGroup(Generic[Token]):
    """Contiguous entries that are acknowledged together."""

    __slots__ = ("batches", "bytes_held", "first_entry", "last_entry", "length", "tokens")

    def __init__(
        self, first_entry: int, tokens: list[Token], batches: list[Batch], length: int, bytes_held: int
    ) -> None:
        self.first_entry = first_entry
        self.last_entry = first_entry + len(tokens) - 1
        self.tokens = tokens
        self.batches = batches
        self.length = length  # of the ledger, up to and including the last entry
        self.bytes_held = bytes_held


class Send(NamedTuple):
    """A batch to be sent to a seat; the answer is to be reported under this epoch."""

    seat: int
    epoch: int
    batch: Batch


class AddWindow(Generic[Token]):
    """The adds of one writer (or of one recovery) that are not acknowledged yet.

    Args:
        next_entry: id of the first entry that will be added; everything below is acknowledged.
        length: payload bytes of the ledger below `next_entry`.
        stated_lac: None for a writer, whose batches state the LAC of the moment. A recovery states the
            LAC it found when it began, frozen (rule 12c), and so with `stated_lafr`.
        codes: gives the authentication codes of a batch; None without.
        guaranteed_write_quorum: retain what is acknowledged until all of its write set have it (rule 11).
        deferred_sync: acknowledgements are receipts, and forces make durable.
    """

    def __init__(
        self,
        *,
        ledger_id: int,
        content_term: int,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        next_entry: int = 0,
        length: int = 0,
        stated_lac: int | None = None,
        stated_lafr: int | None = None,
        codes: Codes | None = None,
        guaranteed_write_quorum: bool = False,
        deferred_sync: bool = False,
    ) -> None:
        assert not (guaranteed_write_quorum and deferred_sync)
        self.ledger_id = ledger_id
        self.content_term = content_term
        self.ensemble_size = ensemble_size
        self.write_quorum = write_quorum
        self.ack_quorum = ack_quorum
        self.lac = next_entry - 1
        self.length_confirmed = length
        self.length_pushed = length
        self.bytes_held = 0
        self.failed = 0
        self._stated_lac = stated_lac
        self._codes = codes
        self._is_guaranteed = guaranteed_write_quorum
        self._is_deferred = deferred_sync
        self.retains = guaranteed_write_quorum or deferred_sync
        self.lafr = next_entry - 1 if guaranteed_write_quorum else NO_ENTRY
        self._stated_lafr = stated_lafr
        self._frozen = False
        self.is_holding = False
        self.replacements = 0  # seats whose new bookies have got copies, and nothing beyond the LAC
        self._received = next_entry - 1  # the last entry reported, which the LAC may be behind
        self._next_entry = next_entry  # of the first entry not sent yet
        self._payloads: list[bytes] = []
        self._tokens: list[Token] = []
        self._retained: deque[AddGroup[Token]] = deque()
        self._turns: deque[AddGroup[Token]] = deque()
        self._epochs = [0] * ensemble_size
        self._masks = write_set_masks(ensemble_size, write_quorum)

    @property
    def last_add_pushed(self) -> int:
        """Return the id of the last entry taken."""
        return self._next_entry + len(self._payloads) - 1

    @property
    def lac_to_state(self) -> int:
        """Return the LAC that entries sent now state."""
        return self.lac if self._stated_lac is None else self._stated_lac

    @property
    def lafr_to_state(self) -> int:
        """Return the LAFR that entries sent now state; −1 without guaranteed write quorum."""
        return self.lafr if self._stated_lafr is None else self._stated_lafr

    @property
    def last_entry_reported(self) -> int:
        """Return the last entry given back in a turn: acknowledged, or (deferred sync) received by Qa."""
        return self._received if self._is_deferred else self.lac

    @property
    def last_entry_sent(self) -> int:
        """Return the last entry that `flush` has formed a turn of."""
        return self._next_entry - 1

    @property
    def is_idle(self) -> bool:
        """Return whether everything taken has been acknowledged, and nothing is retained."""
        return not self._turns and not self._payloads and not self._retained

    @property
    def is_frozen(self) -> bool:
        """Return whether an ensemble change is in flight."""
        return self._frozen

    @property
    def is_drained(self) -> bool:
        """Return whether everything sent has been acknowledged, and nothing is retained."""
        return not self._turns and not self._retained

    @property
    def has_unsent(self) -> bool:
        """Return whether entries wait for `flush`."""
        return bool(self._payloads)

    @property
    def should_gather(self) -> bool:
        """Return whether what is not sent yet had better wait for more: it is little, and a turn is under
        way.

        A batch costs its sender and each of its bookies much the same, whatever is in it (Nagle, RFC 896).
        """
        if not self._turns:
            return False
        unsent = sum(map(len, self._payloads)) + ENTRY_OVERHEAD_BYTES * len(self._payloads)
        return unsent < GATHERED_BYTES_MAX

    @property
    def can_acknowledge(self) -> bool:
        """Return whether every write set still has Qa bookies that have not failed."""
        return not self.failed or can_acknowledge(
            self.failed, self.ensemble_size, self.write_quorum, self.ack_quorum
        )

    def add(self, payload: bytes, token: Token) -> None:
        """Take an entry, under the next id; it is sent at the next `flush`."""
        self._payloads.append(payload)
        self._tokens.append(token)
        self.bytes_held += len(payload) + ENTRY_OVERHEAD_BYTES

    def flush(self) -> list[Send]:
        """Form turns of what was added since, and say what is to be sent where."""
        if self.is_holding:
            return []
        payloads, tokens = self._payloads, self._tokens
        self._payloads, self._tokens = [], []
        sends: list[Send] = []
        first_entry, start = self._next_entry, 0
        count = len(payloads)
        self._next_entry += count
        if count == 1:  # as most are where many ledgers are written at once
            turn = self._form_turn(first_entry, payloads, tokens, [self.length_pushed + len(payloads[0])])
            self._turns.append(turn)
            batch = turn.batches[0]
            return self._sends(batch, batch.mask & ~self.failed & ~self.replacements)
        running = list(accumulate(map(len, payloads), initial=self.length_pushed))[1:]
        while start < count:
            stop = self._turn_end(running, start)
            turn = self._form_turn(
                first_entry + start, payloads[start:stop], tokens[start:stop], running[start:stop]
            )
            self._turns.append(turn)
            for batch in turn.batches:
                sends += self._sends(batch, batch.mask & ~self.failed & ~self.replacements)
            start = stop
        return sends

    def acknowledged(self, send: Send) -> list[AddGroup[Token]]:
        """Note that a seat's bookie stored a batch; returns the turns that are acknowledged by it."""
        seat, epoch, batch = send
        if epoch != self._epochs[seat]:
            return []
        batch.acks |= 1 << seat
        return self._advance()

    def fail(self, seat: int, epoch: int) -> bool:
        """Note that a seat's bookie failed; returns False where that was known, or concerns a former one."""
        bit = 1 << seat
        if epoch != self._epochs[seat] or self.failed & bit:
            return False
        self.failed |= bit
        return True

    def epoch(self, seat: int) -> int:
        """Return the present epoch of a seat."""
        return self._epochs[seat]

    def forced(self, seat: int, epoch: int, last_entry: int) -> list[AddGroup[Token]]:
        """Note that what a seat's bookie had received up to an entry is durable there (deferred sync).

        Args:
            last_entry: the last entry that had been sent when the force was.
        """
        if epoch != self._epochs[seat]:
            return []
        bit = 1 << seat
        for turn in chain(self._retained, self._turns):
            if turn.last_entry > last_entry:
                break
            for batch in turn.batches:
                batch.forced |= batch.acks & bit
        return self._advance()

    def begin_change(self) -> int:
        """Freeze LAC and LAFR, and capture the first entry of the new fragment.

        That is LAC + 1; with guaranteed write quorum LAFR + 1.
        """
        assert not self._frozen
        self._frozen = True
        return (self.lafr if self._is_guaranteed else self.lac) + 1

    @property
    def copies_first(self) -> bool:
        """Return whether new bookies must hold copies before the compare-and-set (rule 11)."""
        return self._is_guaranteed and bool(self._retained)

    def seat_newcomers(self, replaced: int) -> list[Send]:
        """Put new bookies into seats before the compare-and-set (rule 11); returns the copies they owe."""
        assert self._frozen
        assert self._is_guaranteed
        self.replacements |= replaced
        self._vacate(replaced)
        return [
            send
            for turn in self._retained
            for batch in turn.batches
            for send in self._sends(batch, batch.mask & replaced)
        ]

    @property
    def owes_copies(self) -> bool:
        """Return whether a newcomer has not acknowledged all its copies yet."""
        replacements = self.replacements
        return any(
            batch.mask & replacements & ~batch.acks for turn in self._retained for batch in turn.batches
        )

    @property
    def awaits_copies(self) -> bool:
        """Return whether replacements owe copies and will make them: none has failed, whichever came when."""
        return self.owes_copies and not self.failed & self.replacements

    @property
    def can_abandon(self) -> bool:
        """Return whether every write set keeps Qa bookies without the replacements."""
        closed_to = self.failed | self.replacements
        return can_acknowledge(closed_to, self.ensemble_size, self.write_quorum, self.ack_quorum)

    def abandon_change(self) -> None:
        """Unfreeze with the former bookies, and nobody in the seats of the replacements. Call `advance` then.

        Only before the compare-and-set: what the replacements hold are true copies that the metadata never
        name.
        """
        assert self._frozen
        self._frozen = False
        replacements, self.replacements = self.replacements, 0
        self._vacate(replacements)
        self.failed |= replacements

    def commit_change(self, replaced: int) -> list[Send]:
        """Unfreeze with new bookies in the seats of the mask `replaced`.

        Returns what the new bookies still owe. Call `advance` once that has been sent.
        """
        assert self._frozen
        self._frozen = False
        replacements, self.replacements = self.replacements, 0
        self._vacate(replaced & ~replacements)
        sends: list[Send] = []
        for turn in self._retained:
            for batch in turn.batches:
                sends += self._sends(batch, batch.mask & replaced & ~replacements)
        for turn in self._turns:
            for batch in turn.batches:
                sends += self._sends(batch, batch.mask & (replaced | replacements) & ~self.failed)
        return sends

    def _vacate(self, seats: int) -> None:
        """Begin a new epoch in each seat: acknowledgements of its former bookie count no more (rule 9)."""
        self.failed &= ~seats
        for seat in indexes_of(seats):
            self._epochs[seat] += 1
        for turn in chain(self._retained, self._turns):
            for batch in turn.batches:
                batch.acks &= ~seats
                batch.forced &= ~seats

    def advance(self) -> list[AddGroup[Token]]:
        """Return the turns that are acknowledged by now."""
        return self._advance()

    def abort(self) -> list[Token]:
        """Give up everything outstanding; returns the tokens in entry order."""
        tokens = [token for turn in self._turns for token in turn.tokens] + self._tokens
        self._turns.clear()
        self._retained.clear()
        self._payloads, self._tokens = [], []
        self.bytes_held = 0
        return tokens

    def _advance(self) -> list[AddGroup[Token]]:
        done: list[AddGroup[Token]] = []
        turns, ack_quorum = self._turns, self.ack_quorum
        if self._frozen:
            return done
        if self.retains:
            return self._advance_retaining()
        while turns:
            turn = turns[0]
            for batch in turn.batches:
                if batch.acks.bit_count() < ack_quorum:
                    return done
            turns.popleft()
            assert turn.first_entry == self.lac + 1
            self.lac = turn.last_entry
            self.length_confirmed = turn.length
            self.bytes_held -= turn.bytes_held
            done.append(turn)
        return done

    def _advance_retaining(self) -> list[AddGroup[Token]]:
        """Report what Qa bookies have, and let go of what is safe with nobody to send it again."""
        done: list[AddGroup[Token]] = []
        turns, retained = self._turns, self._retained
        while turns and all(batch.acks.bit_count() >= self.ack_quorum for batch in turns[0].batches):
            turn = turns.popleft()
            assert turn.first_entry == self._received + 1
            self._received = turn.last_entry
            if self._is_guaranteed:
                self.lac, self.length_confirmed = turn.last_entry, turn.length
            retained.append(turn)
            done.append(turn)
        while retained and self._is_releasable(retained[0]):
            turn = retained.popleft()
            self.bytes_held -= turn.bytes_held
            if self._is_guaranteed:
                self.lafr = turn.last_entry
            else:
                self.lac, self.length_confirmed = turn.last_entry, turn.length
        return done

    def _is_releasable(self, turn: AddGroup[Token]) -> bool:
        if self._is_guaranteed:
            return all(batch.acks == batch.mask for batch in turn.batches)
        return all(batch.forced.bit_count() >= self.ack_quorum for batch in turn.batches)

    def _sends(self, batch: Batch, mask: int) -> list[Send]:
        # A named tuple's own constructor is a Python function, and this runs for every batch and bookie.
        new, epochs = tuple.__new__, self._epochs
        return [new(Send, (seat, epochs[seat], batch)) for seat in indexes_of(mask)]

    def _turn_end(self, running: list[int], start: int) -> int:
        """Return where a turn that begins at `start` ends: bounded in entries and bytes, one entry at least.

        All of it may be one write set's, and has to fit into a frame then.
        """
        spread = min(self.ensemble_size // self.write_quorum, _SPREAD_MAX)
        budget = self.length_pushed + BATCH_BYTES_MAX * spread
        stop = min(len(running), start + BATCH_ENTRIES_MAX)
        return max(start + 1, bisect_right(running, budget, start, stop))

    def _form_turn(
        self, first_entry: int, payloads: list[bytes], tokens: list[Token], running: list[int]
    ) -> AddGroup[Token]:
        size = running[-1] - self.length_pushed
        self.length_pushed = running[-1]
        stride = self.ensemble_size if self.ensemble_size > self.write_quorum else 1
        count = len(payloads)
        if stride == 1 or count == 1:
            block = self._encode(first_entry, stride, payloads, running)
            batches = [Batch(first_entry, count, self._masks[first_entry % self.ensemble_size], block)]
        else:
            batches = []
            for offset in range(min(stride, count)):
                first = first_entry + offset
                block = self._encode(first, stride, payloads[offset::stride], running[offset::stride])
                mask = self._masks[first % self.ensemble_size]
                batches.append(Batch(first, len(range(offset, count, stride)), mask, block))
        held = size + ENTRY_OVERHEAD_BYTES * count
        return AddGroup(first_entry, tokens, batches, running[-1], held)

    def _encode(self, first_entry: int, stride: int, payloads: list[bytes], running: list[int]) -> bytes:
        # A recovery with guaranteed write quorum writes entries back that its frozen LAC is beyond.
        lac = min(self.lac_to_state, first_entry - 1)
        lafr = min(self.lafr_to_state, lac)
        ids = range(first_entry, first_entry + stride * len(payloads), stride)
        return encode_block(
            ledger_id=self.ledger_id,
            content_term=self.content_term,
            first_entry=first_entry,
            stride=stride,
            lac=lac,
            lafr=lafr,
            payloads=payloads,
            running=running,
            macs=self._codes(lac, lafr, ids, running, payloads) if self._codes else (),
        )


Item = TypeVar("Item")


class EntryOrder(Generic[Item]):
    """Puts entries into the order of their ids, from 0 on without gaps."""

    def __init__(self) -> None:
        self.following = 0
        self._waiting: dict[int, Item] = {}

    def take(self, entry_id: int, item: Item) -> list[Item]:
        """Take an entry; returns those that are contiguous now, in order.

        Raises:
            InvalidArgumentError: not an entry id, or one that was given before. Nothing was taken.
        """
        if not isinstance(entry_id, int) or isinstance(entry_id, bool) or not 0 <= entry_id <= ENTRY_ID_MAX:
            raise InvalidArgumentError(f"entry id {entry_id!r} is not an integer from 0 to {ENTRY_ID_MAX}")
        if entry_id < self.following or entry_id in self._waiting:
            raise InvalidArgumentError(
                f"entry id {entry_id} was added before; every id of a ledger is given once", entry_id=entry_id
            )
        self._waiting[entry_id] = item
        ready: list[Item] = []
        while self.following in self._waiting:
            ready.append(self._waiting.pop(self.following))
            self.following += 1
        return ready

    @property
    def waiting(self) -> list[int]:
        """Return the ids that wait behind a gap, ascending."""
        return sorted(self._waiting)

    def give_up(self) -> list[Item]:
        """Take back everything that waits, by id."""
        items = [self._waiting[entry_id] for entry_id in sorted(self._waiting)]
        self._waiting.clear()
        return items
