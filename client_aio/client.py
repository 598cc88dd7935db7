"""The client: it creates, opens, lists and deletes ledgers.

Operations of logs are in `client_aio.log`, operations of unbounded ledgers in `client_aio.unbounded`. Owns
the session with the metadata store and the pool of connections, which all its handles use.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from client_aio.admin.delete import delete_ledger
from client_aio.admin.repair import Repair, RepairProgress, RepairReport
from client_aio.admin.replicas import Replica, list_replicas
from client_aio.bookies.ensemble_finder import EnsembleFinder
from client_aio.bookies.pool import BookieDirectory, BookiePool
from client_aio.config import ClientConfig, WriteOptions, check_flags, check_seconds
from client_aio.context import ClientContext, ClientCounters, on_own_loop
from client_aio.core.placement import PlacementPolicy, WeightedRandom
from client_aio.handles import AwaitableContext
from client_aio.ledger.create import LedgerSettings, create_ledger
from client_aio.ledger.writer import LedgerWriter
from client_aio.log.operations import LogOperations
from client_aio.log.ownership import delete_unlisted
from client_aio.unbounded.operations import (
    UnboundedLedgerOperations,
    check_name_or_id,
    ledger_id_of,
    open_reader,
)
from metadata.access.bookies import BookieRecord, find_cluster
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store, parse_uri
from metadata.errors import BookKeeperError, InvalidArgumentError
from metadata.ids import check_bookie_id, check_ledger_id
from metadata.store import MeasuredStore, MetadataStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType

    from client_aio.ledger.reader import LedgerReader
    from metadata.model.ledger import LedgerMetadata

_CONFIG = ClientConfig()
_clock = time.perf_counter
"""For metrics only. The event loop's time may stand still in an iteration, and is exact to 1 ms."""
_ABANDON_S = 2.0
"""The timeout of closing the store from another event loop than its own."""
_tokens: random.Random = random.SystemRandom()
"""Not an argument: two clients with the same tokens would take each other's writes for their own."""


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
        metadata: `zk://host:port,…/root`, `sqlite:///absolute/path`, or an open store, which its owner must
            close.
        config: the settings. Single settings may also be given by name: `connect(uri, read_timeout_s=1)`.
        placement: chooses the bookies of ensembles: a `WeightedRandom` by default, a `RackAware`, or your own
            `PlacementPolicy`.
        rng: the random source of the placement.

    Returns:
        An opening of a `Client`: await it, or use it with `async with`.

    Raises:
        InvalidArgumentError: the URI is wrong, or a setting is unknown or wrong.
        NoSuchClusterError: on opening: the store does not exist, or holds no cluster. Nothing was made.
        MetadataUnavailableError: on opening: the store does not answer.
    """
    try:
        config = replace(config, **settings)
    except TypeError as error:
        known = ", ".join(ClientConfig.__slots__)
        raise InvalidArgumentError(f"{error}; the settings are: {known}") from error
    if not isinstance(metadata, MetadataStore):
        parse_uri(metadata)  # a wrong URI is refused here, not only on opening
    if placement is not None and not callable(getattr(placement, "choose", None)):
        raise InvalidArgumentError(f"placement {placement!r} has no method `choose`")
    if rng is not None and not isinstance(rng, random.Random):
        raise InvalidArgumentError(f"rng {rng!r} is no random.Random")
    source, tokens = rng or random.Random(), _tokens
    return AwaitableContext(
        lambda: Client._open(metadata, config, placement or WeightedRandom(), source, tokens)
    )


@on_own_loop("close")
class Client(LogOperations, UnboundedLedgerOperations):
    """A connection to a cluster; made by `connect`. An async context manager."""

    def __init__(self, store: MetadataStore, context: ClientContext, *, owns_store: bool) -> None:
        super().__init__(context)
        self._store = store
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
        measured = MeasuredStore(store, _clock)
        directory = BookieDirectory(measured, config)
        try:
            cluster = await find_cluster(measured)
            await directory.start()
        except BaseException:
            await directory.close()
            if owns_store:
                await store.close()
            raise
        pool = BookiePool(directory, config, cluster.instance_id)
        context = ClientContext(
            config=config,
            ledgers=LedgerStore(measured, ids_drawn=config.ledger_id_block),
            pool=pool,
            finder=EnsembleFinder(pool, placement, rng),
            tokens=tokens,
            now_ms=_now_ms,
            counters=ClientCounters(_clock),
        )
        return cls(store, context, owns_store=owns_store)

    def __repr__(self) -> str:
        state = "open" if self._closing is None else "closed"
        return f"<Client: {state}, {len(self.bookies)} bookies>"

    @property
    def is_closed(self) -> bool:
        """Return whether the client takes no more calls."""
        return self._context.is_closed

    @property
    def bookies(self) -> Mapping[str, BookieRecord]:
        """Return the running bookies, as last read from the metadata store."""
        return self._context.pool.directory.available

    @property
    def quarantined_bookies(self) -> list[str]:
        """Return the bookies that failed within `quarantine_s`, the one that failed longest ago first.

        They are put into ensembles only if there are too few others. Readers ask them last.
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
            ack_quorum: how many must hold an entry durably before it is acknowledged (Qa).
            digest: "crc32c" protects entries against damage. "hmac-sha256", which needs a password, protects
                them against forgery as well.
            password: required from then on to open and delete the ledger, and to fence it and add to it at
                the bookies. It is not stored anywhere, and cannot be recovered.
            custom_metadata: kept with the ledger, at most 64 KiB. The key "bookie-aio.log" names the log for
                which this ledger is made. `add_to_log` then refuses the ledger, and `sweep_log_orphans`
                deletes it if that log does not list it.
            advanced: this writer assigns the entry ids: `add_entry(data, entry_id)`.
            deferred_sync: an add's future is done when Qa bookies have received the entry, which is not
                durable yet. `force()` makes the entries added before it durable. Only then are they
                acknowledged and readable.
            guaranteed_write_quorum: keep every entry in memory until all Qw bookies have it, and close only
                then: every entry of the closed ledger has Qw copies (rule 11). Not with deferred sync.

        Raises:
            InvalidArgumentError: at once: not E ≥ Qw ≥ Qa ≥ 1, or another argument is not legal.
            NotEnoughBookiesError: on opening: some write set would have fewer than Qa bookies that can be
                reached, or fewer than E bookies are registered. With guaranteed write quorum, fewer than E
                can be reached.
        """
        self._context.check_open()
        check_flags(
            advanced=advanced, deferred_sync=deferred_sync, guaranteed_write_quorum=guaranteed_write_quorum
        )
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
        self,
        ledger_id: int | str,
        *,
        recover: bool = False,
        at_ack_quorum: bool = False,
        accept_loss: bool = False,
        password: bytes = b"",
    ) -> AwaitableContext[LedgerReader]:
        """Open a ledger for reading, by its id; an unbounded ledger also by its name.

        Without `recover` this never fences: a writer continues undisturbed, and the handle reads up to the
        LAC and can tail. **With `recover=True` it takes over**: an open ledger is fenced, so that its writer
        acknowledges nothing more. The ledger is then closed behind its last recoverable entry.

        Args:
            at_ack_quorum: with `recover`, close a ledger with guaranteed write quorum although some entries
                may have fewer than Qw copies. Its metadata then record from which entry on.
            accept_loss: with `recover`: close the ledger even where bookies that are lost for good keep its
                end from being decided. **Gives up acknowledged entries** that no other bookie has. It is then
                closed behind the last entry that can be read. `LedgerMetadata.given_up` says what was given
                up. A writer that still reaches the lost bookies may acknowledge entries that are lost. A
                ledger with guaranteed write quorum is closed with Qa copies of its entries where that loses
                none; add `at_ack_quorum`, and the missing copies are not waited for. An unbounded ledger is
                sealed so, where no takeover can find its end.

        Raises:
            NoSuchLedgerError: on opening: there is no such ledger.
            InvalidArgumentError: at once: `at_ack_quorum` without `recover`. On opening, with `recover`: the
                ledger is unbounded. It is not recovered, but taken over by `open_unbounded_ledger`. With
                `accept_loss`: a takeover finds its end, so no loss has to be accepted.
            UnauthorizedAccessError: on opening: the password is not the ledger's. No bookie was asked, so
                nothing has been fenced.
            LedgerRecoveryError: on opening, with `recover`: too few bookies answered; try again later. Where
                too few answer to find the end, a writer that is alive has not been fenced. With
                `accept_loss`: no bookie of the last fragment answers. If they are gone for good, order each
                to leave (`bookie decommission`): the ledger is then closed in the fragment before.
        """
        self._context.check_open()
        check_flags(recover=recover, accept_loss=accept_loss)
        if accept_loss and not recover:
            raise InvalidArgumentError("accept_loss goes with recover=True: only a recovery closes a ledger")
        check_name_or_id(ledger_id)
        if at_ack_quorum and not recover:
            raise InvalidArgumentError("at_ack_quorum says how to recover a ledger: add recover=True")
        return AwaitableContext(
            lambda: open_reader(
                self._context,
                ledger_id,
                recover=recover,
                at_ack_quorum=at_ack_quorum,
                accept_loss=accept_loss,
                password=password,
            )
        )

    async def delete_ledger(
        self, ledger_id: int | str, *, force: bool = False, password: bytes = b""
    ) -> None:
        """Delete a ledger for good. A writer that is alive is fenced, and its late adds are refused.

        On return the metadata are gone. No writer can acknowledge an add, unless too few bookies could be
        reached. The client tells slow bookies in the background, until it is closed. The others find out by
        themselves. Bookies free the space later. Cancelling leaves the ledger unchanged or deleted. If it was
        unbounded, pages may be left, which `sweep_log_orphans` deletes.

        Args:
            force: delete it even where a log lists it. Readers of that log get past it with
                `read_log(on_gap="skip")` only.

        Raises:
            NoSuchLedgerError: there is no such ledger.
            LedgerListedError: a log lists the ledger, and `force` is not given. Nothing was done.
            UnauthorizedAccessError: the password is not the ledger's. Nothing was done.
            MetadataUnavailableError: the metadata may be gone, now or later. No bookie was told.
            MetadataCorruptError: the ledger's metadata do not parse, so that the password cannot be checked.
                Nothing was done.
        """
        self._context.check_open()
        check_name_or_id(ledger_id)
        check_flags(force=force)
        which = await ledger_id_of(self._context, ledger_id)
        if force:
            await delete_ledger(self._context, which, password)
        else:
            await delete_unlisted(self._context, self._lists, which, password)

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
        """Copy the entries that a bookie owes of a ledger to another bookie, and put that into the metadata.

        Does not fence, and does not disturb a writer, a recovery or another repair. If the ledger is not
        CLOSED its last fragment is left unchanged, unless `recover_after_s` is given. May be run again at any
        time. Cancelling leaves the ledger unchanged, or partly repaired.

        Entries that no bookie returns are passed over, reported (`RepairedFragment.lost`), and recorded in
        the ledger's metadata with `replace`. That bookie keeps its copies as long as they are recorded. When
        it is back, a repair of the new bookie in its own place copies them and removes the record.

        Args:
            replace: the bookie that is lost, damaged, or to be relieved; it need not answer.
            by: the bookie to copy to; by default one that the placement chooses. If it is `replace` itself,
                that bookie is repaired in place: it lost some of its data, and kept its fences.
            recover_after_s: **take the ledger over** after so many seconds, if it is not CLOSED and its last
                fragment is still the same: fence its writer and close it, then repair that fragment.
            password: that of the ledger, if it has one. Copying needs no password, unless the target holds
                entries of former terms of an unbounded ledger under the same ids.
            on_progress: called at each step.

        Raises:
            NoSuchLedgerError: there is no such ledger.
            InvalidArgumentError: `by` holds a part of one of the fragments already; or `recover_after_s` is
                given for an unbounded ledger, which is taken over instead.
            NotEnoughBookiesError: there is no bookie to copy to.
            LedgerRepairError: no bookie could return any entry, and some did not answer; or a copy was not
                kept.
            LedgerRecoveryError: the ledger was to be recovered, and the recovery was inconclusive.
            UnauthorizedAccessError: the ledger's password is needed, and is missing or wrong.
        """
        self._context.check_open()
        check_ledger_id(ledger_id)
        check_bookie_id(replace)
        if by is not None:
            check_bookie_id(by)
        if recover_after_s is not None:
            check_seconds("recover_after_s", recover_after_s)
        if not callable(on_progress):
            raise InvalidArgumentError(f"on_progress {on_progress!r} cannot be called")
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
        """Ask the bookies of a ledger for the entries that they lack, and for data that they lost.

        Never fences.

        Returns:
            One `Replica` for each bookie of each fragment, oldest first, including the fragments in pages of
            an unbounded ledger. A bookie that cannot be reached is listed with the reason.

        Raises:
            NoSuchLedgerError: there is no such ledger.
        """
        self._context.check_open()
        return await list_replicas(self._context, check_ledger_id(ledger_id))

    def list_ledgers(self, *, first: int = 0) -> AsyncGenerator[int, None]:
        """Yield the ids of all ledgers from `first` on, ascending."""
        return self._list_ledgers(check_ledger_id(first))

    async def _list_ledgers(self, first: int) -> AsyncGenerator[int, None]:
        self._context.check_open()
        async for ledger_id in self._context.ledgers.ledger_ids(first=first):
            yield ledger_id

    async def ledger_metadata(self, ledger_id: int | str) -> LedgerMetadata:
        """Read a ledger's metadata, by its id or name.

        The metadata of an unbounded ledger list its last fragments; earlier fragments are in pages.

        Raises:
            NoSuchLedgerError: there is no such ledger.
        """
        self._context.check_open()
        check_name_or_id(ledger_id)
        metadata, _ = await self._context.ledgers.read(await ledger_id_of(self._context, ledger_id))
        return metadata

    async def close(self) -> None:
        """Close the client. Open writers are aborted: their outstanding adds fail as *unknown*.

        Adds that some bookie has not answered yet are still sent, also those of closed ledgers. The ack
        quorum may have acknowledged them, and the slowest bookie is to have its copy, too. A bookie that
        answers none of them for half a second is not waited for any longer. One that answers some is waited
        for until they are due (`add_timeout_s`).

        Cancelling leaves the close running. A further call waits for it.

        On another event loop than the client's own this does as much as it can. If the client's loop runs in
        another thread, the client is closed there. Else its sockets are closed as they are.
        """
        loop = self._context.loop
        if loop is not asyncio.get_running_loop():
            await self._close_from_outside(loop)
            return
        self._context.close()
        while True:
            if self._closing is None or self._closing.cancelled():
                self._closing = asyncio.create_task(self._close())
            await asyncio.wait([closing := self._closing])
            if closing.cancelled():
                continue  # Who ends all tasks of a loop cancels this one, too.
            closing.result()
            return

    async def _close_from_outside(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close(), loop))
            return
        self._context.close()
        self._context.pool.abandon()
        # The store's threads, files and sockets end with the process where its loop is gone.
        with contextlib.suppress(RuntimeError, BookKeeperError, TimeoutError):
            async with asyncio.timeout(_ABANDON_S):
                if self._owns_store:
                    await self._store.close()

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(handle.abort() for handle in list(self._context.handles)))
            await self._context.pool.close()
        finally:  # Who ends all tasks of a loop leaves no socket and no thread behind.
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
