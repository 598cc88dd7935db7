"""A bookie: the storage engine, the listening socket and the registration of one server.

Owns the order of start and end. The start checks the identity, replays the storage, listens and registers.
The registration comes last, so that no client finds a bookie that cannot answer yet. The end accepts nothing
more, answers every accepted request, deregisters and closes.

Connections are accepted in turns of the slow lane, a few in each (`PacedServer`). asyncio's own server
accepts all that wait in one event-loop iteration.

Invariant (rule 2): once the storage has failed, nothing is answered any more. All connections are aborted, so
that no client waits for an answer that will not come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from bookie_aio.metrics import Figures, RequestMetrics
from bookie_aio.server.age import BookieAge
from bookie_aio.server.backpressure import Backpressure
from bookie_aio.server.connection import DEAR, Connection
from bookie_aio.server.dispatcher import Dispatcher, LedgerAuthoriser
from bookie_aio.server.given_ids import GivenIds
from bookie_aio.server.healing import Healing
from bookie_aio.server.ledger_gc import LedgerGarbageCollector
from bookie_aio.server.password_ledgers import PasswordLedgers
from bookie_aio.server.registration import (
    BookieRegistration,
    StandingOrder,
    decommissioned,
    establish_identity,
    fault_of_registration,
)
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.data_directory import owner_of
from bookie_aio.storage.engine import Engine
from bookie_aio.storage.segment.allocator import space_of
from bookie_aio.structured_logging import RepeatedWarnings, fields
from bookie_aio.wire.messages import VERSION_MAX, HelloAnswer
from metadata import build
from metadata.access.bookies import REMOVED, BookieRecord, join_address, split_address
from metadata.access.ledgers import LedgerStore
from metadata.errors import StorageError

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Coroutine, Sequence
    from types import TracebackType

    from bookie_aio.config import BookieConfig
    from bookie_aio.server.backpressure import SlowLane
    from bookie_aio.server.dispatcher import Authoriser
    from bookie_aio.storage.disk.disk import Disk
    from metadata.access.bookies import Cookie
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 4
_ANNOUNCE_S = 10.0
"""How often the free space is looked at."""
_ACCEPT_AGAIN_S = 0.5
"""The time after which a bookie without descriptors tries again."""


class ListeningSocket(Protocol):
    """A listening socket, as far as its address is concerned."""

    def getsockname(self) -> tuple[str, int]:
        """Return host and port, and perhaps more."""


class Server(Protocol):
    """A server that accepts connections."""

    @property
    def sockets(self) -> Sequence[ListeningSocket]:
        """Return the listening sockets."""

    def close(self) -> None:
        """Accept nothing more."""


Counted = TypeVar("Counted")
Listen = Callable[[Callable[[], Connection], str, int], Awaitable[Server]]
"""Called with what makes a connection, the host, and the port. Raises OSError."""


async def listening_sockets(
    host: str, port: int, *, what: str = "the bookie", backlog: int = _BACKLOG
) -> list[socket.socket]:
    """Listen on all addresses of a host. Raises OSError, whose message begins with `what`."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind(address)
                one.listen(backlog)
            except OSError as error:
                where = join_address(str(address[0]), int(address[1]))
                reason = os.strerror(error.errno or 0)
                raise OSError(error.errno, f"{what} cannot listen on {where}: {reason}") from error
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


class PacedServer:
    """Accepts connections in turns of the slow lane. Made by `listen`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        make: Callable[[], Connection],
        lane: SlowLane,
        warnings: RepeatedWarnings,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._lane = lane
        self._warnings = warnings
        self._accepting: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self.sockets = sockets
        self._wait_for_connections()

    @classmethod
    async def listen(
        cls,
        make: Callable[[], Connection],
        host: str,
        port: int,
        lane: SlowLane,
        warnings: RepeatedWarnings,
    ) -> Self:
        """Listen on all addresses of a host. Raises OSError."""
        return cls(await listening_sockets(host, port), make, lane, warnings)

    def _wait_for_connections(self) -> None:
        self._again = None
        for one in self.sockets:
            self._loop.add_reader(one.fileno(), self._readable)

    def _readable(self) -> None:
        if self._lane.begin(self, DEAR, is_writer=True):
            self._accept()
            self._lane.end()
        else:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        for one in self.sockets:
            self._loop.remove_reader(one.fileno())

    def take_turn(self) -> None:
        """Accept some connections."""
        self._lane.begin(self, DEAR, is_writer=True)
        self._wait_for_connections()
        self._accept()

    def _accept(self) -> None:
        for listening in self.sockets:
            for _ in range(_ACCEPTED_AT_ONCE):
                try:
                    accepted, _ = listening.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    break
                except OSError as error:
                    reason = f"{os.strerror(error.errno or 0)}: retried every {_ACCEPT_AGAIN_S:g} s"
                    self._warnings.warning("no connection can be accepted", reason=reason)
                    self._stop_waiting()
                    if self._again is None:
                        self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self._wait_for_connections)
                    return
                accepted.setblocking(False)
                task = self._loop.create_task(self._lane.timed(self._connect(accepted), DEAR))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:  # it was closed meanwhile
            accepted.close()

    def close(self) -> None:
        """Accept nothing more. A second call does nothing."""
        if self._again is not None:
            self._again.cancel()
        self._stop_waiting()
        self._lane.forget(self)
        sockets, self.sockets = self.sockets, []
        for one in sockets:
            one.close()


class Bookie:
    """A running bookie; made by `start`. Also a context manager that closes it.

    `address` is the `host:port` listened on. `addresses` are the advertised addresses, best first. `nonce` is
    a random text drawn at this start. `stopped` completes when the bookie serves no more: with the error of a
    fail-stop (rule 2), or with None once it is closed.
    """

    def __init__(
        self,
        config: BookieConfig,
        cookie: Cookie,
        *,
        nonce: str,
        clock: Callable[[], float] | None,
        effort: Callable[[], float] | None,
        authoriser: Authoriser | None,
        listen: Listen | None,
    ) -> None:
        """Use `start`."""
        self._config = config
        self._cookie = cookie
        self._authoriser = authoriser
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._backpressure = Backpressure(config.limits, self._loop, clock, effort)
        self._metrics = RequestMetrics(self._backpressure.clock)
        self._connections: set[Connection] = set()
        self._warnings = RepeatedWarnings(log, self._loop)
        self._engine: Engine | None = None
        self._age: BookieAge | None = None
        self._given_ids: GivenIds | None = None
        self._dispatcher: Dispatcher | None = None
        self._store: MetadataStore | None = None
        self._ledger_gc: LedgerGarbageCollector | None = None
        self._healing: Healing | None = None
        self._passwords: PasswordLedgers | None = None
        self._listen_on = listen or self._listen_paced
        self._server: Server | None = None
        self._registration: BookieRegistration | None = None
        self._order: StandingOrder | None = None
        self._announcing: asyncio.TimerHandle | None = None
        self._disk: Disk | None = None
        self._is_ending = False
        self._deregistering: asyncio.Task[None] | None = None
        self.bookie_id = config.bookie_id
        self.nonce = nonce
        self.address = ""
        self.addresses: list[str] = []
        self.stopped: asyncio.Future[StorageError | None] = self._loop.create_future()

    @classmethod
    async def start(
        cls,
        config: BookieConfig,
        store: MetadataStore,
        disk: Disk,
        *,
        rng: random.Random,
        now_ms: Callable[[], int],
        clock: Callable[[], float] | None = None,
        effort: Callable[[], float] | None = None,
        authoriser: Authoriser | None = None,
        listen: Listen | None = None,
    ) -> Self:
        """Check the identity, replay the storage, listen, register.

        Args:
            config: identity, addresses and limits; checked when it was built.
            store: the metadata store; the caller closes it, after the bookie.
            disk: the disk of the data directories.
            rng: source of nonces and incarnations; `random.SystemRandom()` outside simulations.
            now_ms: wall clock in milliseconds, for the cluster's record only.
            clock: the time in seconds; None stands for the event loop's, which may stand still within an
                iteration.
            effort: the processor time of this thread in seconds; None stands for `clock`.
            authoriser: decides on every request; None stands for a `LedgerAuthoriser`.
            listen: makes the server; None stands for a `PacedServer`.

        Raises:
            CookieMismatchError: the directory belongs to another bookie or cluster, or was emptied (rule 6).
            DirectoryInUseError: another process has it open.
            KeyExistsError: a bookie of that id is running elsewhere.
            StorageError: the directory cannot be read or replayed.
            MetadataUnavailableError: the metadata store cannot be reached.
            OSError: the address cannot be listened on.
        """
        cookie = await establish_identity(config, store, disk, rng=rng, now_ms=now_ms)
        nonce = f"{rng.getrandbits(64):016x}"
        bookie = cls(
            config, cookie, nonce=nonce, clock=clock, effort=effort, authoriser=authoriser, listen=listen
        )
        try:
            await bookie._open(disk, store, rng)
            await bookie._listen()
            await bookie._register(store)
            if bookie.stopped.done():
                raise bookie.stopped.result() or StorageError("the storage failed during the start")
        except BaseException:
            await bookie.close()
            raise
        log.info(
            "bookie started",
            extra=fields(
                bookie=bookie.bookie_id,
                address=bookie.address,
                advertised=",".join(bookie.addresses),
                nonce=bookie.nonce,
            ),
        )
        return bookie

    async def _open(self, disk: Disk, store: MetadataStore, rng: random.Random) -> None:
        config, self._disk, self._store = self._config, disk, store
        # Before the bookie listens: it takes no add that an order of before its start forbids.
        self._order = StandingOrder(store, config.bookie_id, self._on_ordered)
        await self._order.start()
        if self._order.mode == REMOVED:
            raise decommissioned(config.bookie_id)
        # The nonce is the token of the age: a restart knows the registration of the process before it.
        age = BookieAge(config, store, disk, rng, token=self.nonce, owner=owner_of(self._cookie))
        self._engine = await Engine.open(
            disk,
            config.directories,
            config.storage or StorageConfig(),
            draw_generation=lambda: rng.getrandbits(64),
            on_indexed=self._on_indexed,
            on_failed=self._on_failed,
            on_writable=self._on_writable,
            on_warning=self._on_warning,
            begin=age.begin,
            owner=owner_of(self._cookie),
            clock=self._backpressure.clock,
        )
        for note in self._engine.notes:
            log.error("damage was found on the disk", extra=fields(bookie=self.bookie_id, what=note))
        # The storage has marked what a directory that was set back may have lost.
        await age.settle(self._engine)
        self._age = age
        self._given_ids = GivenIds(age.ids_known, age.learn_ids)
        self._ledger_gc = LedgerGarbageCollector(
            self._engine, store, self._cookie, age, self._given_ids, config.unnamed_grace_s
        )
        self._healing = Healing(self._engine, store, config.bookie_id, self._ledger_gc.check_store, age)
        self._ledger_gc.lift_mark = self._healing.lift
        # Rule 4: before the bookie listens, so that it never refuses an add that it takes a moment later.
        await self._healing.bound()
        self._passwords = PasswordLedgers(self._engine, LedgerStore(store))
        self._dispatcher = Dispatcher(
            engine=self._engine,
            limits=config.limits,
            hello=HelloAnswer(
                version=VERSION_MAX,
                bookie_id=config.bookie_id,
                instance_id=self._cookie.instance_id,
                nonce=self.nonce,
                frame_bytes_max=config.limits.frame_bytes_max,
                entry_bytes_max=config.limits.entry_bytes_max,
            ),
            loop=self._loop,
            info=self.info,
            authoriser=self._authoriser or LedgerAuthoriser(self._engine, self._passwords),
            passwords=self._passwords,
            drop_if_deleted=self._ledger_gc.drop_if_deleted,
            given_ids=self._given_ids,
            not_free_below=lambda: age.not_free_below,
            lift_mark=self._healing.lift,
            order=self._order,
            warnings=self._warnings,
            metrics=self._metrics,
        )
        self._bound_marks()
        self._ledger_gc.start(config.sweep_interval_s)

    async def _listen(self) -> None:
        host, port = self._config.listen
        self._server = await self._listen_on(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        self.address = join_address(bound[0], bound[1])
        self.addresses = []
        for address in self._config.advertise or [self.address]:
            advertised_host, advertised_port = split_address(address)
            self.addresses.append(join_address(advertised_host, advertised_port or bound[1]))

    async def _listen_paced(self, make: Callable[[], Connection], host: str, port: int) -> Server:
        return await PacedServer.listen(make, host, port, self._backpressure.slow_lane, self._warnings)

    def _accept(self) -> Connection:
        assert self._dispatcher is not None
        return Connection(
            self._loop,
            self._config.limits,
            self._backpressure,
            self._dispatcher,
            self._connections,
            self._warnings,
            self._metrics,
        )

    async def _register(self, store: MetadataStore) -> None:
        assert self._engine is not None
        assert self._order is not None
        config = self._config
        self._registration = await BookieRegistration.make(
            store,
            BookieRecord(
                bookie_id=config.bookie_id,
                addresses=self.addresses,
                nonce=self.nonce,
                is_writable=self.is_writable,
                order=self._order.mode,
                rack=config.rack,
                weight=config.weight,
                properties=dict(config.properties),
            ),
        )
        # Behind the registration. Whoever orders a bookie to leave looks for one behind the order. So the
        # bookie hears of the order, or the other hears of the bookie.
        await self._order.look()
        # The bookie may have become read-only, or writable, while the registration was under way.
        self._announce_again()
        assert self._age is not None
        self._age.start(self._on_failed)

    # --- the engine's calls --------------------------------------------------------------------

    def _on_indexed(self, ledger_ids: Collection[int]) -> None:
        if self._dispatcher is not None:
            self._dispatcher.ledgers_moved(ledger_ids)

    def _on_writable(self, is_writable: bool) -> None:
        if self._engine is not None and self._engine.marking.is_unbounded:
            text = "bookie is read-only: it lost data, and perhaps fences of any ledger"
            self._bound_marks()
        else:
            text = "bookie is writable again" if is_writable else "bookie is read-only: no space left"
        log.warning(text, extra=fields(bookie=self.bookie_id))
        self._announce()

    def _on_ordered(self) -> None:
        """Obey another order of an operator: the handlers look at it by themselves."""
        assert self._order is not None
        self._announce()
        if self._order.mode == REMOVED:
            log.warning("bookie stops: it is decommissioned", extra=fields(bookie=self.bookie_id))
            self._stop_serving(decommissioned(self.bookie_id))

    @property
    def is_writable(self) -> bool:
        """Return whether the bookie takes ordinary adds: the storage can, and no order forbids it."""
        assert self._engine is not None
        assert self._order is not None
        return self._engine.is_writable and not self._order.mode

    def _announce(self) -> None:
        if self._registration is not None and self._order is not None:
            self._registration.announce(
                is_writable=self.is_writable, order=self._order.mode, space=self._space()
            )

    def _announce_again(self) -> None:
        """Announce the free space where it has changed, now and from time to time."""
        if not self._is_ending and not self.stopped.done():
            self._announce()
            self._announcing = self._loop.call_later(_ANNOUNCE_S, self._announce_again)

    def _space(self) -> tuple[int, int, bool] | None:
        assert self._disk is not None
        limits = (self._config.storage or StorageConfig()).space
        try:
            return space_of(self._disk, self._config.directories, limits)
        except StorageError as error:
            log.warning("free space is not known", extra=fields(bookie=self.bookie_id, error=error))
            return None

    def _bound_marks(self) -> None:
        """Bound the marks of all ledgers, where that is still to be done, and take new ledgers again."""
        if self._healing is not None and self._engine is not None and self._engine.marking.is_unbounded:
            engine = self._engine
            self._healing.bound_soon(lambda: self._on_writable(engine.has_room))

    def _on_warning(self, text: str) -> None:
        log.warning(text, extra=fields(bookie=self.bookie_id))

    def _on_failed(self, error: StorageError) -> None:
        log.critical("bookie stops: its storage failed", extra=fields(bookie=self.bookie_id, error=error))
        self._stop_serving(error)

    def _stop_serving(self, error: StorageError) -> None:
        if self._server is not None:
            self._server.close()
        if self._dispatcher is not None:
            self._dispatcher.is_draining = True
        for connection in list(self._connections):
            connection.abort()
        if self._registration is not None and self._deregistering is None:
            self._deregistering = self._loop.create_task(self._registration.close())
        if not self.stopped.done():
            self.stopped.set_result(error)

    @property
    def age(self) -> BookieAge:
        """Return what the bookie knows of its age, and of set-backs of the metadata."""
        assert self._age is not None
        return self._age

    # --- metrics -------------------------------------------------------------------------------

    def info(self) -> dict[str, object]:
        """Return the metrics that INFO answers with."""
        assert self._engine is not None
        assert self._dispatcher is not None
        assert self._ledger_gc is not None
        assert self._age is not None
        assert self._given_ids is not None
        assert self._healing is not None
        assert self._order is not None
        return {
            "bookie_id": self.bookie_id,
            "instance_id": self._cookie.instance_id,
            "incarnation": self._cookie.incarnation,
            "nonce": self.nonce,
            "address": self.address,
            "advertised": self.addresses,
            "build": build.form(),
            "interpreter": build.interpreter(),
            "uptime_s": round(self._loop.time() - self._started_at, 3),
            "is_writable": self.is_writable,
            "order": self._order.mode or None,
            "connections": len(self._connections),
            "connections_max": self._config.limits.connections_max,
            "connections_waiting": self._backpressure.waiting,
            "bytes_pending": self._backpressure.adds.used,
            "received_bytes": self._backpressure.received.used + self._backpressure.received_of_others.used,
            "reads_bytes": self._backpressure.reads.used,
            "reads_running": self._backpressure.running.used,
            "polls_waiting": self._dispatcher.polls_waiting,
            "ledgers_watched": self._dispatcher.ledgers_watched,
            "ledgers_dropped": self._ledger_gc.dropped,
            "ledgers_forgotten": self._ledger_gc.forgotten,
            "ledgers_trimmed": self._ledger_gc.trimmed,
            "age": self._age.number,
            "ids_given_out": self._given_ids.below,
            "metadata_set_back": self._age.doubt_as_json(),
            "marks_lifted": self._healing.lifted,
            "ledger_id_floor": self._ledger_gc.floor,
            "counters": self._metrics.to_json(),
            "storage": self._engine.metrics(),
        }

    def figures(self) -> Figures:
        """Return the source of all metrics, as they are now."""
        assert self._engine is not None
        return Figures(self.info(), self._metrics, self._engine.counts)

    async def unreadiness(self) -> list[str]:
        """Return why the bookie does not take adds of every writer; nothing where it does.

        It asks the metadata store for the bookie's own record, and waits for a second at most.
        """
        if self._is_ending or self.stopped.done():
            failure = self.stopped.result() if self.stopped.done() else None
            return [f"its storage failed: {failure}" if failure is not None else "the bookie is closing"]
        engine = self._engine
        if engine is None or self._store is None or self._registration is None:
            return ["the bookie is starting"]
        reasons = []
        if self._order is not None and self._order.mode:
            reasons.append(f"an operator has ordered the bookie to take no entries: it is {self._order.mode}")
        if not engine.is_writable:
            why = "it lost data, and perhaps fences of any ledger" if engine.has_room else "no space left"
            reasons.append(f"the bookie is read-only: {why}")
        fault = await fault_of_registration(self._store, self.bookie_id, self.nonce)
        return [*reasons, fault] if fault else reasons

    def in_slow_lane(self, work: Coroutine[object, object, Counted]) -> Coroutine[object, object, Counted]:
        """Return a coroutine that does this work, at the cost of requests that are no adds."""
        return self._backpressure.slow_lane.timed(work, 1.0)

    # --- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop cleanly: accept nothing more, make durable and answer every accepted request, deregister.

        A second call returns at once. After a fail-stop it closes what is still open. Cancelled, it leaves
        the storage as a crash does, and the next start replays it.
        """
        if self._is_ending:
            return
        self._is_ending = True
        if self._announcing is not None:
            self._announcing.cancel()
        if self._server is not None:
            self._server.close()
        if self._dispatcher is not None:
            self._dispatcher.drain()
        if self._ledger_gc is not None:
            await self._ledger_gc.close()
        if self._healing is not None:
            await self._healing.close()
        if self._passwords is not None:
            await self._passwords.close()
        if self._engine is not None and not self.stopped.done():
            await self._finish_accepted(self._engine)
        if self._age is not None:
            await self._age.close()
        if self._given_ids is not None:
            await self._given_ids.close()
        if self._order is not None:
            await self._order.close()
        await self._deregister()
        await self._close_connections()
        if self._engine is not None:
            try:
                await self._engine.close()
            except StorageError as error:
                log.error("closing the storage failed", extra=fields(bookie=self.bookie_id, error=error))
        if not self.stopped.done():
            self.stopped.set_result(None)
        self._warnings.close()
        log.info("bookie closed", extra=fields(bookie=self.bookie_id))

    async def _finish_accepted(self, engine: Engine) -> None:
        """Wait until every accepted request is durable and answered."""
        finished = asyncio.Event()
        engine.barrier(lambda error: finished.set())
        await finished.wait()
        reads = [read for connection in self._connections for read in connection.reads]
        if reads:
            await asyncio.wait(reads, timeout=self._config.limits.shutdown_timeout_s)

    async def _deregister(self) -> None:
        if self._registration is None:
            return
        if self._deregistering is None:
            self._deregistering = self._loop.create_task(self._registration.close())
        await asyncio.wait([self._deregistering], timeout=self._config.limits.shutdown_timeout_s)

    async def _close_connections(self) -> None:
        for connection in list(self._connections):
            connection.close()
        gone = [connection.lost for connection in self._connections]
        if gone:
            await asyncio.wait(gone, timeout=self._config.limits.shutdown_timeout_s)
        for connection in list(self._connections):
            connection.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
