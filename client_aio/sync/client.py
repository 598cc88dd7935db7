"""The blocking client, and the blocking reader of a ledger.

Each method runs the coroutine of the same name on the process's loop, and waits for it; see
`client_aio.client` and `client_aio.ledger.reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import client_aio
from client_aio.sync.loop_thread import Handle, LoopThread, get_loop_thread
from client_aio.sync.writer import LedgerWriter, LogClient, UnboundedClient
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from client_aio.ledger.entry_reader import Entry, EntryBatch
    from metadata.model.ledger import LedgerMetadata


class LedgerReader(Handle):
    """Reads a ledger; see `client_aio.LedgerReader`."""

    def __init__(self, background: LoopThread, reader: client_aio.LedgerReader) -> None:
        super().__init__(background, reader)
        self._reader = reader

    @property
    def ledger_id(self) -> int:
        """Return the ledger's id."""
        return self._reader.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the metadata as last read."""
        return self._reader.metadata

    @property
    def last_add_confirmed(self) -> int:
        """Return the highest LAC that this handle has seen, −1 for none."""
        return self._reader.last_add_confirmed

    @property
    def is_closed(self) -> bool:
        """Return whether the ledger is known to be closed."""
        return self._reader.is_closed

    def read_last_add_confirmed(self) -> int:
        """Ask the bookies for the LAC, and return the highest LAC seen."""
        return self._run(self._reader.read_last_add_confirmed())

    def read(self, first: int, last: int) -> Generator[Entry, None, None]:
        """Read the entries first to last, inclusive, in order."""
        for batch in self.read_batches(first, last):
            yield from batch

    def read_batches(
        self, first: int, last: int, *, known_lac: int = NO_ENTRY
    ) -> Generator[EntryBatch, None, None]:
        """Read as `read` does, in batches."""
        return self._iterate(lambda: self._reader.read_batches(first, last, known_lac=known_lac))

    def read_unconfirmed(self, first: int, last: int) -> Generator[Entry, None, None]:
        """Read entries whether acknowledged or not; see `client_aio.LedgerReader.read_unconfirmed`."""
        return self._iterate(lambda: self._reader.read_unconfirmed(first, last))

    def tail(self, from_entry: int = 0) -> Generator[Entry, None, None]:
        """Read from an entry on, and follow the entries added later, until the ledger is closed."""
        return self._iterate(lambda: self._reader.tail(from_entry))

    def close(self) -> None:
        """Free the handle. The ledger stays as it is."""
        self._run(self._reader.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_left_in_fork(kind):
            self.close()


def connect(metadata: str, **settings: Any) -> Client:
    """Connect to a cluster; blocks. Arguments as for `client_aio.connect`."""
    background = get_loop_thread()

    async def open_() -> client_aio.Client:
        return await client_aio.connect(metadata, **settings)

    client = background.run(open_())
    background.open_clients.add(client)
    return Client(background, client)


class Client(LogClient, UnboundedClient):
    """A connection to a cluster; see `client_aio.Client`."""

    def create_ledger(self, **options: Any) -> LedgerWriter:
        """Create a ledger and open it for writing. Options as for `client_aio.Client.create_ledger`."""

        async def create() -> client_aio.LedgerWriter:
            return await self._client.create_ledger(**options)

        return LedgerWriter(self._background, self._run(create()))

    def open_ledger(
        self,
        ledger_id: int | str,
        *,
        recover: bool = False,
        at_ack_quorum: bool = False,
        accept_loss: bool = False,
        password: bytes = b"",
    ) -> LedgerReader:
        """Open a ledger for reading, an unbounded one also by name; **takes over** with `recover=True`."""

        async def open_() -> client_aio.LedgerReader:
            return await self._client.open_ledger(
                ledger_id,
                recover=recover,
                at_ack_quorum=at_ack_quorum,
                accept_loss=accept_loss,
                password=password,
            )

        return LedgerReader(self._background, self._run(open_()))

    def delete_ledger(self, ledger_id: int | str, *, force: bool = False, password: bytes = b"") -> None:
        """Delete a ledger; with `force` even one that a log lists."""
        self._run(self._client.delete_ledger(ledger_id, force=force, password=password))

    def list_ledgers(self, *, first: int = 0) -> list[int]:
        """Return the ids of all ledgers from `first` on, ascending."""

        async def collect() -> list[int]:
            return [ledger_id async for ledger_id in self._client.list_ledgers(first=first)]

        return self._run(collect())

    def ledger_metadata(self, ledger_id: int | str) -> LedgerMetadata:
        """Read a ledger's metadata."""
        return self._run(self._client.ledger_metadata(ledger_id))

    def close(self) -> None:
        """Close the client; open writers are aborted."""
        self._run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_left_in_fork(kind):
            self.close()
