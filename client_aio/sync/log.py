"""Logs without an event loop; see `client_aio.log`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from client_aio.sync.loop_thread import Handle, result_of
from client_aio.sync.submit_queue import as_bytes
from client_aio.sync.writer import WriterHandle

if TYPE_CHECKING:
    from collections.abc import Generator

    import client_aio
    from client_aio.log.add_ledgers import AddedToLog
    from client_aio.log.metadata import LogMetadata
    from client_aio.log.reader import LogBatch, LogRecord, Start
    from client_aio.log.truncation import SweepReport
    from client_aio.sync.loop_thread import AddFuture, LoopThread
    from metadata.model.log import LogRow, Position


class LogWriter(WriterHandle["Position"]):
    """Appends records to a log; see `client_aio.LogWriter`."""

    def __init__(self, background: LoopThread, writer: client_aio.LogWriter) -> None:
        super().__init__(background, writer, lambda payload, _: writer.append(payload))
        self._writer = writer

    @property
    def name(self) -> str:
        """Return the log's name."""
        return self._writer.name

    @property
    def last_add_confirmed(self) -> Position | None:
        """Return the position of the last acknowledged record, None for none."""
        return self._writer.last_add_confirmed

    def append(self, data: bytes | bytearray | memoryview) -> Position:
        """Append a record, wait until it is acknowledged, and return its position."""
        self._background.check_thread()
        return result_of(self.append_nowait(data))

    def append_nowait(self, data: bytes | bytearray | memoryview) -> AddFuture[Position]:
        """Append a record; blocks only while more than `max_in_flight_bytes` are in flight.

        Returns:
            A `concurrent.futures.Future` of its position. Cancelling it leaves the append running. Its
            callbacks run on the background thread and must not block.

        Raises:
            BackpressureError: called in such a callback, and more than `max_in_flight_bytes` are in flight.
        """
        self._check_process()
        return self._inbox.put(as_bytes(data, "a record"))

    def roll(self) -> None:
        """Roll to another ledger."""
        self._behind_inbox(self._writer.roll)


class LogClient(Handle):
    """The log operations of a client; a part of `Client`."""

    _client: client_aio.Client

    def open_log(self, name: str, **options: Any) -> LogWriter:
        """Open a log for writing; **takes it over**. Options as for `client_aio.Client.open_log`."""

        async def open_() -> client_aio.LogWriter:
            return await self._client.open_log(name, **options)

        return LogWriter(self._background, self._run(open_()))

    def read_log(
        self, name: str, start: Start = None, *, follow: bool = False, password: bytes = b""
    ) -> Generator[LogRecord, None, None]:
        """Read a log's records in order; with `follow` the iterator never ends."""
        for batch in self.read_log_batches(name, start, follow=follow, password=password):
            yield from batch

    def read_log_batches(
        self, name: str, start: Start = None, *, follow: bool = False, password: bytes = b""
    ) -> Generator[LogBatch, None, None]:
        """Read as `read_log` does, in batches."""
        return self._iterate(
            lambda: self._client.read_log_batches(name, start, follow=follow, password=password)
        )

    def add_to_log(self, name: str, ledger_ids: list[int], **options: Any) -> AddedToLog:
        """Add CLOSED ledgers to a log, all at once. Options as for `client_aio.Client.add_to_log`."""
        return self._run(self._client.add_to_log(name, ledger_ids, **options))

    def log_metadata(self, name: str) -> LogMetadata:
        """Read a log's list of ledgers."""
        return self._run(self._client.log_metadata(name))

    def list_logs(self) -> list[str]:
        """Return the names of all logs, sorted."""

        async def collect() -> list[str]:
            return [name async for name in self._client.list_logs()]

        return self._run(collect())

    def truncate_log(
        self, name: str, before: Position | tuple[int, int] | str, *, password: bytes = b""
    ) -> list[LogRow]:
        """Drop a log's records before a position."""
        return self._run(self._client.truncate_log(name, before, password=password))

    def delete_log(self, name: str, *, password: bytes = b"") -> None:
        """Delete a log with all its ledgers."""
        self._run(self._client.delete_log(name, password=password))

    def sweep_log_orphans(self, *, older_than_s: float = 3600.0, password: bytes = b"") -> SweepReport:
        """Delete leftovers of crashed log writers."""
        return self._run(self._client.sweep_log_orphans(older_than_s=older_than_s, password=password))
