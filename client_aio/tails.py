"""Tails: how the readers of a client that wait for new entries learn of them, thousands of them at once.

Owns which bookies are asked for which ledgers, and the watches of their metadata. Does not own what a reader
makes of a LAC (`client_aio.ledger.reader`).

    Tails            of a client: the ledgers that are followed, and the bookies that are asked
    FollowedLedger   the tails of one ledger share its watch of the metadata, and its places
    Tail             of one reader: waits until its LAC may have risen, or its metadata may have changed
    WatchedBookie    one WATCH is outstanding at a bookie, for all ledgers that are watched there

A ledger is *armed* at a bookie with the LAC that its waiting tails know. The bookie answers once it has a
higher one, and the ledger is armed again when a tail waits again. So a tail that reads what it has got asks
for nothing.

A ledger is watched at Qw − Qa + 1 bookies of one write set. At least one of them has each acknowledged entry
of that write set; the others may get no adds at all. It is watched at two at least, since one may hang.
Bookies that are silent, failed or refused come last. The places are looked at again when the metadata change,
a bookie fails, or another one has become silent (rule 13).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from bookie_aio.wire.messages import WAIT_MS_MAX, Failure, Status, Watch
from bookie_aio.wire.watching import ROWS_MAX, UNWATCH, encode_asked, parse_moved
from client_aio.bookies.connection import error_of
from metadata.errors import (
    BookKeeperError,
    ClientClosedError,
    MalformedFrameError,
    MetadataUnavailableError,
)
from metadata.owned_task import OwnedTask, cut_off

if TYPE_CHECKING:
    from collections.abc import Collection

    from bookie_aio.wire.blocks import Block, LacStatement
    from bookie_aio.wire.watching import Moved
    from client_aio.bookies.connection import BookieConnection, Outcome
    from client_aio.bookies.pool import BookiePool
    from client_aio.config import ClientConfig
    from client_aio.core.read_plan import ClassRange
    from metadata.access.ledgers import LedgerStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)

_PLACES_MIN = 2
_LOOK_INTERVAL_S = 0.5
_RETRY_S = 0.1
_RETRY_MAX_S = 10.0
_PAUSE_S = 0.002
"""The least time between two WATCHes to one bookie: what is armed meanwhile leaves together."""


class Following(Protocol):
    """The reader of a tail. Its methods are private, since a `LedgerReader` is a public handle."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def metadata(self) -> LedgerMetadata: ...

    @property
    def last_add_confirmed(self) -> int: ...

    def _learn(self, metadata: LedgerMetadata, version: Version) -> None: ...

    def _note(self, statement: LacStatement) -> bool: ...

    def _is_behind(self, statement: LacStatement) -> bool: ...


def places(
    ensemble: tuple[str, ...], write_quorum: int, ack_quorum: int, turn: int, asked_last: Collection[str]
) -> list[str]:
    """Return the bookies to watch a ledger at: rotated, so that ledgers spread, doubtful bookies last.

    They lie in one write set, the first one that has enough bookies which are not doubtful. Where none has,
    it is the first one that lacks the fewest.
    """
    count = max(_PLACES_MIN, write_quorum - ack_quorum + 1)
    chosen: list[list[str]] = []
    for start in range(turn, turn + len(ensemble)):
        at = start % len(ensemble)
        run = (ensemble[at:] + ensemble[:at])[: max(write_quorum, count)]
        chosen.append(sorted(run, key=asked_last.__contains__)[:count])
    return min(chosen, key=lambda names: sum(map(asked_last.__contains__, names)))


class Tail:
    """One reader that follows its ledger.

    Attributes:
        known: the LAC that the reader knows and waits behind; None while it does not wait.
        handed_out: the last entry that the reader has handed out; None before the first.
    """

    __slots__ = ("_ledger", "_woken", "handed_out", "known", "reader")

    def __init__(self, ledger: FollowedLedger, reader: Following) -> None:
        self._ledger = ledger
        self._woken: asyncio.Future[None] | None = None
        self.reader = reader
        self.known: int | None = None
        self.handed_out: int | None = None

    @property
    def lag(self) -> int:
        """Return how many entries up to the LAC that is known the reader has not handed out; 0 while idle."""
        return 0 if self.handed_out is None else max(0, self.reader.last_add_confirmed - self.handed_out)

    async def wait(self) -> None:
        """Wait until the LAC or the metadata may have changed. One task at a time may wait.

        Raises:
            NoSuchLedgerError, MetadataCorruptError: the ledger has been deleted, or its metadata are damaged.
            ClientClosedError: the client is closed.
        """
        ledger = self._ledger
        ledger.check()
        self._woken = asyncio.get_running_loop().create_future()
        self.known = self.reader.last_add_confirmed
        ledger.arm(self.known)
        try:
            await self._woken
        finally:
            self._woken = self.known = None
        ledger.check()

    def wake(self) -> None:
        """Let the reader look again."""
        self.known = None
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def close(self) -> None:
        """Stop following."""
        await self._ledger.leave(self)


class SharedRead:
    """A read that several tails wait for. It ends when nobody waits for it any more."""

    def __init__(self, task: asyncio.Task[list[Block]]) -> None:
        self.task = task
        self._waiting = 0

    async def result(self) -> list[Block]:
        """Wait for the blocks; raises as the read does."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self.task.done():
                self.task.cancel()


class Tails:
    """All tails of a client.

    Attributes:
        reads: the reads under way of tails that have woken together.
    """

    def __init__(self, pool: BookiePool, ledgers: LedgerStore, config: ClientConfig) -> None:
        self._pool = pool
        self.reports = pool.directory.reports
        self._store = ledgers
        self._config = config
        self._ledgers: dict[int, FollowedLedger] = {}
        self._bookies: dict[str, WatchedBookie] = {}
        self._doubtful: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.reads: dict[ClassRange, SharedRead] = {}

    def follow(self, reader: Following) -> Tail:
        """Begin a tail; the caller closes it.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self._is_closed:
            raise ClientClosedError("the client is closed")
        ledger = self._ledgers.get(reader.ledger_id)
        if ledger is None:
            ledger = self._ledgers[reader.ledger_id] = FollowedLedger(self, self._store, reader.ledger_id)
        if self._timer is None:
            self._look_later()
        return ledger.join(reader)

    def bookie(self, bookie_id: str) -> WatchedBookie:
        """Return the bookie's watched ledgers."""
        found = self._bookies.get(bookie_id)
        if found is None:
            found = self._bookies[bookie_id] = WatchedBookie(self, self._pool, self._config, bookie_id)
        return found

    def ledger(self, ledger_id: int) -> FollowedLedger | None:
        """Return a ledger that has tails."""
        return self._ledgers.get(ledger_id)

    def lags(self) -> list[int]:
        """Return the lag of each tail, in entries (`Tail.lag`)."""
        return [tail.lag for ledger in list(self._ledgers.values()) for tail in ledger.tails]

    def forget(self, ledger: FollowedLedger) -> None:
        """Forget a ledger whose tails have ended."""
        if self._ledgers.get(ledger.ledger_id) is ledger:
            del self._ledgers[ledger.ledger_id]
        if not self._ledgers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """End all tails with ClientClosedError."""
        self._is_closed = True
        for ledger in list(self._ledgers.values()):
            ledger.fail(ClientClosedError("the client is closed"))
        for bookie in self._bookies.values():
            bookie.stop()

    def asked_last(self) -> list[str]:
        """Return the bookies where ledgers are watched only if there are no others."""
        failing = [name for name, bookie in self._bookies.items() if bookie.is_failing]
        return [*self._pool.doubtful(), *failing]

    def look(self) -> None:
        """Choose other places for the ledgers, if other bookies are doubtful now."""
        doubtful = self.asked_last()
        if doubtful != self._doubtful:
            self._doubtful = doubtful
            for ledger in list(self._ledgers.values()):
                ledger.place()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._look_later()
        self.look()


class FollowedLedger:
    """A ledger with tails."""

    def __init__(self, tails: Tails, store: LedgerStore, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self._of_client = tails
        self._store = store
        self._tails: dict[Tail, None] = {}
        self._places: list[str] = []
        self._avoided: dict[str, asyncio.TimerHandle] = {}
        self._known: tuple[LedgerMetadata, Version] | None = None
        self._armed: int | None = None  # the lowest LAC that a waiting tail knows; None if none waits
        self._error: BookKeeperError | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._has_ended = False
        self._watch = OwnedTask(self._follow_metadata, f"metadata of ledger {ledger_id}")

    @property
    def tails(self) -> list[Tail]:
        """Return the tails."""
        return list(self._tails)

    def join(self, reader: Following) -> Tail:
        """Add a tail."""
        if self._known is not None:
            reader._learn(*self._known)
        tail = Tail(self, reader)
        self._tails[tail] = None
        return tail

    async def leave(self, tail: Tail) -> None:
        """Take out a tail. The last one ends the watches."""
        self._tails.pop(tail, None)
        if self._tails:
            return
        self._end()
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.gather(self._catching_up, return_exceptions=True)
        await self._watch.wait()

    def check(self) -> None:
        """Raise the error that has ended the tails of this ledger."""
        if self._error is not None:
            raise type(self._error)(str(self._error), ledger_id=self.ledger_id)

    def fail(self, error: BookKeeperError) -> None:
        """End all tails of this ledger with an error."""
        if self._error is None:
            self._error = error
            self._end()
            self._wake_all()

    def _end(self) -> None:
        self._has_ended = True
        if not self._watch.is_current:
            self._watch.cancel()
        self._of_client.forget(self)
        self._watch_nowhere()
        for timer in self._avoided.values():
            timer.cancel()
        self._avoided = {}

    # --- where it is watched ---

    def arm(self, lac: int) -> None:
        """Watch the ledger until its LAC is above this one."""
        if self._armed is not None and lac >= self._armed:
            return
        self._armed = lac
        if not self._places:
            self.place()
            return
        for bookie_id in self._places:
            if bookie_id not in self._avoided:
                self._of_client.bookie(bookie_id).arm(self.ledger_id, lac)

    def place(self) -> None:
        """Choose where the ledger is watched, by the newest metadata and the state of the bookies."""
        if self._armed is None:
            self._watch_nowhere()
            return
        metadata = next(iter(self._tails)).reader.metadata if self._known is None else self._known[0]
        asked_last = {*self._of_client.asked_last(), *self._avoided}
        ensemble, write_quorum = metadata.last_fragment.bookies, metadata.write_quorum
        former = self._places
        self._places = places(ensemble, write_quorum, metadata.ack_quorum, self.ledger_id, asked_last)
        for bookie_id in former:
            if bookie_id not in self._places:
                self._of_client.bookie(bookie_id).disarm(self.ledger_id)
        for bookie_id in self._places:
            if bookie_id not in former and bookie_id not in self._avoided:
                self._of_client.bookie(bookie_id).arm(self.ledger_id, self._armed)

    def avoid(self, bookie_id: str, seconds: float) -> None:
        """Watch the ledger elsewhere for so long. If that is not possible, it is not watched there either."""
        timer = self._avoided.pop(bookie_id, None)
        if timer is not None:
            timer.cancel()
        if not self._has_ended:
            loop = asyncio.get_running_loop()
            self._avoided[bookie_id] = loop.call_later(seconds, self._avoid_no_more, bookie_id)
            self.place()

    def _avoid_no_more(self, bookie_id: str) -> None:
        del self._avoided[bookie_id]
        if bookie_id in self._places:
            self._places.remove(bookie_id)
        self.place()

    def _watch_nowhere(self) -> None:
        for bookie_id in self._places:
            self._of_client.bookie(bookie_id).disarm(self.ledger_id)
        self._places = []
        self._armed = None

    # --- what the bookies say ---

    def moved(self, statement: LacStatement | None, bookie_id: str) -> None:
        """Note what a bookie says of this ledger, which is not armed there any more.

        Args:
            statement: the LAC; None if the bookie has deleted the ledger, which only the metadata decide.
        """
        readers = [tail.reader for tail in self._tails]
        if statement is None or any(reader._is_behind(statement) for reader in readers):
            self._catch_up(statement, bookie_id)
            return
        verdicts = [reader._note(statement) for reader in readers]
        if not all(verdicts):
            self.avoid(bookie_id, _RETRY_MAX_S)
            return
        self._armed = None
        waiting: list[int] = []
        for tail in self._tails:
            if tail.known is None:
                continue
            if tail.reader.last_add_confirmed > tail.known:
                tail.wake()
            else:
                waiting.append(tail.known)
        if waiting:
            self.arm(min(waiting))

    def _wake_all(self) -> None:
        self._armed = None
        for tail in self._tails:
            tail.wake()

    # --- metadata ---

    async def _refresh(self, *, sync: bool) -> None:
        self._known = await self._store.read(self.ledger_id, sync=sync)
        for tail in self._tails:
            tail.reader._learn(*self._known)
        self.place()
        self._wake_all()

    async def _follow_metadata(self) -> None:
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._store.watch(self.ledger_id)) as changes:
                        async for _ in changes:
                            await self._refresh(sync=False)
                            if self._known is not None and self._known[0].is_closed:
                                return  # A closed ledger changes no more.
                except MetadataUnavailableError as error:
                    # Rule 9: reading goes on while the metadata store is unavailable.
                    self._warn(error)
                await asyncio.sleep(_RETRY_S)
        except BookKeeperError as error:
            self.fail(error)

    def _warn(self, error: BookKeeperError) -> None:
        """Warn that the metadata cannot be read; thousands of followed ledgers may find that at once."""
        reports = self._of_client.reports
        reports.warn(
            logger, ("followed", type(error)), "ledger=%d metadata not reachable: %s", self.ledger_id, error
        )

    def _catch_up(self, statement: LacStatement | None, bookie_id: str) -> None:
        """Read the metadata as they are now: a term's metadata were written before its first statement."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._caught_up(statement, bookie_id))
            self._catching_up.add_done_callback(
                lambda task: self.avoid(bookie_id, _RETRY_S) if task.cancelled() else None
            )

    async def _caught_up(self, statement: LacStatement | None, bookie_id: str) -> None:
        try:
            await self._refresh(sync=True)
        except MetadataUnavailableError as error:
            self._warn(error)
        except BookKeeperError as error:
            self.fail(error)
            return
        readers = [tail.reader for tail in self._tails]
        if statement is None or any(reader._is_behind(statement) for reader in readers):
            # The bookie knows better than the metadata store, or is wrong: it is asked again later.
            self.avoid(bookie_id, _RETRY_S)
        else:
            self.moved(statement, bookie_id)


class WatchedBookie:
    """The ledgers that are watched at one bookie, by one WATCH that is outstanding there.

    A *round* begins with a connection, and with all armed ledgers unsent. The next one may begin on the same
    connection: a request that times out need not end it. What moved counts in whatever answer it comes. The
    end of a request counts for its own round only.
    """

    def __init__(self, tails: Tails, pool: BookiePool, config: ClientConfig, bookie_id: str) -> None:
        self.bookie_id = bookie_id
        self._tails = tails
        self._pool = pool
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._armed: dict[int, int] = {}  # known LACs of the ledgers that are watched or to be watched
        self._unsent: dict[int, int] = {}  # rows that the bookie has not been sent
        self._connection: BookieConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._round = 0
        self._outstanding = 0  # WATCHes of this round
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._failures = 0
        self._refusals = 0
        self._is_stopped = False

    @property
    def is_failing(self) -> bool:
        """Return whether the last attempt to watch here has failed."""
        return self._failures > 0

    def arm(self, ledger_id: int, known_lac: int) -> None:
        """Watch a ledger until its LAC is above this one."""
        if self._armed.get(ledger_id) != known_lac:
            self._armed[ledger_id] = self._unsent[ledger_id] = known_lac
            self._send_soon()

    def disarm(self, ledger_id: int) -> None:
        """Watch a ledger no more."""
        if self._armed.pop(ledger_id, None) is not None:
            self._unsent[ledger_id] = UNWATCH
            if self._connection is not None:
                self._send_soon()

    def stop(self) -> None:
        """Watch nothing more."""
        self._is_stopped = True
        self._armed.clear()
        self._unsent.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()

    def _send_soon(self, pause_s: float = _PAUSE_S) -> None:
        """Send a WATCH once so much time has passed since the last one."""
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._loop.time(), self._sent_at + pause_s), self._send)

    def _send(self) -> None:
        self._timer = None
        if self._is_stopped:
            return
        connection = self._connection
        if connection is None or not connection.is_open:
            self._connection = None
            if not self._armed:
                self._failures = 0  # Whether it can be watched here is seen when something is armed.
            elif self._connecting is None:
                self._connecting = self._loop.create_task(self._connect(), name=f"tails at {self.bookie_id}")
                self._connecting.add_done_callback(self._has_connected)
            return
        if not self._armed and not self._unsent:
            return
        rows: list[tuple[int, int]] = []
        while self._unsent and len(rows) < ROWS_MAX:
            rows.append(self._unsent.popitem())
        wait_ms = 0 if self._unsent else min(WAIT_MS_MAX, int(self._config.long_poll_s * 1000))
        asked, sent_in = encode_asked(rows), self._round
        self._outstanding += 1
        self._sent_at = self._loop.time()
        connection.request(
            Watch(wait_ms),
            lambda outcome, body: self._answered(connection, sent_in, rows, outcome, body),
            body=[asked],
            body_bytes=len(asked),
            timeout_s=self._config.read_timeout_s + wait_ms / 1000,
        )
        if self._unsent:
            self._send_soon(0.0)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.get(self.bookie_id)
        except ClientClosedError:
            return
        except BookKeeperError as error:
            self._failed(error)
            return
        # A new connection watches nothing yet. A former one may, and answers to former WATCHes may come.
        self._connection, self._outstanding = connection, 0
        self._round += 1
        self._unsent = dict(self._armed)
        self._send_soon()

    def _has_connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if task.cancelled() and not self._is_stopped:  # by the application, and tails go on
            self._failed(cut_off(self.bookie_id))

    def _failed(self, error: BookKeeperError) -> None:
        """Watch elsewhere, and try again here later."""
        logger.debug("bookie=%s cannot be asked for LACs: %s", self.bookie_id, error)
        self._connection = None
        self._failures += 1
        if self._timer is not None:
            self._timer.cancel()
        pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(self._failures - 1, 10))
        self._timer = self._loop.call_later(pause_s, self._send)
        self._tails.look()

    def _answered(
        self,
        connection: BookieConnection,
        sent_in: int,
        asked: list[tuple[int, int]],
        outcome: Outcome,
        body: memoryview,
    ) -> None:
        if connection is not self._connection:
            return
        if sent_in == self._round:
            self._outstanding -= 1
        elif isinstance(outcome, (Failure, BookKeeperError)):
            return  # All that was armed has been sent again since, or will be.
        if isinstance(outcome, Failure) and outcome.status is Status.TOO_MANY_REQUESTS:
            self._refused(asked)
        elif isinstance(outcome, Failure):
            self._failed(error_of(outcome, bookie_id=self.bookie_id))
            return
        elif isinstance(outcome, BookKeeperError):
            self._failed(outcome)
            return
        else:
            try:
                rows = parse_moved(body)
            except MalformedFrameError as error:
                connection.close(error)
                self._failed(error)
                return
            self._failures = 0
            self._refusals = 0 if asked else self._refusals
            for row in rows:
                self._moved(row)
        if self._unsent or (self._armed and not self._outstanding):
            self._send_soon()

    def _moved(self, row: Moved) -> None:
        known_lac = self._armed.get(row.ledger_id)
        if known_lac is None or (row.statement is not None and row.statement.lac <= known_lac):
            return  # It is watched no more, or was armed again meanwhile.
        del self._armed[row.ledger_id]
        self._unsent.pop(row.ledger_id, None)
        ledger = self._tails.ledger(row.ledger_id)
        if ledger is not None:
            ledger.moved(row.statement, self.bookie_id)

    def _refused(self, asked: list[tuple[int, int]]) -> None:
        """Watch the ledgers of a refused request elsewhere, and not here for a while."""
        self._refusals += 1
        pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(self._refusals, 10))
        for ledger_id, known_lac in asked:
            if known_lac == UNWATCH:
                self._unsent.setdefault(ledger_id, UNWATCH)
            elif ledger_id not in self._unsent and self._armed.pop(ledger_id, None) is not None:
                ledger = self._tails.ledger(ledger_id)
                if ledger is not None:
                    ledger.avoid(self.bookie_id, pause_s)
