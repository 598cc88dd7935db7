"""Exit codes, and the message to the user about an error.

The codes are stable: scripts rely on them, and README.md lists them.
"""

import enum
import re
from collections.abc import Iterator
from errno import EBADF, EDQUOT, ENOSPC

from metadata import errors
from metadata.text import escape


class Exit(enum.IntEnum):
    """How a command ended."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4  # or no answer in time
    DAMAGED = 5  # stored bytes or metadata are wrong
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # the reader of our standard output went away, as with any filter
    TERMINATED = 143  # by SIGTERM


# The first row whose class matches the error decides. The third column is a hint for the user.
_TABLE: tuple[tuple[type[BaseException], Exit, str], ...] = (
    (errors.InvalidArgumentError, Exit.USAGE, ""),
    (errors.NoSuchLedgerError, Exit.NOT_FOUND, "`bookie-aio ledger list` shows the ledgers there are"),
    (errors.NoSuchLogError, Exit.NOT_FOUND, "`bookie-aio log list` shows the logs there are"),
    (errors.LogExistsError, Exit.FAILURE, ""),
    (errors.LedgerListedError, Exit.FAILURE, "--force deletes it all the same"),
    (errors.LogTruncatedError, Exit.NOT_FOUND, "`bookie-aio log show` says where the log begins"),
    (errors.NoSuchEntryError, Exit.NOT_FOUND, ""),
    (
        errors.UnauthorizedAccessError,
        Exit.FAILURE,
        "--password-file or BOOKIE_AIO_PASSWORD gives the password",
    ),
    (errors.NoSuchKeyError, Exit.NOT_FOUND, ""),
    (errors.NoSuchClusterError, Exit.NOT_FOUND, ""),
    (
        errors.NotEnoughBookiesError,
        Exit.UNAVAILABLE,
        "`bookie-aio bookie list` shows the bookies that run; start more, or ask for a smaller ensemble",
    ),
    (
        errors.MetadataUnavailableError,
        Exit.UNAVAILABLE,
        "is the metadata store running, and does --metadata name it?",
    ),
    (errors.BookieUnavailableError, Exit.UNAVAILABLE, "`bookie-aio bookie list` shows the bookies that run"),
    (errors.NotABookieError, Exit.UNAVAILABLE, "`bookie-aio bookie list` shows where the bookies listen"),
    (errors.LedgerRecoveryError, Exit.UNAVAILABLE, "start the bookies named and run it again"),
    (errors.LedgerRepairError, Exit.UNAVAILABLE, ""),
    (errors.TooManyRequestsError, Exit.UNAVAILABLE, "try again later"),
    (errors.BookieReadOnlyError, Exit.UNAVAILABLE, "free space on the bookie's disk"),
    (
        errors.OperationTimeoutError,
        Exit.UNAVAILABLE,
        "it may have taken effect all the same: look before trying again",
    ),
    (TimeoutError, Exit.UNAVAILABLE, ""),
    (errors.RecordsLostError, Exit.DAMAGED, "`log cat --on-gap skip` reads on behind a log's loss"),
    (errors.DigestMismatchError, Exit.DAMAGED, ""),
    (errors.EntryUnknownError, Exit.DAMAGED, ""),
    (errors.MetadataCorruptError, Exit.DAMAGED, ""),
    (errors.MetadataSetBackError, Exit.DAMAGED, ""),
    (errors.CorruptRecordError, Exit.DAMAGED, ""),
    (
        errors.CookieMismatchError,
        Exit.FAILURE,
        "each bookie has one id and one directory; a new bookie takes a new id and an empty directory",
    ),
    (errors.DirectoryInUseError, Exit.FAILURE, "stop the process that uses it, or name another directory"),
    (
        errors.LogFencedError,
        Exit.FAILURE,
        "another writer took the log over; read it back to see what was kept",
    ),
    (
        errors.LedgerFencedError,
        Exit.FAILURE,
        "another client took the ledger over; read it back to see what was kept",
    ),
)  # fmt: skip


class BookieStartError(errors.BookKeeperError):
    """A bookie's process ended before it served; `exit_code` is the process's exit code."""

    exit_code = 1


def exit_code_of(error: BaseException) -> Exit:
    """Return the exit code for an error that ended a command."""
    if isinstance(error, BookieStartError) and error.exit_code in set(Exit):
        return Exit(error.exit_code)
    return next((code for kind, code, _ in _TABLE if isinstance(error, kind)), Exit.FAILURE)


def describe(error: BaseException) -> str:
    """Return one line with the reason of the error and, where there is one, a hint for the user."""
    message = escape(" ".join(str(error).split()))
    if isinstance(error, OSError) and error.errno == EBADF:
        message = "a standard stream that the command needs is closed"
    elif not message:
        message = type(error).__name__
    elif not isinstance(error, errors.BookKeeperError | OSError):
        message = f"{type(error).__name__}: {message}"
    hint = "; ".join(_hints(error, message))
    return f"{message} ({hint})" if hint else message


_COMMANDS = {
    "open_unbounded_ledger": "`bookie-aio ledger takeover`",
    "accept_loss": "`bookie-aio ledger recover --accept-loss`",
}
"""What messages of the library name, and the command for it."""


def _hints(error: BaseException, message: str) -> Iterator[str]:
    hint = next((hint for kind, _, hint in _TABLE if isinstance(error, kind)), "")
    if hint and not (isinstance(error, errors.MetadataUnavailableError) and _is_of_a_file(error)):
        yield hint
    for name, command in _COMMANDS.items():
        if re.search(rf"\b{name}\b", message):
            yield f"{name} is {command}"


def _is_of_a_file(error: BaseException | None) -> bool:
    """Return whether SQLite or a full disk caused an error: the store is a file that was found."""
    while error is not None:
        is_full = isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT)
        if is_full or hasattr(error, "sqlite_errorcode"):
            return True
        error = error.__cause__
    return False
