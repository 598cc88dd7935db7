"""A bookie: storage engine, listening socket and registration, put together.

Owns the order of start and end. Start: identity, replay, listen, register; so that nobody finds a bookie
that cannot answer yet. End: accept nothing more, answer what was accepted, deregister, close.

Invariant (rule 2): once the storage has failed, nothing is answered any more. All connections are cut, so
that no client waits for an answer that will not come.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from bookie_aio.server.backpressure import Backpressure
from bookie_aio.server.connection import Connection
from bookie_aio.server.dispatcher import Dispatcher
from bookie_aio.server.ledger_auth import LedgerAuthoriser
from bookie_aio.server.ledger_gc import LedgerGarbageCollector
from bookie_aio.server.registration import BookieRegistration, establish_identity
from bookie_aio.storage.engine import Engine, StorageConfig
from bookie_aio.structured_logging import fields
from bookie_aio.wire.messages import VERSION_MAX, HelloAnswer
from metadata.access.bookies import BookieRecord, join_address, split_address
from metadata.errors import StorageError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection
    from types import TracebackType

    from bookie_aio.config import BookieConfig
    from bookie_aio.server.ledger_auth import Authoriser
    from bookie_aio.storage.disk.disk import Disk
    from metadata.access.bookies import Cookie
    from metadata.store import MetadataStore

log = logging.getLogger(__name__)

_BACKLOG = 1024


class Bookie:
    """A running bookie; made by `start`. Also a context manager that closes it.

    `address` is the `host:port` listened on, `addresses` what is advertised, best first, `nonce` what was
    drawn at this start. `stopped` fires when the bookie serves no more: with the error of a fail-stop
    (rule 2), or with None once it is closed.
    """

    def __init__(
        self, config: BookieConfig, cookie: Cookie, *, nonce: str, authoriser: Authoriser | None
    ) -> None:
        """Use `start`."""
        self._config = config
        self._cookie = cookie
        self._authoriser = authoriser
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._flow = Backpressure(config.limits, self._loop)
        self._connections: set[Connection] = set()
        self._engine: Engine | None = None
        self._requests: Dispatcher | None = None
        self._deletions: LedgerGarbageCollector | None = None
        self._server: asyncio.Server | None = None
        self._announcement: BookieRegistration | None = None
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
        authoriser: Authoriser | None = None,
    ) -> Self:
        """Check the identity, replay the storage, listen, register.

        Args:
            config: what to be; its checks have been made when it was built.
            store: stays the caller's to close, after the bookie.
            disk: where the data directories are.
            rng: source of nonces and incarnations; `random.SystemRandom()` outside simulations.
            now_ms: wall clock in milliseconds, for the cluster's record only.
            authoriser: decides on every request; None: the locks of ledgers do (`LedgerAuthoriser`).

        Raises:
            CookieMismatchError: the directory belongs to another bookie or cluster, or was emptied (rule 6).
            DirectoryInUseError: another process has it open.
            KeyExistsError: a bookie of that id is running elsewhere.
            StorageError: the directory cannot be read or replayed.
            MetadataUnavailableError: the metadata store cannot be reached.
            OSError: the address cannot be listened on.
        """
        cookie = await establish_identity(config, store, disk, rng=rng, now_ms=now_ms)
        bookie = cls(config, cookie, nonce=f"{rng.getrandbits(64):016x}", authoriser=authoriser)
        try:
            await bookie._open(disk, store, rng)
            await bookie._listen()
            await bookie._announce(store)
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
        config = self._config
        self._engine = await Engine.open(
            disk,
            config.directories,
            config.storage or StorageConfig(),
            draw_generation=lambda: rng.getrandbits(64),
            on_indexed=self._on_indexed,
            on_failed=self._on_failed,
            on_writable=self._on_writable,
            on_warning=self._on_warning,
        )
        for note in self._engine.notes:
            log.error("damage was found on the disk", extra=fields(bookie=self.bookie_id, what=note))
        self._deletions = LedgerGarbageCollector(self._engine, store, self._cookie, config.unnamed_grace_s)
        self._requests = Dispatcher(
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
            authoriser=self._authoriser or LedgerAuthoriser(self._engine),
            drop_if_deleted=self._deletions.drop_if_deleted,
        )
        self._deletions.start(config.sweep_interval_s)

    async def _listen(self) -> None:
        host, port = self._config.listen
        self._server = await self._loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        bound = self._server.sockets[0].getsockname()
        self.address = join_address(bound[0], bound[1])
        self.addresses = []
        for address in self._config.advertise or [self.address]:
            advertised_host, advertised_port = split_address(address)
            self.addresses.append(join_address(advertised_host, advertised_port or bound[1]))

    def _accept(self) -> Connection:
        assert self._requests is not None
        return Connection(self._loop, self._config.limits, self._flow, self._requests, self._connections)

    async def _announce(self, store: MetadataStore) -> None:
        assert self._engine is not None
        config = self._config
        self._announcement = await BookieRegistration.make(
            store,
            BookieRecord(
                bookie_id=config.bookie_id,
                addresses=self.addresses,
                nonce=self.nonce,
                is_writable=self._engine.is_writable,
                rack=config.rack,
                weight=config.weight,
                properties=dict(config.properties),
            ),
        )
        # What changed while the registration was under way.
        self._announcement.set_writable(self._engine.is_writable)

    # --- the engine's calls --------------------------------------------------------------------

    def _on_indexed(self, ledger_ids: Collection[int]) -> None:
        if self._requests is not None:
            self._requests.ledgers_moved(ledger_ids)

    def _on_writable(self, is_writable: bool) -> None:
        if self._engine is not None and self._engine.lost_data_of_any_ledger:
            text, is_writable = "bookie is read-only: it lost data, and perhaps fences of any ledger", False
        else:
            text = "bookie is writable again" if is_writable else "bookie is read-only: no space left"
        log.warning(text, extra=fields(bookie=self.bookie_id))
        if self._announcement is not None:
            self._announcement.set_writable(is_writable)

    def _on_warning(self, text: str) -> None:
        log.warning(text, extra=fields(bookie=self.bookie_id))

    def _on_failed(self, error: StorageError) -> None:
        log.critical("bookie stops: its storage failed", extra=fields(bookie=self.bookie_id, error=error))
        if self._server is not None:
            self._server.close()
        if self._requests is not None:
            self._requests.is_draining = True
        for connection in list(self._connections):
            connection.abort()
        if self._announcement is not None and self._deregistering is None:
            self._deregistering = self._loop.create_task(self._announcement.close())
        if not self.stopped.done():
            self.stopped.set_result(error)

    # --- figures -------------------------------------------------------------------------------

    def info(self) -> dict[str, object]:
        """Return the figures that INFO answers with."""
        assert self._engine is not None
        assert self._requests is not None
        assert self._deletions is not None
        return {
            "bookie_id": self.bookie_id,
            "instance_id": self._cookie.instance_id,
            "incarnation": self._cookie.incarnation,
            "nonce": self.nonce,
            "address": self.address,
            "advertised": self.addresses,
            "uptime_s": round(self._loop.time() - self._started_at, 3),
            "is_writable": self._engine.is_writable,
            "connections": len(self._connections),
            "connections_waiting": self._flow.waiting,
            "bytes_pending": self._flow.adds.used,
            "reads_bytes": self._flow.reads.used,
            "reads_running": self._flow.running.used,
            "polls_waiting": self._requests.polls_waiting,
            "ledgers_dropped": self._deletions.dropped,
            "ledgers_forgotten": self._deletions.forgotten,
            "ledgers_trimmed": self._deletions.trimmed,
            "counters": self._requests.metrics.to_json(),
            "storage": self._engine.metrics(),
        }

    # --- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop cleanly: accept nothing more, make durable what was accepted, answer it, deregister.

        Calling it again, or after a fail-stop, is no harm. Cancelled, it leaves what a crash leaves, which
        the next start replays.
        """
        if self._is_ending:
            return
        self._is_ending = True
        if self._server is not None:
            self._server.close()
        if self._requests is not None:
            self._requests.drain()
        if self._deletions is not None:
            await self._deletions.close()
        if self._engine is not None and not self.stopped.done():
            await self._finish_accepted(self._engine)
        await self._deregister()
        await self._close_connections()
        if self._engine is not None:
            try:
                await self._engine.close()
            except StorageError as error:
                log.error("closing the storage failed", extra=fields(bookie=self.bookie_id, error=error))
        if not self.stopped.done():
            self.stopped.set_result(None)
        log.info("bookie closed", extra=fields(bookie=self.bookie_id))

    async def _finish_accepted(self, engine: Engine) -> None:
        """Wait until what was accepted is durable and answered."""
        finished = asyncio.Event()
        engine.barrier(lambda error: finished.set())
        await finished.wait()
        reads = [read for connection in self._connections for read in connection.reads]
        if reads:
            await asyncio.wait(reads, timeout=self._config.limits.shutdown_timeout_s)

    async def _deregister(self) -> None:
        if self._announcement is None:
            return
        if self._deregistering is None:
            self._deregistering = self._loop.create_task(self._announcement.close())
        await asyncio.wait([self._deregistering], timeout=self._config.limits.shutdown_timeout_s)

    async def _close_connections(self) -> None:
        for connection in list(self._connections):
            connection.close()
        gone = [connection.lost for connection in self._connections]
        if gone:
            await asyncio.wait(gone, timeout=self._config.limits.shutdown_timeout_s)
        for connection in list(self._connections):
            connection.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
