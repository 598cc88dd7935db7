"""The add window: adds in flight, what is acknowledged, and what an ensemble change does to both.

The theory, in the terms of ARCHITECTURE.md's rules:

- All adds of one turn of the loop form a *turn*: contiguous entry ids, cut into one *batch* per write set
  (a single batch where E = Qw). A batch is the unit that is sent, stored and acknowledged.
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

Owns: entry ids, running length, LAC, LAP, who acknowledged what. Does not own: sockets, timers, metadata.

Invariants: lac < first entry of turns[0]; turns are contiguous and end at LAP; the LAC moves only
when not frozen; batch.acks holds only seats of the batch's write set, in their present epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from bookie_aio.wire.blocks import encode_block
from client_aio.core.quorum import can_acknowledge, indexes_of, write_set_masks
from metadata.ids import NO_ENTRY

Token = TypeVar("Token")

BATCH_ENTRIES_MAX = 4096
BATCH_BYTES_MAX = 512 * 1024
ENTRY_OVERHEAD_BYTES = 128
"""What an entry in flight costs beyond its payload; counted, so that empty entries are bounded too."""

Codes = Callable[[int, int, Sequence[int], Sequence[int], Sequence[bytes]], Sequence[bytes]]


class Batch:
    """Entries of one turn and one write set, encoded once and sent as they are to each bookie."""

    __slots__ = ("acks", "block", "count", "first_entry", "mask", "turn")

    def __init__(self, first_entry: int, count: int, mask: int, block: bytes) -> None:
        self.first_entry = first_entry
        self.count = count
        self.mask = mask
        self.block = block
        self.acks = 0


class Turn(Generic[Token]):
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
            LAC it found when it began, frozen (rule 12c).
        codes: gives the authentication codes of a batch; None without.
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
        codes: Codes | None = None,
    ) -> None:
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
        self._frozen = False
        self._next_entry = next_entry  # of the first entry not sent yet
        self._payloads: list[bytes] = []
        self._tokens: list[Token] = []
        self._turns: deque[Turn[Token]] = deque()
        self._epochs = [0] * ensemble_size
        self._masks = write_set_masks(ensemble_size, write_quorum)

    @property
    def last_add_pushed(self) -> int:
        """Give the id of the last entry taken."""
        return self._next_entry + len(self._payloads) - 1

    @property
    def lac_to_state(self) -> int:
        """Give the LAC that entries sent now state."""
        return self.lac if self._stated_lac is None else self._stated_lac

    @property
    def is_idle(self) -> bool:
        """Tell whether everything taken has been acknowledged."""
        return not self._turns and not self._payloads

    @property
    def is_frozen(self) -> bool:
        """Tell whether an ensemble change is in flight."""
        return self._frozen

    @property
    def has_unsent(self) -> bool:
        """Tell whether entries wait for `flush`."""
        return bool(self._payloads)

    @property
    def can_acknowledge(self) -> bool:
        """Tell whether every write set still has Qa bookies that have not failed."""
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
        payloads, tokens = self._payloads, self._tokens
        self._payloads, self._tokens = [], []
        sends: list[Send] = []
        first_entry, start = self._next_entry, 0
        self._next_entry += len(payloads)
        running = list(accumulate(map(len, payloads), initial=self.length_pushed))[1:]
        while start < len(payloads):
            stop = self._turn_end(running, start)
            turn = self._form_turn(
                first_entry + start, payloads[start:stop], tokens[start:stop], running[start:stop]
            )
            self._turns.append(turn)
            for batch in turn.batches:
                sends += self._sends(batch, batch.mask & ~self.failed)
            start = stop
        return sends

    def acknowledged(self, send: Send) -> list[Turn[Token]]:
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
        """Give the present epoch of a seat."""
        return self._epochs[seat]

    def begin_change(self) -> int:
        """Freeze the LAC and capture the first entry of the new fragment, LAC + 1."""
        assert not self._frozen
        self._frozen = True
        return self.lac + 1

    def abandon_change(self) -> list[Turn[Token]]:
        """Unfreeze: the compare-and-set has definitely not happened. Returns what is acknowledged by now."""
        assert self._frozen
        self._frozen = False
        return self._advance()

    def commit_change(self, replaced: int) -> list[Send]:
        """Unfreeze with new bookies in the seats of the mask `replaced`.

        Returns what the new bookies owe. Call `advance` once that has been sent.
        """
        assert self._frozen
        self._frozen = False
        self.failed &= ~replaced
        for seat in indexes_of(replaced):
            self._epochs[seat] += 1
        sends: list[Send] = []
        for turn in self._turns:
            for batch in turn.batches:
                batch.acks &= ~replaced
                sends += self._sends(batch, batch.mask & replaced)
        return sends

    def advance(self) -> list[Turn[Token]]:
        """Give the turns that are acknowledged by now."""
        return self._advance()

    def abort(self) -> list[Token]:
        """Give up everything outstanding; returns the tokens in entry order."""
        tokens = [token for turn in self._turns for token in turn.tokens] + self._tokens
        self._turns.clear()
        self._payloads, self._tokens = [], []
        self.bytes_held = 0
        return tokens

    def _advance(self) -> list[Turn[Token]]:
        done: list[Turn[Token]] = []
        turns = self._turns
        if self._frozen:
            return done
        while turns and all(batch.acks.bit_count() >= self.ack_quorum for batch in turns[0].batches):
            turn = turns.popleft()
            assert turn.first_entry == self.lac + 1
            self.lac = turn.last_entry
            self.length_confirmed = turn.length
            self.bytes_held -= turn.bytes_held
            done.append(turn)
        return done

    def _sends(self, batch: Batch, mask: int) -> list[Send]:
        return [Send(seat, self._epochs[seat], batch) for seat in indexes_of(mask)]

    def _turn_end(self, running: list[int], start: int) -> int:
        """Give where a turn that begins at `start` ends: bounded in entries and bytes, one entry at least."""
        spread = self.ensemble_size // self.write_quorum
        budget = self.length_pushed + BATCH_BYTES_MAX * spread
        stop = min(len(running), start + BATCH_ENTRIES_MAX)
        return max(start + 1, bisect_right(running, budget, start, stop))

    def _form_turn(
        self, first_entry: int, payloads: list[bytes], tokens: list[Token], running: list[int]
    ) -> Turn[Token]:
        size = running[-1] - self.length_pushed
        self.length_pushed = running[-1]
        stride = self.ensemble_size if self.ensemble_size > self.write_quorum else 1
        batches = []
        for offset in range(min(stride, len(payloads))):
            first = first_entry + offset
            block = self._encode(first, stride, payloads[offset::stride], running[offset::stride])
            count = len(range(offset, len(payloads), stride))
            batches.append(Batch(first, count, self._masks[first % self.ensemble_size], block))
        held = size + ENTRY_OVERHEAD_BYTES * len(payloads)
        return Turn(first_entry, tokens, batches, running[-1], held)

    def _encode(self, first_entry: int, stride: int, payloads: list[bytes], running: list[int]) -> bytes:
        lac = self.lac_to_state
        assert NO_ENTRY <= lac < first_entry
        ids = range(first_entry, first_entry + stride * len(payloads), stride)
        return encode_block(
            ledger_id=self.ledger_id,
            content_term=self.content_term,
            first_entry=first_entry,
            stride=stride,
            lac=lac,
            lafr=NO_ENTRY,
            payloads=payloads,
            running=running,
            macs=self._codes(lac, NO_ENTRY, ids, running, payloads) if self._codes else (),
        )
