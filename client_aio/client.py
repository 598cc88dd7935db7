"""The client: ledgers are made, opened, listed and deleted here; its logs are `client_aio.log`'s.

Owns the metadata store's session and the pool of connections, and hands both to the handles it makes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from client_aio.admin.delete import delete_ledger
from client_aio.admin.repair import Repair, RepairProgress, RepairReport
from client_aio.admin.replicas import Replica, list_replicas
from client_aio.bookies.directory import BookieDirectory
from client_aio.bookies.ensemble_finder import EnsembleFinder
from client_aio.bookies.pool import BookiePool
from client_aio.config import ClientConfig, WriteOptions
from client_aio.context import ClientContext
from client_aio.core.placement import PlacementPolicy, WeightedRandom
from client_aio.handles import AwaitableContext
from client_aio.ledger.create import LedgerSettings, create_ledger
from client_aio.ledger.reader import LedgerReader
from client_aio.ledger.recovery import recover_ledger
from client_aio.ledger.writer import LedgerWriter
from client_aio.log.operations import LogOperations
from client_aio.unbounded.operations import UnboundedLedgerOperations, check_name_or_id
from client_aio.unbounded.reader import UnboundedLedgerReader
from metadata.access.bookies import BookieRecord, ensure_cluster
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store, parse_uri
from metadata.errors import (
    BookieUnavailableError,
    InvalidArgumentError,
    MetadataUnavailableError,
)
from metadata.ids import check_bookie_id, check_ledger_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType

    from metadata.model.ledger import LedgerMetadata
    from metadata.store import MetadataStore

logger = logging.getLogger(__name__)

_CONFIG = ClientConfig()
_tokens: random.Random = random.SystemRandom()
"""Never a caller's: of two clients that draw the same tokens one takes the other's writes for its own."""


def connect(
    metadata: str | MetadataStore,
    *,
    config: ClientConfig = _CONFIG,
    placement: PlacementPolicy | None = None,
    rng: random.Random | None = None,
    **settings: Any,
) -> AwaitableContext[Client]:
    """Connect to a cluster by its metadata store.

    Args:
        metadata: `zk://host:port,…/root`, `sqlite:///absolute/path`, or an open store, which stays its
            owner's to close.
        config: the settings; single ones may be given by name as well, `connect(uri, read_timeout_s=1)`.
        placement: chooses the bookies of ensembles: by default a `WeightedRandom`; a `RackAware`; or your
            own `PlacementPolicy`.
        rng: what the placement draws from.

    Returns:
        An opening of a `Client`: await it, or use it with `async with`.

    Raises:
        InvalidArgumentError: the URI is wrong, or a setting is unknown or wrong.
        MetadataUnavailableError: on opening: the store does not answer.
    """
    try:
        config = replace(config, **settings)
    except TypeError as error:
        known = ", ".join(ClientConfig.__slots__)
        raise InvalidArgumentError(f"{error}; the settings are: {known}") from error
    if isinstance(metadata, str):
        parse_uri(metadata)  # a wrong URI is refused here, not only on opening
    source, tokens = rng or random.Random(), _tokens
    return AwaitableContext(
        lambda: Client._open(metadata, config, placement or WeightedRandom(), source, tokens)
    )


class Client(LogOperations, UnboundedLedgerOperations):
    """A connection to a cluster; made by `connect`. An async context manager."""

    def __init__(self, store: MetadataStore, context: ClientContext, *, owns_store: bool) -> None:
        self._store = store
        self._context = context
        self._owns_store = owns_store
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def _open(
        cls,
        metadata: str | MetadataStore,
        config: ClientConfig,
        placement: PlacementPolicy,
        rng: random.Random,
        tokens: random.Random,
    ) -> Client:
        owns_store = isinstance(metadata, str)
        store = (
            await open_store(
                metadata,
                operation_timeout_s=config.metadata_timeout_s,
                session_timeout_s=config.session_timeout_s,
            )
            if isinstance(metadata, str)
            else metadata
        )
        directory = BookieDirectory(store, config)
        try:
            cluster = await ensure_cluster(
                store, draw_id=lambda: f"{tokens.getrandbits(128):032x}", now_ms=_now_ms()
            )
            await directory.start()
        except BaseException:
            await directory.close()
            if owns_store:
                await store.close()
            raise
        pool = BookiePool(directory, config, cluster.instance_id)
        context = ClientContext(
            config=config,
            ledgers=LedgerStore(store, ids_drawn=config.ledger_id_block),
            pool=pool,
            finder=EnsembleFinder(pool, placement, rng),
            tokens=tokens,
            now_ms=_now_ms,
        )
        return cls(store, context, owns_store=owns_store)

    def __repr__(self) -> str:
        state = "open" if self._closing is None else "closed"
        return f"<Client: {state}, {len(self.bookies)} bookies>"

    @property
    def bookies(self) -> Mapping[str, BookieRecord]:
        """Return the running bookies, as last heard of."""
        return self._context.pool.directory.available

    @property
    def quarantined_bookies(self) -> list[str]:
        """Return the bookies that failed within `quarantine_s`, the one that failed longest ago first.

        They are put into ensembles only where there are too few others, and asked last by readers.
        """
        return self._context.pool.directory.quarantined()

    def create_ledger(
        self,
        *,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest: str = "crc32c",
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
        advanced: bool = False,
        deferred_sync: bool = False,
        guaranteed_write_quorum: bool = False,
    ) -> AwaitableContext[LedgerWriter]:
        """Create a ledger and open it for writing.

        Args:
            ensemble_size: over how many bookies the entries are spread (E).
            write_quorum: how many of them hold each entry (Qw).
            ack_quorum: how many must hold it durably before it is acknowledged (Qa).
            digest: what protects entries: "crc32c" against damage, "hmac-sha256", which needs a password,
                against forgery as well.
            password: from then on opening and deleting the ledger need it, and so do fencing it and adding
                to it at the bookies. Nobody can tell it again: it is not kept anywhere.
            custom_metadata: kept with the ledger, at most 64 KiB. With the key "bookie-aio.log" it names
                the log that this ledger is made for: `add_to_log` does not take it, and `sweep_log_orphans`
                deletes it where that log does not list it.
            advanced: this writer assigns the entry ids: `add_entry(data, entry_id)`.
            deferred_sync: an add's future means received by Qa bookies, not durable; `force()` makes durable
                what was added before it, and only that is acknowledged and can be read.
            guaranteed_write_quorum: keep every entry at hand until all Qw bookies have it, and close only
                then: every entry of the closed ledger has Qw copies (rule 11). Not with deferred sync.

        Raises:
            InvalidArgumentError: at once, unless E ≥ Qw ≥ Qa ≥ 1 and the rest is legal.
            NotEnoughBookiesError: on opening: fewer than E bookies can be reached.
        """
        self._context.check_open()
        options = WriteOptions(advanced=advanced, deferred_sync=deferred_sync)
        if deferred_sync and guaranteed_write_quorum:
            raise InvalidArgumentError(
                "deferred_sync and guaranteed_write_quorum do not go together: choose one"
            )
        settings = LedgerSettings(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest=digest,
            password=password,
            custom_metadata=custom_metadata,
            guaranteed_write_quorum=guaranteed_write_quorum,
        )
        make = partial(LedgerWriter, options=options)
        return AwaitableContext(lambda: create_ledger(self._context, settings, make))

    def open_ledger(
        self, ledger_id: int | str, *, recover: bool = False, password: bytes = b""
    ) -> AwaitableContext[LedgerReader]:
        """Open a ledger for reading, by its id; an unbounded one by its id or its name.

        Without `recover` this never fences: a writer goes on undisturbed, and the handle reads up to the
        LAC and can tail. **With `recover=True` it takes over**: an open ledger is fenced, so that its writer
        acknowledges nothing more, and closed behind its last recoverable entry.

        Raises:
            NoSuchLedgerError: on opening: there is no such ledger.
            InvalidArgumentError: on opening: an unbounded ledger is not recovered, but taken over.
            UnauthorizedAccessError: on opening: the password is not the ledger's. No bookie was asked yet, so
                nothing has been fenced.
            LedgerRecoveryError: on opening, with `recover`: too few bookies answered; run it again later.
        """
        self._context.check_open()
        check_name_or_id(ledger_id)

        async def open_() -> LedgerReader:
            context = self._context
            context.check_open()
            metadata, version = await context.ledgers.read(await self._ledger_id_of(ledger_id))
            digest = await context.unlock(metadata, password)
            if recover:
                recovered = await recover_ledger(context, metadata.ledger_id, digest)
                return LedgerReader(context, *recovered, digest)
            kind = UnboundedLedgerReader if metadata.is_unbounded else LedgerReader
            reader = kind(context, metadata, version, digest)
            try:
                await reader.read_last_add_confirmed()
            except (BookieUnavailableError, MetadataUnavailableError) as error:
                # What is before the last fragment can be read all the same, and tailing asks again.
                logger.warning("ledger=%d its LAC is not known for now: %s", metadata.ledger_id, error)
            return reader

        return AwaitableContext(open_)

    async def delete_ledger(self, ledger_id: int | str, *, password: bytes = b"") -> None:
        """Delete a ledger, for good: a writer of it that lives is shut out, and what it adds late is refused.

        On return the metadata is gone, and those bookies have dropped the ledger that could be reached;
        the others learn of it by themselves. They give the space back later. Cancelling leaves the ledger
        as it was, or deleted, and then perhaps pages of an unbounded one, which `sweep_log_orphans` deletes.

        Raises:
            NoSuchLedgerError: there is none.
            UnauthorizedAccessError: the password is not the ledger's. Nothing was done.
            MetadataUnavailableError: the metadata may be gone, now or later; no bookie was told.
            MetadataCorruptError: the ledger's metadata does not parse, so that its password cannot be asked
                for. Nothing was done.
        """
        self._context.check_open()
        check_name_or_id(ledger_id)
        await delete_ledger(self._context, await self._ledger_id_of(ledger_id), password)

    async def repair_ledger(
        self,
        ledger_id: int,
        *,
        replace: str,
        by: str | None = None,
        recover_after_s: float | None = None,
        password: bytes = b"",
        on_progress: Callable[[RepairProgress], None] = lambda _: None,
    ) -> RepairReport:
        """Copy what a bookie owes of a ledger to another one, and name that in the ledger's metadata.

        Neither fences nor disturbs a writer, a recovery or another repair: of a
        ledger that is not CLOSED, the last fragment is left as it is, unless `recover_after_s` is given.
        May be run again at any time; cancelling it leaves the ledger as good as it was, or better.

        Args:
            replace: the bookie that is lost, damaged, or to be relieved; it need not answer.
            by: the bookie to copy to; by default one that placement chooses. The same one as `replace`
                repairs it in its place, where it lost some of its data and kept its fences.
            recover_after_s: after that many seconds **take the ledger over**, if it is not CLOSED and its
                last fragment is still the same: fence its writer and close it, then repair that fragment.
            password: of a ledger that has one. Copying needs none, unless the bookie that is copied to has
                entries of former terms of an unbounded ledger in their place.
            on_progress: told of each step.

        Raises:
            NoSuchLedgerError: there is none.
            InvalidArgumentError: `by` holds a part of one of the fragments already; or `recover_after_s` is
                given for an unbounded ledger, which is taken over instead.
            NotEnoughBookiesError: there is no bookie to copy to.
            LedgerRepairError: an entry could be had from nobody; the message says what they answered.
            LedgerRecoveryError: the ledger was to be recovered, and that was inconclusive.
            UnauthorizedAccessError: its password is needed, and was not given, or another one.
        """
        self._context.check_open()
        check_ledger_id(ledger_id)
        check_bookie_id(replace)
        if by is not None:
            check_bookie_id(by)
        repair = Repair(
            self._context,
            ledger_id,
            replace,
            by=by,
            recover_after_s=recover_after_s,
            password=password,
            on_progress=on_progress,
        )
        return await repair.run()

    async def ledger_replicas(self, ledger_id: int) -> list[Replica]:
        """Ask the bookies of a ledger what they hold of it: entries missing, and data that they lost.

        Never fences. A bookie that cannot be reached is in the list, with the reason. Gives one `Replica`
        for each bookie of each fragment, oldest first; of an unbounded ledger also of those in pages.

        Raises:
            NoSuchLedgerError: there is none.
        """
        self._context.check_open()
        return await list_replicas(self._context, check_ledger_id(ledger_id))

    async def list_ledgers(self, *, first: int = 0) -> AsyncGenerator[int, None]:
        """Yield the ids of all ledgers from `first` on, ascending."""
        self._context.check_open()
        async for ledger_id in self._context.ledgers.ledger_ids(first=first):
            yield ledger_id

    async def ledger_metadata(self, ledger_id: int | str) -> LedgerMetadata:
        """Read a ledger's metadata, by its id or name.

        Of an unbounded ledger they list the last fragments; those before are in pages.

        Raises:
            NoSuchLedgerError: there is none.
        """
        self._context.check_open()
        check_name_or_id(ledger_id)
        metadata, _ = await self._context.ledgers.read(await self._ledger_id_of(ledger_id))
        return metadata

    async def close(self) -> None:
        """Close the client. Open writers are aborted: their outstanding adds end as *unknown*.

        Cancelling leaves it to end by itself; calling it again waits for that.
        """
        self._context.close()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(handle.abort() for handle in list(self._context.handles)))
        await self._context.pool.close()
        await self._context.pool.directory.close()
        if self._owns_store:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
