"""The connection to an SQLite file, for as long as the path names that file.

Synchronous; `tables` and `leases` have one each, in the worker thread that makes all their calls. Owns the
connection, transactions, and the translation of SQLite's errors into this project's.

A process goes on with the file that it has open when another file is put in that one's place. It reads the
past there, and nobody else sees what it commits. So the result of a call counts only if the path names the
opened file when the call has ended (`Database.run`). Otherwise the file that the path names is opened, and
the call is made again. The inode of an open file is never given to another file: equal numbers are one file.

- A read is believed where the path named the file behind it. Then it named the file during the read as well,
  unless somebody took the file away and put it back.
- A write looks before its commit as well, and does nothing where the file was replaced. Where it was replaced
  between that look and the look behind the commit, the outcome is unknown.
- Where the path names no file, no call counts. Nothing is created in its place.
- `-wal` and `-shm` belong to one file, and are found by the path. Where they were removed or replaced alone,
  or were left beside another file, no call counts until an operator has put that right.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    MetadataCorruptError,
    MetadataError,
    MetadataUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BUSY_TIMEOUT_MS = 100
"""Short: a long wait for the write lock is cut into attempts, and heartbeats run in between."""

PRIVATE = 0o600
"""The mode of a new file: metadata are for no other user of the machine."""

Connection = sqlite3.Connection
Result = TypeVar("Result")
FileId = tuple[int, int] | None
"""Device and inode; None for a file that is not there."""

log = logging.getLogger(__name__)


class BusyError(Exception):
    """Another process holds the write lock; nothing was done, try again."""


class _Files(NamedTuple):
    database: FileId
    wal: FileId
    shm: FileId


class Database:
    """The file that a path names, open."""

    def __init__(
        self,
        path: Path,
        prepare: Callable[[Connection, bool], None],
        *,
        create: bool,
        is_made_again: bool = False,
    ) -> None:
        """Open the file.

        Args:
            path: the file.
            prepare: called with each new connection, and whether the file may be made. It sets the WAL mode,
                and raises where the file is not fit.
            create: create the file where it is missing.
            is_made_again: create it, too, where it is gone later.

        Raises:
            BusyError: another process is setting it up, or is replacing it just now.
            BookKeeperError: the file cannot be used, or `prepare` raised the error.
        """
        self._path = path
        self._prepare = prepare
        self._is_made_again = is_made_again
        self.openings = 0
        """How often another file was opened in the place of the one before."""

        self.commits = 0
        """The transactions committed by `writing`."""

        self._beside = ""  # what the names of `-wal` and `-shm` begin with
        self._connection, self._files = self._open(create=create)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Execute a statement; inside `run` alone its result counts."""
        return self._connection.execute(statement, values)

    def run(self, call: Callable[[], Result]) -> Result:
        """Run a call that uses this database, on the file that the path names.

        Raises:
            MetadataUnavailableError: the path names no file that can be used. Or the file was replaced while
                the call committed, and the outcome is unknown.
            BusyError: as the call does.
        """
        while True:
            commits = self.commits
            try:
                result = call()
            except Exception:
                if self._is_current():
                    raise
            else:
                if self._is_current():
                    return result
            if self.commits != commits:
                raise MetadataUnavailableError(
                    f"the metadata database {self._path} was replaced while it was being written"
                )
            self._open_again()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make a transaction of what is executed inside; raises BusyError where the file was replaced."""
        with translated(self._path):
            with transaction(self._connection):
                yield
                if not self._is_current():
                    raise BusyError(f"{self._path} has been replaced")
            self.commits += 1

    def _look(self) -> _Files:
        beside = self._beside
        return _Files(_id_of(os.fspath(self._path)), _id_of(f"{beside}-wal"), _id_of(f"{beside}-shm"))

    def _is_current(self) -> bool:
        return self._look() == self._files

    def _open(self, *, create: bool) -> tuple[Connection, _Files]:
        if create:
            _make(self._path)
        self._beside = os.path.realpath(self._path)  # SQLite follows symbolic links, too
        before = _id_of(os.fspath(self._path))
        with translated(self._path), ExitStack() as undo:
            connection = _connect(self._path)
            undo.callback(connection.close)
            self._prepare(connection, create)
            files = self._look()
            if files.database is None or files.database != before:
                raise BusyError(f"{self._path} is being replaced")
            undo.pop_all()
        return connection, files

    def _open_again(self) -> None:
        """Open the file that the path names now."""
        self._beside = os.path.realpath(self._path)
        found, former = self._look(), self._files
        if found == former:
            return  # it was away for a moment
        if found.database is None and not self._is_made_again:
            raise MetadataUnavailableError(f"the metadata database {self._path} is gone")
        if found.database == former.database:
            raise MetadataUnavailableError(
                f"the -wal or -shm file of the metadata database {self._path} was removed or replaced while "
                "it was in use: end all processes that have it open"
            )
        if {found.wal, found.shm} & {former.wal, former.shm} - {None}:
            raise MetadataUnavailableError(
                f"the metadata database {self._path} was replaced, and the -wal or -shm file of the former "
                "one was left: end all processes that have it open, and remove these"
            )
        try:
            connection, files = self._open(create=self._is_made_again)
        except MetadataUnavailableError:
            raise
        except BookKeeperError as error:
            raise MetadataUnavailableError(
                f"the metadata database {self._path} was replaced by a file that cannot be used: {error}"
            ) from error
        former_connection, self._connection, self._files = self._connection, connection, files
        self.openings += 1
        former_connection.close()
        log.warning("%s was replaced by another file, which is used from now on", self._path)


def _id_of(path: str) -> FileId:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


_making = threading.Lock()
"""Held while this process has a descriptor of a database file that is no connection's; see `_make`."""


def _make(path: Path) -> None:
    """Create the file, `PRIVATE`, where there is none."""
    # Closing any descriptor of a file drops all locks that this process has on it. So a descriptor is opened
    # only of a file that did not exist, and no connection is made meanwhile.
    with _making, suppress(OSError):  # the file exists; or SQLite reports why it cannot be created
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, PRIVATE)
        try:
            os.fchmod(descriptor, PRIVATE)  # `os.open` applies the umask, which may take more away
        finally:
            os.close(descriptor)


def _connect(path: Path) -> Connection:
    # `mode=rw` creates no file. `isolation_level=None`: only `transaction` begins and ends transactions.
    uri = f"file:{quote(os.fsencode(path))}?mode=rw"
    with _making:
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)


def use_wal(connection: Connection, path: Path, *, synchronous: str) -> None:
    """Set WAL mode, in which several processes share the file."""
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise InvalidArgumentError(
            f"the file system of {path} cannot hold a shared SQLite database (journal mode {mode!r})"
        )
    connection.execute(f"PRAGMA synchronous = {synchronous}")


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Make a transaction of what is executed inside, and commit it unless an error is raised."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has rolled back already, and another ROLLBACK would be an error.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn the errors of SQLite into this project's."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


def translate(error: sqlite3.Error, path: Path) -> MetadataError | InvalidArgumentError | BusyError:
    """Return this project's error for one of SQLite's; the message names the file, the class the outcome."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BusyError(str(error))
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return MetadataCorruptError(f"the metadata database {path} is damaged or none at all: {error}")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return InvalidArgumentError(f"the metadata database {path} cannot be opened: {error}")
    if code == sqlite3.SQLITE_FULL:
        return MetadataUnavailableError(f"no space left for the metadata database {path}: {error}")
    if code == sqlite3.SQLITE_READONLY:
        return MetadataUnavailableError(f"the metadata database {path} cannot be written: {error}")
    return MetadataUnavailableError(f"the metadata database {path} failed: {error}")
