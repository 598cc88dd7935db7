"""The add window: adds in flight, what is acknowledged, and what an ensemble change does to both.

The theory, in the terms of ARCHITECTURE.md's rules:

- All adds of one event-loop iteration form an *add group*. While an earlier group is in flight, the adds of
  several iterations may form one. A group has contiguous entry ids, and is cut into one *batch* per write set
  (a single batch where E = Qw). A batch is the unit that is sent, stored and acknowledged.
- A batch is replicated when Qa bookies of its write set have acknowledged it. A group is acknowledged when
  its batches are replicated and every earlier group is acknowledged. The LAC is then its last entry (rule 1).
- A failed bookie's acknowledgements stay valid until it is replaced: it stored what it acknowledged. Until
  then nothing is sent to it, and the window goes on as long as every write set keeps Qa bookies (rule 9).
- `begin_change` captures the first entry of the new fragment, LAC + 1, once, and freezes the LAC. Nothing is
  acknowledged until the outcome of the compare-and-set is known. `commit_change` seats the replacements and
  drops the acknowledgements of the replaced bookies. It returns what is to be resent: every unacknowledged
  batch that a replacement owes.
- Each seat (index in the ensemble) has an *epoch*, which counts its occupants. An acknowledgement names the
  epoch under which its batch was sent. An acknowledgement of an earlier epoch counts for nothing.
- With *guaranteed write quorum* (rule 11) an acknowledged group is *retained* until the whole write set of
  each of its batches has it: it may have to be sent again. The last entry of the last group released in this
  way is the LAFR. An ensemble change then starts at LAFR + 1. `seat_replacements` returns the copies that
  replacements owe of (LAFR, LAC] before the compare-and-set, and `seats_owing` names seats that lack some.
  Until the compare-and-set `abandon_change` takes everything back: the seats are then empty, as those of
  failed bookies are.
- A window that *holds* takes entries and forms no groups of them, so that everything sent can be
  acknowledged. The next id is then LAC + 1, and a fragment that begins there has nothing outstanding.
- With *deferred sync* an acknowledgement says only that a bookie has received a batch. A group that Qa
  bookies received is reported, and retained until Qa of them have answered a *force* that was sent after it.
  Both travel over the same connection, hence to the same process. Only then does the LAC pass the group. A
  new occupant of a seat has received nothing and forced nothing.

Each entry has a token, by which its owner knows whom to tell. A *run* is a number of entries with one token.
A run may be cut into several groups, and a group may hold several runs.

`AddQueue` keeps the adds that wait for room in the window. Entry ids that the application assigns come in any
order. `EntryOrder` keeps an entry behind a gap in the ids
until the gap is closed. An id may be used once: two payloads under one id cannot both be what readers get.

Owns: entry ids and their order, running length, LAC, LAP, who acknowledged what. Does not own: sockets,
timers, metadata.

Invariants of the window: retained groups, groups and unsent entries are contiguous, in this order, and end
at LAP. LAFR ≤ LAC, and neither moves while frozen. `batch.acks` holds only seats of the batch's write set, in
their present epoch; `batch.forced` holds only seats of `batch.acks`.

Invariant of the order: every id below `following` was taken; no id that waits is `following`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Generic, NamedTuple, TypeVar

from bookie_aio.wire.blocks import Block, encode_block
from client_aio.core.quorum import can_acknowledge, indexes_of, write_set_masks
from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY

Token = TypeVar("Token")

BATCH_ENTRIES_MAX = 4096
BATCH_BYTES_MAX = 512 * 1024
_SPREAD_MAX = 8
"""A group holds the bytes of at most so many full batches."""
GATHERED_BYTES_MAX = 64 * 1024
ENTRY_OVERHEAD_BYTES = 128
"""Memory of an entry in flight beyond its payload. Counted, so that empty entries are bounded too."""

Codes = Callable[[int, int, Sequence[int], Sequence[int], Sequence[bytes]], Sequence[bytes]]


class Batch:
    """Entries of one group and one write set, encoded once and sent unchanged to each bookie."""

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

    __slots__ = ("batches", "bytes_held", "first_entry", "has_runs", "last_entry", "length", "tokens")

    def __init__(
        self,
        first_entry: int,
        tokens: list[Token],
        batches: list[Batch],
        length: int,
        bytes_held: int,
        *,
        has_runs: bool = False,
    ) -> None:
        self.first_entry = first_entry
        self.last_entry = first_entry + len(tokens) - 1
        self.tokens = tokens
        self.batches = batches
        self.length = length  # of the ledger, up to and including the last entry
        self.bytes_held = bytes_held
        self.has_runs = has_runs  # several entries may have one token


class Outstanding(Generic[Token]):
    """The entries that a window has dropped: groups that were sent, then entries that were not."""

    __slots__ = ("groups", "tokens_of_unsent", "unsent")

    def __init__(
        self, groups: Sequence[AddGroup[Token]], unsent: Sequence[bytes], tokens_of_unsent: Sequence[Token]
    ) -> None:
        self.groups = groups
        self.unsent = unsent
        self.tokens_of_unsent = tokens_of_unsent

    def tokens(self) -> list[Token]:
        """Return the tokens, in entry order."""
        return [token for group in self.groups for token in group.tokens] + list(self.tokens_of_unsent)

    def entries(self) -> list[tuple[bytes, Token]]:
        """Return payload and token of each entry, in order."""
        payloads = {
            entry_id: bytes(payload)
            for group in self.groups
            for batch in group.batches
            for block in (Block.parse(memoryview(batch.block)),)
            for entry_id, payload in zip(block.entry_ids, block.payloads(), strict=True)
        }
        sent = [payloads[entry_id] for entry_id in sorted(payloads)]
        return list(zip([*sent, *self.unsent], self.tokens(), strict=True))


class Send(NamedTuple):
    """A batch to send to a seat. Its answer is to be reported under this epoch."""

    seat: int
    epoch: int
    batch: Batch


class AddWindow(Generic[Token]):
    """The adds of one writer (or of one recovery) that are not acknowledged yet.

    Args:
        next_entry: id of the first entry that will be added; everything below is acknowledged.
        length: payload bytes of the ledger below `next_entry`.
        stated_lac: the LAC that every batch states: a recovery states the LAC that it found when it began
            (rule 12c). None for a writer, whose batches state the present LAC.
        stated_lafr: the same for the LAFR.
        codes: computes the authentication codes of a batch; None for a ledger without codes.
        guaranteed_write_quorum: retain an acknowledged group until all of its write sets have it (rule 11).
        deferred_sync: acknowledgements are receipts, and forces make entries durable.
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
        self.is_guaranteed = guaranteed_write_quorum
        self._is_deferred = deferred_sync
        self.retains = guaranteed_write_quorum or deferred_sync
        self.lafr = next_entry - 1 if guaranteed_write_quorum else NO_ENTRY
        self._length_replicated = self.length_before_change = length  # the former up to the LAFR
        self._stated_lafr = stated_lafr
        self._frozen = False
        self.is_holding = False
        self.replacements = 0  # seats of replacements that were sent copies, and nothing beyond the LAC
        self._received = next_entry - 1  # the last entry reported; the LAC may be lower
        self._next_entry = next_entry  # of the first entry not sent yet
        self._payloads: list[bytes] = []
        self._tokens: list[Token] = []
        self._has_runs = False  # among the entries not sent yet
        self._retained: deque[AddGroup[Token]] = deque()
        self._groups: deque[AddGroup[Token]] = deque()
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
        """Return the last entry that was reported: acknowledged, or (deferred sync) received by Qa."""
        return self._received if self._is_deferred else self.lac

    @property
    def last_entry_sent(self) -> int:
        """Return the last entry that `flush` has put into a group."""
        return self._next_entry - 1

    @property
    def is_idle(self) -> bool:
        """Return whether every entry taken has been acknowledged, and nothing is retained."""
        return not self._groups and not self._payloads and not self._retained

    @property
    def is_frozen(self) -> bool:
        """Return whether an ensemble change is in flight."""
        return self._frozen

    @property
    def is_drained(self) -> bool:
        """Return whether every entry sent has been acknowledged, and nothing is retained."""
        return not self._groups and not self._retained

    @property
    def should_gather(self) -> bool:
        """Return whether unsent entries should wait for more: they are few bytes, and a group is in flight.

        A batch costs its sender and each of its bookies about the same, however small (Nagle, RFC 896).
        """
        if not self._groups:
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
        """Take an entry under the next id. The next `flush` sends it."""
        self._payloads.append(payload)
        self._tokens.append(token)
        self.bytes_held += len(payload) + ENTRY_OVERHEAD_BYTES

    def add_run(self, payloads: Sequence[bytes], token: Token) -> None:
        """Take entries under the next ids, all with one token. No Python code runs for each of them."""
        self._payloads += payloads
        self._tokens += [token] * len(payloads)
        self._has_runs = True
        self.bytes_held += _held(payloads)

    def flush(self) -> list[Send]:
        """Form groups of the entries added since the last flush; returns what is to be sent to which seat."""
        if self.is_holding:
            return []
        payloads, tokens = self._payloads, self._tokens
        self._payloads, self._tokens = [], []
        sends: list[Send] = []
        first_entry, start = self._next_entry, 0
        count = len(payloads)
        self._next_entry += count
        if count == 1:  # the common case where many ledgers are written at once
            group = self._form_group(first_entry, payloads, tokens, [self.length_pushed + len(payloads[0])])
            self._groups.append(group)
            batch = group.batches[0]
            self._has_runs = False
            return self._sends(batch, batch.mask & ~self.failed & ~self.replacements)
        running = list(accumulate(map(len, payloads), initial=self.length_pushed))[1:]
        while start < count:
            stop = self._group_end(running, start)
            group = self._form_group(
                first_entry + start, payloads[start:stop], tokens[start:stop], running[start:stop]
            )
            self._groups.append(group)
            for batch in group.batches:
                sends += self._sends(batch, batch.mask & ~self.failed & ~self.replacements)
            start = stop
        self._has_runs = False
        return sends

    def acknowledged(self, send: Send) -> list[AddGroup[Token]]:
        """Note that a seat's bookie stored a batch; returns the groups that this acknowledges."""
        seat, epoch, batch = send
        if epoch != self._epochs[seat]:
            return []
        batch.acks |= 1 << seat
        # No group can be acknowledged by an answer before the one that completes the quorum. One behind it
        # matters only to groups that are retained.
        if not self.retains and batch.acks.bit_count() != self.ack_quorum:
            return []
        return self.advance()

    def fail(self, seat: int, epoch: int) -> bool:
        """Note that a seat's bookie failed; returns False if that was known, or the epoch is a former one."""
        bit = 1 << seat
        if epoch != self._epochs[seat] or self.failed & bit:
            return False
        self.failed |= bit
        return True

    def epoch(self, seat: int) -> int:
        """Return the present epoch of a seat."""
        return self._epochs[seat]

    def forced(self, seat: int, epoch: int, last_entry: int) -> list[AddGroup[Token]]:
        """Note that a seat's bookie has made durable the batches that it had received (deferred sync).

        Args:
            last_entry: the last entry that had been sent before the force.

        Returns:
            The groups that this acknowledges.
        """
        if epoch != self._epochs[seat]:
            return []
        bit = 1 << seat
        for group in chain(self._retained, self._groups):
            if group.last_entry > last_entry:
                break
            for batch in group.batches:
                batch.forced |= batch.acks & bit
        return self.advance()

    def begin_change(self) -> int:
        """Freeze LAC and LAFR, and capture the first entry of the new fragment, and the length below it.

        It is LAC + 1; with guaranteed write quorum LAFR + 1.
        """
        assert not self._frozen
        self._frozen = True
        self.length_before_change = self._length_replicated if self.is_guaranteed else self.length_confirmed
        return (self.lafr if self.is_guaranteed else self.lac) + 1

    @property
    def copies_first(self) -> bool:
        """Return whether replacements must hold copies before the compare-and-set (rule 11)."""
        return self.is_guaranteed and bool(self._retained)

    def seat_replacements(self, replaced: int) -> list[Send]:
        """Seat replacements before the compare-and-set (rule 11); returns the copies that they owe."""
        assert self._frozen
        assert self.is_guaranteed
        self.replacements |= replaced
        self._vacate(replaced)
        return [
            send
            for group in self._retained
            for batch in group.batches
            for send in self._sends(batch, batch.mask & replaced)
        ]

    @property
    def seats_owing(self) -> int:
        """Return the mask of the seats, replacements' too, that lack some entry that is retained."""
        owing = 0
        for group in self._retained:
            for batch in group.batches:
                owing |= batch.mask & ~batch.acks
        return owing

    def copies_owed(self, last_entry: int) -> int:
        """Return how many copies are missing of retained batches, up to the group of an entry.

        Zero while frozen: a change waits for the metadata store alone.
        """
        return sum(
            (batch.mask & ~batch.acks).bit_count()
            for group in self._retained
            if group.first_entry <= last_entry
            for batch in group.batches
        )

    @property
    def awaits_copies(self) -> bool:
        """Return whether replacements owe copies, and none of them has failed."""
        return bool(self.seats_owing & self.replacements) and not self.failed & self.replacements

    @property
    def can_abandon(self) -> bool:
        """Return whether every write set keeps Qa bookies without the replacements."""
        closed_to = self.failed | self.replacements
        return can_acknowledge(closed_to, self.ensemble_size, self.write_quorum, self.ack_quorum)

    def abandon_change(self) -> None:
        """Unfreeze with the former ensemble, and with the seats of the replacements failed and empty.

        Only before the compare-and-set: the replacements then hold correct copies, and the metadata never
        name those bookies. Call `advance` afterwards.
        """
        assert self._frozen
        self._frozen = False
        replacements, self.replacements = self.replacements, 0
        self._vacate(replacements)
        self.failed |= replacements

    def commit_change(self, replaced: int) -> list[Send]:
        """Unfreeze with replacements in the seats of the mask `replaced`.

        Returns the batches that the replacements still owe. Call `advance` once they have been sent.
        """
        assert self._frozen
        self._frozen = False
        replacements, self.replacements = self.replacements, 0
        self._vacate(replaced & ~replacements)
        sends: list[Send] = []
        for group in self._retained:
            for batch in group.batches:
                sends += self._sends(batch, batch.mask & replaced & ~replacements)
        for group in self._groups:
            for batch in group.batches:
                sends += self._sends(batch, batch.mask & (replaced | replacements) & ~self.failed)
        return sends

    def _vacate(self, seats: int) -> None:
        """Begin a new epoch in each seat: acknowledgements of its former bookie no longer count (rule 9)."""
        self.failed &= ~seats
        for seat in indexes_of(seats):
            self._epochs[seat] += 1
        for group in chain(self._retained, self._groups):
            for batch in group.batches:
                batch.acks &= ~seats
                batch.forced &= ~seats

    def abort(self) -> Outstanding[Token]:
        """Drop everything outstanding, and return it: what lies behind the LAC, in entry order."""
        dropped = Outstanding(tuple(self._groups), self._payloads, self._tokens)
        self._groups.clear()
        self._retained.clear()
        self._payloads, self._tokens, self._has_runs = [], [], False
        self.bytes_held = 0
        return dropped

    def advance(self) -> list[AddGroup[Token]]:
        """Return the groups that have become acknowledged."""
        done: list[AddGroup[Token]] = []
        groups, ack_quorum = self._groups, self.ack_quorum
        if self._frozen:
            return done
        if self.retains:
            return self._advance_retaining()
        while groups:
            group = groups[0]
            for batch in group.batches:
                if batch.acks.bit_count() < ack_quorum:
                    return done
            groups.popleft()
            assert group.first_entry == self.lac + 1
            self.lac = group.last_entry
            self.length_confirmed = group.length
            self.bytes_held -= group.bytes_held
            done.append(group)
        return done

    def _advance_retaining(self) -> list[AddGroup[Token]]:
        """Return the groups that Qa bookies have, and release those that need not be sent again."""
        done: list[AddGroup[Token]] = []
        groups, retained = self._groups, self._retained
        while groups and all(batch.acks.bit_count() >= self.ack_quorum for batch in groups[0].batches):
            group = groups.popleft()
            assert group.first_entry == self._received + 1
            self._received = group.last_entry
            if self.is_guaranteed:
                self.lac, self.length_confirmed = group.last_entry, group.length
            retained.append(group)
            done.append(group)
        while retained and self._is_releasable(retained[0]):
            group = retained.popleft()
            self.bytes_held -= group.bytes_held
            if self.is_guaranteed:
                self.lafr, self._length_replicated = group.last_entry, group.length
            else:
                self.lac, self.length_confirmed = group.last_entry, group.length
        return done

    def _is_releasable(self, group: AddGroup[Token]) -> bool:
        if self.is_guaranteed:
            return all(batch.acks == batch.mask for batch in group.batches)
        return all(batch.forced.bit_count() >= self.ack_quorum for batch in group.batches)

    def _sends(self, batch: Batch, mask: int) -> list[Send]:
        # Runs for every batch and bookie: a named tuple's own constructor is a Python function.
        new, epochs = tuple.__new__, self._epochs
        return [new(Send, (seat, epochs[seat], batch)) for seat in indexes_of(mask)]

    def _group_end(self, running: list[int], start: int) -> int:
        """Return the end of a group that begins at `start`: bounded in entries and bytes, one entry at least.

        All entries of a group may be of one write set. Its batch then has to fit into a frame.
        """
        spread = min(self.ensemble_size // self.write_quorum, _SPREAD_MAX)
        budget = self.length_pushed + BATCH_BYTES_MAX * spread
        stop = min(len(running), start + BATCH_ENTRIES_MAX)
        return max(start + 1, bisect_right(running, budget, start, stop))

    def _form_group(
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
        return AddGroup(first_entry, tokens, batches, running[-1], held, has_runs=self._has_runs)

    def _encode(self, first_entry: int, stride: int, payloads: list[bytes], running: list[int]) -> bytes:
        # A recovery with guaranteed write quorum writes back entries below its frozen LAC.
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


class _Waiting(Generic[Token]):
    """A run of entries that waits, some of which may have been taken; without entries the place of a bulk."""

    __slots__ = ("payloads", "taken", "token")

    def __init__(self, payloads: Sequence[bytes], token: Token) -> None:
        self.payloads = payloads
        self.token = token
        self.taken = 0


class AddQueue(Generic[Token]):
    """Adds that wait, in their order: for room in the window, or for the end of a bulk before them.

    A bulk has a *place* among them. It takes its entries from elsewhere, and keeps its place until it ends.

    Args:
        piece_bytes: so many bytes are taken at a time, with the overhead of each entry. So many fit into one
            group, and into the room that there must be.
    """

    def __init__(self, piece_bytes: int) -> None:
        self.bytes_held = 0
        self._piece_bytes = min(piece_bytes, BATCH_BYTES_MAX)
        self.queued = 0  # entries, ever
        self.taken = 0  # of these
        self._waiting: deque[_Waiting[Token]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def is_piece(self, payloads: Sequence[bytes]) -> bool:
        """Return whether entries are few enough to be taken at once."""
        return len(payloads) == 1 or _held(payloads) <= self._piece_bytes

    def put(self, payloads: Sequence[bytes], token: Token) -> None:
        """Queue a run of entries behind all others; without entries the place of a bulk."""
        self._waiting.append(_Waiting(payloads, token))
        self.queued += len(payloads)
        self.bytes_held += _held(payloads)

    def take_place(self) -> Token | None:
        """Remove the place of a bulk from the front and return its token; None if entries come first."""
        if self._waiting and not self._waiting[0].payloads:
            return self._waiting.popleft().token
        return None

    def take(self) -> list[tuple[Sequence[bytes], Token]]:
        """Remove and return entries from the front, in pieces of runs: `piece_bytes` of them in all at most,
        and one entry at least. Ends at the place of a bulk."""
        pieces: list[tuple[Sequence[bytes], Token]] = []
        left = self._piece_bytes
        while self._waiting and self._waiting[0].payloads:
            first = self._waiting[0]
            start = first.taken
            candidates = first.payloads[start : start + left // ENTRY_OVERHEAD_BYTES + 1]
            running = list(accumulate(map(len, candidates), initial=0))
            fitting = bisect_right(
                range(len(running)), left, key=lambda at: running[at] + at * ENTRY_OVERHEAD_BYTES
            )
            fitting = max(fitting - 1, 0 if pieces else 1)
            if not fitting:
                break
            left -= running[fitting] + fitting * ENTRY_OVERHEAD_BYTES
            first.taken += fitting
            self.taken += fitting
            pieces.append((candidates[:fitting], first.token))
            if first.taken < len(first.payloads):
                break
            self._waiting.popleft()
        self.bytes_held -= sum(_held(piece) for piece, _ in pieces)
        return pieces

    def give_up(self) -> list[Token]:
        """Drop everything that waits; returns the tokens, those of bulks too, in order."""
        tokens = [each.token for each in self._waiting]
        self._waiting.clear()
        self.taken, self.bytes_held = self.queued, 0
        return tokens


def _held(payloads: Sequence[bytes]) -> int:
    return sum(map(len, payloads)) + ENTRY_OVERHEAD_BYTES * len(payloads)


Item = TypeVar("Item")


class EntryOrder(Generic[Item]):
    """Puts entries into the order of their ids, from 0 without gaps."""

    def __init__(self) -> None:
        self.following = 0
        self._waiting: dict[int, Item] = {}

    def take(self, entry_id: object, item: Item) -> list[Item]:
        """Take an entry; returns the entries that this makes contiguous, in order.

        Raises:
            InvalidArgumentError: not an entry id, or an id that was used before. Nothing was taken.
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
        """Drop all entries behind a gap; returns them by id."""
        items = [self._waiting[entry_id] for entry_id in sorted(self._waiting)]
        self._waiting.clear()
        return items
