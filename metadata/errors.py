"""The error tree: every exception this project raises on purpose.

    BookKeeperError
    ├── InvalidArgumentError            (also a ValueError) the caller's mistake; raised at once
    │   ├── EntryTooLargeError
    │   └── StaleTransactionError       the log has recorded a later batch, or the batch with other records
    ├── BackpressureError               too many bytes in flight; nothing was sent
    ├── ClientClosedError               the handle or the client is closed
    ├── OperationTimeoutError           (also a TimeoutError)
    ├── UnauthorizedAccessError         wrong password, or an operation that needs one
    ├── LedgerError
    │   ├── NoSuchLedgerError
    │   ├── LedgerExistsError
    │   ├── LedgerClosedError           the ledger takes no more adds
    │   ├── LedgerFencedError           another client took the ledger over
    │   ├── LedgerRecoveryError         recovery is inconclusive for now
    │   ├── LedgerRepairError           a repair found no copy, or the copy was not kept
    │   ├── NoSuchEntryError
    │   ├── DigestMismatchError         no replica returned intact bytes
    │   ├── NoSuchLogError
    │   ├── LogExistsError
    │   ├── LedgerListedError           a log lists the ledger, which was to be deleted by itself
    │   ├── LogTruncatedError           the log begins behind that position
    │   ├── RecordsLostError            a ledger of the log was closed with a loss
    │   ├── LogFencedError              another writer took the log over
    │   └── WriterAbortedError          the writer was aborted; its outstanding adds may survive
    ├── NotEnoughBookiesError
    ├── BookieError                     a bookie answered with an error, or did not answer
    │   ├── BookieUnavailableError
    │   ├── BookieReadOnlyError
    │   ├── EntryUnknownError           the bookie lost data and cannot say whether it held the entry
    │   ├── LedgerIdTakenError          the ledger's id was used before, or has not been given out
    │   ├── StaleMetadataError          the bookie knows a newer content term
    │   ├── TooManyRequestsError
    │   └── ProtocolError               the peer broke the wire protocol
    │       ├── MalformedFrameError
    │       ├── FrameTooLargeError
    │       ├── UnsupportedVersionError
    │       └── NotABookieError
    ├── MetadataError
    │   ├── MetadataUnavailableError
    │   ├── NoSuchClusterError          the store holds no cluster; its URI may be mistyped
    │   ├── KeyExistsError
    │   ├── NoSuchKeyError
    │   ├── VersionConflictError
    │   ├── GuardChangedError
    │   ├── MetadataCorruptError
    │   ├── MetadataSetBackError
    │   └── InvalidTransitionError      an illegal change of a ledger's metadata
    └── StorageError                    a bookie's own disk
        ├── CorruptRecordError
        ├── CookieMismatchError         the directory belongs to another bookie or cluster
        ├── DirectoryInUseError
        ├── DiskFullError
        └── DiskFailedError

An error's `outcome` says whether the operation that raised it took effect: *not done*, *done*, or *unknown*.
Rule 8 in ARCHITECTURE.md: fenced means unknown, never not written.
"""

from __future__ import annotations

import enum

from metadata.text import escape

__all__ = [
    "BackpressureError",
    "BookKeeperError",
    "BookieError",
    "BookieReadOnlyError",
    "BookieUnavailableError",
    "ClientClosedError",
    "CookieMismatchError",
    "CorruptRecordError",
    "DigestMismatchError",
    "DirectoryInUseError",
    "DiskFailedError",
    "DiskFullError",
    "EntryTooLargeError",
    "EntryUnknownError",
    "FrameTooLargeError",
    "GuardChangedError",
    "InvalidArgumentError",
    "InvalidTransitionError",
    "KeyExistsError",
    "LedgerClosedError",
    "LedgerError",
    "LedgerExistsError",
    "LedgerFencedError",
    "LedgerIdTakenError",
    "LedgerListedError",
    "LedgerRecoveryError",
    "LedgerRepairError",
    "LogExistsError",
    "LogFencedError",
    "LogTruncatedError",
    "MalformedFrameError",
    "MetadataCorruptError",
    "MetadataError",
    "MetadataSetBackError",
    "MetadataUnavailableError",
    "NoSuchClusterError",
    "NoSuchEntryError",
    "NoSuchKeyError",
    "NoSuchLedgerError",
    "NoSuchLogError",
    "NotABookieError",
    "NotEnoughBookiesError",
    "OperationTimeoutError",
    "Outcome",
    "ProtocolError",
    "RecordsLostError",
    "StaleMetadataError",
    "StaleTransactionError",
    "StorageError",
    "TooManyRequestsError",
    "UnauthorizedAccessError",
    "UnsupportedVersionError",
    "VersionConflictError",
    "WriterAbortedError",
]


class Outcome(enum.Enum):
    """Whether the operation that raised an error took effect."""

    NOT_DONE = "not done"
    DONE = "done"
    UNKNOWN = "unknown"


class BookKeeperError(Exception):
    """The root of all errors of this project. Its message is one line, in which text of others is escaped."""

    outcome: Outcome = Outcome.NOT_DONE
    """The outcome of the operation that raised the error; that of other operations it ends may be unknown."""

    def __init__(
        self,
        message: str,
        *,
        ledger_id: int | None = None,
        entry_id: int | None = None,
        bookie_id: str | None = None,
    ) -> None:
        super().__init__(escape(message))
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.bookie_id = bookie_id
        self.is_unanswered = (
            False  # of a read: some bookie that may hold the entry did not say whether it does
        )
        self.acknowledged: int | None = None  # of an `add_batch` that failed: so many of its entries

    def __reduce__(self) -> tuple[object, ...]:
        # Spark pickles a task's exception to send it to the driver. The default pickling calls the class with
        # `args` alone and would lose the keyword-only fields.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    cls: type[BookKeeperError], args: tuple[object, ...], state: dict[str, object]
) -> BookKeeperError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgumentError(BookKeeperError, ValueError):
    """An argument is wrong; the message names it, its value and what is allowed."""


class EntryTooLargeError(InvalidArgumentError):
    """The entry is larger than the limit; nothing was sent."""


class StaleTransactionError(InvalidArgumentError):
    """The log has recorded a later batch of the query, or the batch with other records; nothing was done."""


class BackpressureError(BookKeeperError):
    """More than four times `max_in_flight_bytes` are in flight: await `drain()` first. Not sent."""


class ClientClosedError(BookKeeperError):
    """The client or handle has been closed."""


class OperationTimeoutError(BookKeeperError, TimeoutError):
    """No answer in time. The operation may have taken effect."""

    outcome = Outcome.UNKNOWN


class UnauthorizedAccessError(BookKeeperError):
    """The password is wrong, or the operation needs one."""


class LedgerError(BookKeeperError):
    """An operation on a ledger failed."""


class NoSuchLedgerError(LedgerError):
    """The metadata store has no such ledger."""


class LedgerExistsError(LedgerError):
    """A ledger of that id exists already."""


class LedgerClosedError(LedgerError):
    """The ledger is closed and takes no more adds. This add was not done."""


class LedgerFencedError(LedgerError):
    """Another client took the ledger over. Outstanding adds may or may not survive."""

    outcome = Outcome.UNKNOWN


class LedgerRecoveryError(LedgerError):
    """Recovery could not decide where the ledger ends; run it again when more bookies answer."""


class LedgerRepairError(LedgerError):
    """An entry that a bookie owes could not be copied, or the copy was not kept. Earlier repairs stay."""

    outcome = Outcome.UNKNOWN


class NoSuchEntryError(LedgerError):
    """The entry does not exist, or lies beyond what may be read."""


class DigestMismatchError(LedgerError):
    """No replica returned bytes that match the entry's digest."""


class NoSuchLogError(LedgerError):
    """The metadata store has no such log."""


class LogExistsError(LedgerError):
    """A log of that name exists already."""


class LedgerListedError(LedgerError):
    """A log lists the ledger: its readers would fail for ever. Truncate the log, or force the deletion."""


class LogTruncatedError(LedgerError):
    """The log has been truncated behind that position: its records before `begins_at` are gone."""


class RecordsLostError(LedgerError):
    """A ledger of the log was closed with a loss: records behind its end may have been acknowledged.

    The same of an unbounded ledger, whose readers meet it behind the last entry.
    For a writer that heals, also: its ledger was closed and truncated away before its end was read.
    """


class LogFencedError(LedgerError):
    """Another writer took the log over. Outstanding appends may or may not survive."""

    outcome = Outcome.UNKNOWN


class WriterAbortedError(LedgerError):
    """The writer was aborted. Outstanding adds may or may not survive; the ledger is left to recovery."""

    outcome = Outcome.UNKNOWN


class NotEnoughBookiesError(BookKeeperError):
    """Fewer bookies are available than the operation needs.

    Raised for an add it means *unknown*: some replicas may hold the entry.
    """

    outcome = Outcome.UNKNOWN


class BookieError(BookKeeperError):
    """A bookie answered with an error."""


class BookieUnavailableError(BookieError):
    """The bookie cannot be reached, or the connection was lost before it answered."""

    outcome = Outcome.UNKNOWN


class BookieReadOnlyError(BookieError):
    """The bookie takes no ordinary adds (out of space, or told so)."""


class EntryUnknownError(BookieError):
    """The bookie lost data of this ledger and cannot say whether it held the entry (rule 4)."""


class LedgerIdTakenError(BookieError):
    """The bookie refuses the ledger's id: it was used before, or it has not been given out."""


class StaleMetadataError(BookieError):
    """The bookie holds the entry under a higher content term: read the metadata again."""


class TooManyRequestsError(BookieError):
    """The bookie's queue is full; the request was not accepted."""


class ProtocolError(BookieError):
    """The peer broke the wire protocol; the connection is closed."""


class MalformedFrameError(ProtocolError):
    """A frame, header or block does not parse, or a checksum over it is wrong."""


class FrameTooLargeError(ProtocolError):
    """A frame's length is above the limit of the connection's state."""


class UnsupportedVersionError(ProtocolError):
    """The two sides share no version of the wire protocol."""


class NotABookieError(ProtocolError):
    """The peer at that address does not speak this protocol, or is another bookie."""


class MetadataError(BookKeeperError):
    """The metadata store refused or failed an operation."""


class MetadataUnavailableError(MetadataError):
    """The metadata store cannot be reached. A write in progress may have taken effect."""

    outcome = Outcome.UNKNOWN


class NoSuchClusterError(MetadataError):
    """The metadata store does not exist, or holds no cluster. Opening makes neither."""


class KeyExistsError(MetadataError):
    """The key to be created exists already, and this call did not create it."""


class NoSuchKeyError(MetadataError):
    """There is no such key."""


class VersionConflictError(MetadataError):
    """The key's version is not the expected one: another client changed the key."""


class GuardChangedError(MetadataError):
    """The write was to hold only while another key stays as it is, and another client changed that key.

    The write has not taken effect, and never will.
    """


class MetadataCorruptError(MetadataError):
    """A value in the metadata store does not parse, or breaks an invariant."""


class MetadataSetBackError(MetadataError):
    """The metadata store was set back to an older copy: no ledger in doubt is dropped on its word."""


class InvalidTransitionError(MetadataError):
    """That change of a ledger's metadata is not legal in its present state."""


class StorageError(BookKeeperError):
    """A bookie's own disk."""


class CorruptRecordError(StorageError):
    """Stored bytes do not match their checksum or their layout."""


class CookieMismatchError(StorageError):
    """The data directory belongs to another bookie, another cluster, or has been emptied (rule 6)."""


class DirectoryInUseError(StorageError):
    """Another process has the data directory open."""


class DiskFullError(StorageError):
    """No space left for a new segment."""

    is_of_space = True
    """True where disk space is missing; False where file descriptors or memory are."""


class DiskFailedError(StorageError):
    """A write or an fsync failed; the bookie stops (rule 2)."""

    outcome = Outcome.UNKNOWN


def is_unforeseen(error: Exception) -> bool:
    """Return whether the error is outside this project's tree.

    A loop that survives any error logs the traceback of such an error.
    """
    return not isinstance(error, BookKeeperError)


def no_cluster(where: str, found: str) -> NoSuchClusterError:
    """Build the error of a store, as it was named, that holds no cluster."""
    return NoSuchClusterError(
        f"there is no cluster at {where}: {found}. Check the URI for a typing error. A new cluster is made "
        "by `bookie-aio cluster up`, by `bookie serve` with an empty directory, or by `bookie format "
        "--new-cluster`"
    )
