"""The client's methods that concern unbounded ledgers: arguments, checks, documentation.

Owns the ledgers' names and the creation of a ledger. The other modules of this package do the other work.

`UnboundedLedgerReader` follows a ledger over terms and fragments, and never fences. It is a `LedgerReader`
whose fragments may be in pages. Rule 13: it uses a LAC statement only when the last fragment
known here has at least the statement's content term. Else it reads the metadata again. It also reads them
again when a bookie knows a later content term of an entry, or when no bookie has the entry.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from client_aio.config import check_flags
from client_aio.context import ContextOwner, on_own_loop
from client_aio.core.read_plan import check_range, trimmed
from client_aio.core.recovery import recovery_term
from client_aio.handles import AwaitableContext
from client_aio.healing import APPEND_TIMEOUT_S, check_timeout
from client_aio.ledger.accept_loss import recover_with_loss
from client_aio.ledger.create import LedgerSettings, create_metadata
from client_aio.ledger.reader import LedgerReader
from client_aio.ledger.recovery import is_buried, recover_ledger
from client_aio.unbounded.paged_fragments import PagedEntries, VersionedFragments
from client_aio.unbounded.seal import lost_behind, seal_with_loss
from client_aio.unbounded.writer import FRAGMENT_BYTES, UnboundedLedgerWriter, sealed, take_ledger_over
from metadata.access.fragments import LedgerNames
from metadata.errors import (
    BookieUnavailableError,
    InvalidArgumentError,
    LedgerExistsError,
    LedgerRecoveryError,
    MetadataUnavailableError,
    NoSuchLedgerError,
    VersionConflictError,
)
from metadata.ids import NO_ENTRY, check_ledger_id, check_name
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC, UnboundedRecord

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from client_aio.context import ClientContext
    from client_aio.ledger.entry_reader import BatchStream, EntrySource, EntryStream
    from metadata.model.ledger import LedgerMetadata


class UnboundedLedgerReader(LedgerReader):
    """Reads an unbounded ledger; made by `Client.open_ledger`. An async context manager.

    `tail` follows the ledger over terms and fragments, and ends when it is sealed: with RecordsLostError if
    that was done with a loss.
    """

    def _make_entries(self) -> EntrySource:
        return PagedEntries(
            self._context,
            lambda: self._metadata,
            self._digest,
            on_statement=self._note,
            refresh=self.refresh,
        )

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed, by the metadata as last read."""
        return self._metadata.first_entry

    async def refresh(self, *, sync: bool = True) -> None:
        """Read the metadata again, as they are in the store now.

        Raises:
            NoSuchLedgerError: the ledger has been deleted.
            MetadataUnavailableError: the metadata store did not answer in time.
        """
        await super().refresh(sync=sync)

    def read_batches(self, first: int, last: int, *, known_lac: int = NO_ENTRY) -> BatchStream:
        """Read as `read` does, in batches; see `LedgerReader.read_batches`.

        Raises:
            MetadataUnavailableError, NoSuchLedgerError: while iterating, where `last` is above this handle's
                own LAC: the metadata, which hold each entry's content term, could not be read again.
        """
        batches = super().read_batches(first, last, known_lac=known_lac)
        return batches if last <= self._lac else self._after_refresh(batches)

    async def _after_refresh(self, batches: BatchStream) -> BatchStream:
        """Read the metadata again before the entries: a LAC that another handle verified may be newer."""
        async with aclosing(batches):
            await self.refresh()
            async for batch in batches:
                yield batch

    def tail_batches(self, from_entry: int = 0) -> BatchStream:
        """Read as `tail` does, in batches.

        Raises:
            NoSuchEntryError: `from_entry` has been trimmed. While iterating: a trim has overtaken the reader.
            RecordsLostError: behind the last entry: the ledger was sealed with a loss.
        """
        check_range(from_entry, from_entry)
        if from_entry < self.first_entry:
            raise trimmed(self._metadata, from_entry)
        return self._up_to_loss(super().tail_batches(from_entry))

    async def _up_to_loss(self, batches: BatchStream) -> BatchStream:
        async with aclosing(batches):
            async for batch in batches:
                yield batch
        self._check_loss()

    def _check_loss(self) -> None:
        """Raise RecordsLostError where the ledger is known to be sealed with a loss."""
        if self._metadata.given_up is not None:
            raise lost_behind(self._metadata)


logger = logging.getLogger(__name__)


@on_own_loop()
class UnboundedLedgerOperations(ContextOwner):
    """The unbounded-ledger operations of a client; a part of `Client`."""

    def open_unbounded_ledger(
        self,
        name_or_id: str | int,
        *,
        create: bool = True,
        fragment_bytes: int = FRAGMENT_BYTES,
        append_timeout_s: float | None = APPEND_TIMEOUT_S,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest: str | None = None,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
        guaranteed_write_quorum: bool = False,
    ) -> AwaitableContext[UnboundedLedgerWriter]:
        """**Take an unbounded ledger over**, and open it for writing; create it where there is none.

        The takeover fences the present writer: its outstanding adds fail with LedgerFencedError, and may or
        may not be part of the ledger. Acknowledged entries are kept, and the ledger goes on behind them. The
        arguments from `ensemble_size` on are those of `create_ledger`, for a ledger that is created here.
        Where its bookies have all buried its id before it had a writer, its name gets another ledger like it.

        Args:
            name_or_id: the ledger's name, 1 to 100 letters, digits, '_', '.', ':' or '-', beginning with a
                letter or '_'; or the id of an existing ledger.
            create: create the ledger if there is none of that name.
            fragment_bytes: the writer begins a new fragment after about so many payload bytes. It chooses
                new bookies for each, so that the ledger spreads over the cluster. `trim` drops fragments.
            append_timeout_s: how long an add may wait for its bookies. Then all outstanding adds fail with
                OperationTimeoutError (*unknown*), and the writer goes on trying. None: for ever.
            digest: by default "hmac-sha256" with a password, else "crc32c".
            password: of the ledger, if it has one.

        Raises:
            InvalidArgumentError: at the call: an argument is wrong. An unbounded ledger has no guaranteed
                write quorum: its writer may change before an entry has reached all of its write set.
            NoSuchLedgerError: on opening, with `create=False` or an id: there is no such ledger.
            LedgerClosedError: on opening: the ledger has been sealed.
            UnauthorizedAccessError: on opening: the password is not the ledger's. Nothing was done.
            LedgerRecoveryError: on opening: too few bookies answer to find the ledger's end. The present
                writer has not been fenced, unless bookies were lost while this went on. The ledger may be
                opened again later. If they are gone for good, `open_ledger` seals it, with `accept_loss`.
            LedgerFencedError: on opening: another client took the ledger over meanwhile.
            NotEnoughBookiesError: on opening: some write set of the next fragment would have fewer than Qa
                bookies that can be reached, or fewer than E are registered. The present writer goes on.

        Cancelling leaves the ledger to the next takeover.
        """
        self._context.check_open()
        check_name_or_id(name_or_id)
        check_flags(create=create, guaranteed_write_quorum=guaranteed_write_quorum)
        check_timeout(append_timeout_s)
        check_fragment_bytes(fragment_bytes)
        if guaranteed_write_quorum:
            raise InvalidArgumentError(
                "guaranteed_write_quorum does not go with an unbounded ledger: a new writer goes on behind "
                "entries that have reached their ack quorum only; choose ack_quorum = write_quorum instead"
            )
        settings = settings_of(
            ensemble_size, write_quorum, ack_quorum, digest=digest, password=password, custom=custom_metadata
        )
        take_over = partial(
            take_ledger_over,
            self._context,
            password=password,
            fragment_bytes=fragment_bytes,
            append_timeout_s=append_timeout_s,
        )
        to_make = settings if create else None
        return AwaitableContext(partial(self._take_over, name_or_id, to_make, take_over, password))

    async def create_unbounded_ledger(
        self,
        name: str,
        *,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest: str | None = None,
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
    ) -> int:
        """Create an unbounded ledger without a writer, and return its id.

        The arguments are those of `open_unbounded_ledger`, which creates a ledger too. Cancelling leaves the
        ledger created, not created, or created without its name.

        Raises:
            LedgerExistsError: there is a ledger of that name.
            InvalidArgumentError: an argument is wrong.
            NotEnoughBookiesError: as `create_ledger`.
        """
        self._context.check_open()
        check_name(name)
        settings = settings_of(
            ensemble_size, write_quorum, ack_quorum, digest=digest, password=password, custom=custom_metadata
        )
        ledger_id = await self._make(name, settings)
        if password:
            # The first term sets the ledger's token at its bookies, before another client can set another.
            await (await take_ledger_over(self._context, ledger_id, password, FRAGMENT_BYTES)).close()
        return ledger_id

    def read_unbounded_ledger(
        self, name_or_id: str | int, start: int | None = 0, *, follow: bool = True, password: bytes = b""
    ) -> EntryStream:
        """Read an unbounded ledger from an entry on. **Never fences**: its writer goes on undisturbed.

        Follows the ledger over takeovers and fragments. `aclose()` the iterator unless it is read to its end.

        Args:
            start: the first entry; None for the first entry that has not been trimmed.
            follow: go on with entries acknowledged later, until the ledger is sealed. Else end behind the
                last entry that was acknowledged when the read began, or a short time before (rule 13).

        Raises:
            InvalidArgumentError: at the call: an argument is wrong.
            NoSuchLedgerError: while iterating: there is no such ledger.
            NoSuchEntryError: while iterating: `start`, or the next entry to read, has been trimmed.
            UnauthorizedAccessError: while iterating: the password is not the ledger's.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie
                returned an entry intact. Or, without `follow`, too few answered to find the ledger's end.
            RecordsLostError: behind the last entry: the ledger was sealed with a loss.
            MetadataCorruptError: while iterating: a part of the ledger's metadata is damaged or missing.
        """
        self._context.check_open()
        check_name_or_id(name_or_id)
        if start is not None:
            check_range(start, start)
        check_flags(follow=follow)
        return self._read_unbounded(name_or_id, start, follow, password)

    async def trim_unbounded_ledger(
        self, name_or_id: str | int, before_entry: int, *, password: bytes = b""
    ) -> int:
        """Drop the fragments that lie as a whole before an entry. **Never fences.**

        One compare-and-set, beside a writer or without one. It needs no bookie: so it frees space where all
        disks are full. The last fragment is never dropped. Bookies free the space later. Cancelling leaves
        the ledger trimmed, or as it was.

        Returns:
            The first entry that is left.

        Raises:
            InvalidArgumentError: the ledger is bounded, or the entry's id is not legal.
            NoSuchLedgerError: there is no such ledger.
            LedgerClosedError: the ledger has been sealed.
            UnauthorizedAccessError: the password is not the ledger's. Nothing was done.
            MetadataUnavailableError: no definite outcome in time.
        """
        context = self._context
        context.check_open()
        check_name_or_id(name_or_id)
        check_range(before_entry, before_entry)
        metadata, version = await context.ledgers.read(await ledger_id_of(context, name_or_id))
        if not metadata.is_unbounded:
            raise InvalidArgumentError(
                f"ledger {metadata.ledger_id} is a bounded one: only unbounded ledgers are trimmed",
                ledger_id=metadata.ledger_id,
            )
        await context.unlock(metadata, password)
        if metadata.is_closed:
            raise sealed(metadata)
        held = VersionedFragments(context, metadata, version)
        await held.trim(before_entry)
        return held.current.first_entry

    async def list_unbounded_ledgers(self) -> AsyncGenerator[tuple[str, int], None]:
        """Yield names and ids of the unbounded ledgers that have a name, in the order of the names."""
        self._context.check_open()
        async for name, ledger_id in LedgerNames(self._context.ledgers).all():
            yield name, ledger_id

    async def _read_unbounded(
        self, name_or_id: str | int, start: int | None, follow: bool, password: bytes
    ) -> EntryStream:
        async with await open_reader(self._context, name_or_id, recover=False, password=password) as opened:
            reader = require_unbounded(opened)
            # Without `follow` too few answers are an error: they do not prove where the ledger ends.
            last = reader.last_add_confirmed if follow else await reader.read_last_add_confirmed()
            first = reader.metadata.first_entry if start is None else start
            entries = reader.tail(first) if follow else reader.read(first, max(last, first - 1))
            async with contextlib.aclosing(entries):
                async for entry in entries:
                    yield entry
            reader._check_loss()

    async def _take_over(
        self,
        name_or_id: str | int,
        settings: LedgerSettings | None,
        take_over: Callable[[int], Awaitable[UnboundedLedgerWriter]],
        password: bytes,
    ) -> UnboundedLedgerWriter:
        while True:
            self._context.check_open()
            ledger_id = await self._find_or_make(name_or_id, settings)
            try:
                return await take_over(ledger_id)
            except NoSuchLedgerError:
                if settings is None or ledger_id == name_or_id:
                    raise
                # The ledger has been deleted meanwhile: create it again.
            except LedgerRecoveryError:
                is_named = isinstance(name_or_id, str)
                if not (is_named and await self._replace_buried(str(name_or_id), ledger_id, password)):
                    raise

    async def _replace_buried(self, name: str, ledger_id: int, password: bytes) -> bool:
        """Put another ledger in the place of one that no writer has opened and none can: its id is buried.

        An interruption in between leaves the name without a ledger. A ledger that had a writer is kept: what
        it acknowledged was dropped by its bookies, and only who deletes the ledger says that this is right.
        """
        context = self._context
        with contextlib.suppress(VersionConflictError, NoSuchLedgerError, LedgerExistsError):
            metadata, version = await context.ledgers.read(ledger_id, sync=True)
            fragment, digest = metadata.last_fragment, await context.unlock(metadata, password)
            if (fragment.first_entry, fragment.content_term) != (0, 0):
                return False
            # A takeover has just failed, under this term.
            if not await is_buried(context, metadata, digest, recovery_term(metadata)):
                return False
            logger.warning("ledger=%d is made anew as %s: its bookies have buried the id", ledger_id, name)
            # Only at this version: a takeover changes the metadata before there is a writer.
            await context.ledgers.delete(ledger_id, version)
            await self._make(name, settings_like(metadata, password))
        return True

    async def _find_or_make(self, name_or_id: str | int, settings: LedgerSettings | None) -> int:
        while True:
            try:
                return await ledger_id_of(self._context, name_or_id)
            except NoSuchLedgerError:
                if settings is None or isinstance(name_or_id, int):
                    raise
            # LedgerExistsError: another client has just created a ledger of that name: use that.
            with contextlib.suppress(LedgerExistsError):
                return await self._make(name_or_id, settings)

    async def _make(self, name: str, settings: LedgerSettings) -> int:
        """Create an unbounded ledger without a writer.

        An interruption in between leaves a ledger without a name, which `list_ledgers` shows.
        """
        context = self._context
        metadata, version, _, _ = await create_metadata(context, settings, unbounded=UnboundedRecord(name))
        try:
            await LedgerNames(context.ledgers).give(name, metadata.ledger_id, token=context.draw_token())
        except LedgerExistsError:
            # Only at this version: a client may have taken the ledger over by its id, and written to it.
            with contextlib.suppress(VersionConflictError, NoSuchLedgerError):
                await context.ledgers.delete(metadata.ledger_id, version)
            raise
        return metadata.ledger_id


async def ledger_id_of(context: ClientContext, name_or_id: str | int) -> int:
    """Return the id of a ledger.

    Raises:
        NoSuchLedgerError: no ledger has that name.
    """
    if isinstance(name_or_id, int):
        return check_ledger_id(name_or_id)
    return await LedgerNames(context.ledgers).find(name_or_id)


async def open_reader(
    context: ClientContext,
    name_or_id: str | int,
    *,
    recover: bool,
    at_ack_quorum: bool = False,
    accept_loss: bool = False,
    password: bytes,
) -> LedgerReader:
    """Open a ledger of either kind for reading; see `Client.open_ledger`."""
    context.check_open()
    metadata, version = await context.ledgers.read(await ledger_id_of(context, name_or_id))
    digest = await context.unlock(metadata, password)
    kind = UnboundedLedgerReader if metadata.is_unbounded else LedgerReader
    if recover:
        ledger_id = metadata.ledger_id
        if accept_loss and metadata.is_unbounded:
            recovered = await seal_with_loss(context, ledger_id, digest)
        elif accept_loss:
            recovered = await recover_with_loss(context, ledger_id, digest, at_ack_quorum=at_ack_quorum)
        else:
            recovered = await recover_ledger(context, ledger_id, digest, at_ack_quorum=at_ack_quorum)
        return kind(context, *recovered, digest)
    reader = kind(context, metadata, version, digest)
    try:
        await reader.read_last_add_confirmed()
    except (BookieUnavailableError, MetadataUnavailableError) as error:
        # The entries before the last fragment can be read all the same, and tailing asks again.
        logger.warning("ledger=%d its LAC is not known for now: %s", metadata.ledger_id, error)
    return reader


def settings_of(
    ensemble_size: int,
    write_quorum: int,
    ack_quorum: int,
    *,
    digest: str | None,
    password: bytes,
    custom: Mapping[str, bytes] | None,
) -> LedgerSettings:
    """Return the settings of an unbounded ledger; the default digest depends on the password."""
    return LedgerSettings(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest=digest or (DIGEST_HMAC if password else DIGEST_CRC),
        password=password,
        custom_metadata=custom,
    )


def settings_like(metadata: LedgerMetadata, password: bytes) -> LedgerSettings:
    """Return the settings of a ledger, to make another one like it."""
    return LedgerSettings(
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        digest=metadata.digest,
        password=password,
        custom_metadata=metadata.custom,
    )


def check_name_or_id(name_or_id: str | int) -> str | int:
    """Return a ledger's name or id, or raise InvalidArgumentError."""
    return check_name(name_or_id) if isinstance(name_or_id, str) else check_ledger_id(name_or_id)


def check_fragment_bytes(fragment_bytes: int) -> None:
    """Raise InvalidArgumentError unless the size is a positive integer."""
    if not isinstance(fragment_bytes, int) or isinstance(fragment_bytes, bool) or fragment_bytes < 1:
        raise InvalidArgumentError(f"fragment_bytes {fragment_bytes!r} is not a positive integer")


def require_unbounded(reader: LedgerReader) -> UnboundedLedgerReader:
    """Return the reader, or raise InvalidArgumentError for a bounded ledger."""
    if not isinstance(reader, UnboundedLedgerReader):
        raise InvalidArgumentError(
            f"ledger {reader.ledger_id} is a bounded one: open_ledger reads it", ledger_id=reader.ledger_id
        )
    return reader
