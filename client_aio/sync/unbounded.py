"""Unbounded ledgers without an event loop; see `client_aio.unbounded`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from client_aio.sync.loop_thread import Handle
from client_aio.sync.writer import LedgerWriter

if TYPE_CHECKING:
    from collections.abc import Generator

    import client_aio
    from client_aio.ledger.entry_reader import Entry
    from client_aio.sync.loop_thread import LoopThread
    from metadata.model.ledger import LedgerMetadata


class UnboundedLedgerWriter(LedgerWriter):
    """Adds entries to an unbounded ledger; see `client_aio.UnboundedLedgerWriter`."""

    def __init__(self, background: LoopThread, writer: client_aio.UnboundedLedgerWriter) -> None:
        super().__init__(background, writer)
        self._unbounded = writer

    @property
    def term(self) -> int:
        """Return the term under which this writer writes."""
        return self._unbounded.term

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed."""
        return self._unbounded.first_entry

    def roll(self) -> int:
        """Begin a new fragment, and return its first entry."""
        return self._behind_inbox(self._unbounded.roll)

    def trim(self, before_entry: int) -> int:
        """Drop the fragments that lie before an entry, and return the first entry that is left."""
        return self._run(self._unbounded.trim(before_entry))

    def close(self, *, seal: bool = False) -> LedgerMetadata:
        """Flush, and leave the ledger to the next takeover; with `seal` close it for good."""
        return self._behind_inbox(lambda: self._unbounded.close(seal=seal))


class UnboundedClient(Handle):
    """The unbounded-ledger operations of a client; a part of `Client`."""

    _client: client_aio.Client

    def open_unbounded_ledger(self, name_or_id: str | int, **options: Any) -> UnboundedLedgerWriter:
        """**Take an unbounded ledger over**, or create it, and open it for writing.

        Options as for `client_aio.Client.open_unbounded_ledger`.
        """

        async def open_() -> client_aio.UnboundedLedgerWriter:
            return await self._client.open_unbounded_ledger(name_or_id, **options)

        return UnboundedLedgerWriter(self._background, self._run(open_()))

    def create_unbounded_ledger(self, name: str, **options: Any) -> int:
        """Create an unbounded ledger without a writer, and return its id."""
        return self._run(self._client.create_unbounded_ledger(name, **options))

    def read_unbounded_ledger(
        self, name_or_id: str | int, start: int | None = 0, *, follow: bool = True, password: bytes = b""
    ) -> Generator[Entry, None, None]:
        """Read an unbounded ledger from an entry on; with `follow` until it is sealed. Never fences."""
        return self._iterate(
            lambda: self._client.read_unbounded_ledger(name_or_id, start, follow=follow, password=password)
        )

    def list_unbounded_ledgers(self) -> list[tuple[str, int]]:
        """Return names and ids of the unbounded ledgers that have a name, in the order of the names."""

        async def collect() -> list[tuple[str, int]]:
            return [found async for found in self._client.list_unbounded_ledgers()]

        return self._run(collect())
