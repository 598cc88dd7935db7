"""The client's methods that concern unbounded ledgers: arguments, checks, documentation.

Owns the ledgers' names and the creation of a ledger. The other modules of this package do the other work.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from client_aio.core.read_plan import check_range
from client_aio.handles import AwaitableContext
from client_aio.ledger.create import LedgerSettings, new_metadata
from client_aio.unbounded.writer import FRAGMENT_BYTES, UnboundedLedgerWriter, take_ledger_over
from metadata.access.fragments import LedgerNames
from metadata.errors import (
    InvalidArgumentError,
    LedgerExistsError,
    NoSuchLedgerError,
    VersionConflictError,
)
from metadata.ids import check_ledger_id, check_name
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC, UnboundedRecord

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from client_aio.context import ClientContext
    from client_aio.ledger.entry_reader import EntryStream
    from client_aio.ledger.reader import LedgerReader


class UnboundedLedgerOperations:
    """The unbounded-ledger operations of a client; a part of `Client`."""

    _context: ClientContext

    def open_unbounded_ledger(
        self,
        name_or_id: str | int,
        *,
        create: bool = True,
        fragment_bytes: int = FRAGMENT_BYTES,
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

        Args:
            name_or_id: the ledger's name, 1 to 100 letters, digits, '_', '.', ':' or '-', beginning with a
                letter or '_'; or the id of an existing ledger.
            create: create the ledger if there is none of that name.
            fragment_bytes: the writer begins a new fragment after about so many payload bytes. It chooses
                new bookies for each, so that the ledger spreads over the cluster. `trim` drops fragments.
            digest: by default "hmac-sha256" with a password, else "crc32c".
            password: of the ledger, if it has one.

        Raises:
            InvalidArgumentError: at the call: an argument is wrong. An unbounded ledger has no guaranteed
                write quorum: its writer may change before an entry has reached all of its write set.
            NoSuchLedgerError: on opening, with `create=False` or an id: there is no such ledger.
            LedgerClosedError: on opening: the ledger has been sealed.
            UnauthorizedAccessError: on opening: the password is not the ledger's. Nothing was done.
            LedgerRecoveryError: on opening: too few bookies answered to find the ledger's end. The ledger has
                no writer now, and may be opened again later.
            LedgerFencedError: on opening: another client took the ledger over meanwhile.
            NotEnoughBookiesError: on opening: fewer than E bookies can be reached.

        Cancelling leaves the ledger to the next takeover.
        """
        self._context.check_open()
        check_name_or_id(name_or_id)
        if not isinstance(fragment_bytes, int) or fragment_bytes < 1:
            raise InvalidArgumentError(f"fragment_bytes {fragment_bytes!r} is not a positive integer")
        if guaranteed_write_quorum:
            raise InvalidArgumentError(
                "guaranteed_write_quorum does not go with an unbounded ledger: a new writer goes on behind "
                "entries that have reached their ack quorum only; choose ack_quorum = write_quorum instead"
            )
        settings = settings_of(
            ensemble_size, write_quorum, ack_quorum, digest=digest, password=password, custom=custom_metadata
        )

        async def open_() -> UnboundedLedgerWriter:
            while True:
                self._context.check_open()
                ledger_id = await self._find_or_make(name_or_id, settings if create else None)
                try:
                    return await take_ledger_over(self._context, ledger_id, password, fragment_bytes)
                except NoSuchLedgerError:
                    if not create or ledger_id == name_or_id:
                        raise
                # The ledger has been deleted meanwhile: create it again.

        return AwaitableContext(open_)

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
            NotEnoughBookiesError: fewer than E bookies can be reached.
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
                last entry that was acknowledged when the read began, or up to 20 ms before.

        Raises:
            InvalidArgumentError: at the call: an argument is wrong.
            NoSuchLedgerError: while iterating: there is no such ledger.
            NoSuchEntryError: while iterating: `start`, or the next entry to read, has been trimmed.
            UnauthorizedAccessError: while iterating: the password is not the ledger's.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie
                returned an entry intact. Or, without `follow`, too few answered to find the ledger's end.
            MetadataCorruptError: while iterating: a part of the ledger's metadata is damaged or missing.
        """
        self._context.check_open()
        check_name_or_id(name_or_id)
        if start is not None:
            check_range(start, start)
        return self._read_unbounded(name_or_id, start, follow, password)

    async def list_unbounded_ledgers(self) -> AsyncGenerator[tuple[str, int], None]:
        """Yield names and ids of the unbounded ledgers that have a name, in the order of the names."""
        self._context.check_open()
        async for name, ledger_id in LedgerNames(self._context.ledgers).all():
            yield name, ledger_id

    async def _read_unbounded(
        self, name_or_id: str | int, start: int | None, follow: bool, password: bytes
    ) -> EntryStream:
        async with self.open_ledger(name_or_id, password=password) as reader:
            require_unbounded(reader)
            # Without `follow` too few answers are an error: they do not prove where the ledger ends.
            last = reader.last_add_confirmed if follow else await reader.read_last_add_confirmed()
            first = reader.metadata.first_entry if start is None else start
            entries = reader.tail(first) if follow else reader.read(first, max(last, first - 1))
            async with contextlib.aclosing(entries):
                async for entry in entries:
                    yield entry

    def open_ledger(
        self, ledger_id: int | str, *, recover: bool = False, password: bytes = b""
    ) -> AwaitableContext[LedgerReader]:
        """Open a ledger for reading; `Client` implements it."""
        raise NotImplementedError

    async def _ledger_id_of(self, name_or_id: str | int) -> int:
        """Return the id of a ledger; raise NoSuchLedgerError for a name that no ledger has."""
        if isinstance(name_or_id, int):
            return check_ledger_id(name_or_id)
        return await LedgerNames(self._context.ledgers).find(name_or_id)

    async def _find_or_make(self, name_or_id: str | int, settings: LedgerSettings | None) -> int:
        while True:
            try:
                return await self._ledger_id_of(name_or_id)
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
        metadata, _ = await new_metadata(context, settings, unbounded=UnboundedRecord(name))
        version = await context.ledgers.create_ledger(metadata, token=context.draw_token())
        try:
            await LedgerNames(context.ledgers).give(name, metadata.ledger_id, token=context.draw_token())
        except LedgerExistsError:
            # Only at this version: a client may have taken the ledger over by its id, and written to it.
            with contextlib.suppress(VersionConflictError, NoSuchLedgerError):
                await context.ledgers.delete(metadata.ledger_id, version)
            raise
        return metadata.ledger_id


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


def check_name_or_id(name_or_id: str | int) -> str | int:
    """Return a ledger's name or id, or raise InvalidArgumentError."""
    return check_name(name_or_id) if isinstance(name_or_id, str) else check_ledger_id(name_or_id)


def require_unbounded(reader: LedgerReader) -> None:
    """Raise InvalidArgumentError for a bounded ledger."""
    if not reader.metadata.is_unbounded:
        raise InvalidArgumentError(
            f"ledger {reader.ledger_id} is a bounded one: open_ledger reads it", ledger_id=reader.ledger_id
        )
