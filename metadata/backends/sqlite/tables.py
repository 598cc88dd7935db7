"""The tables of an SQLite metadata store, and every statement that touches them.

Synchronous; `metadata.backends.sqlite.store` makes all calls from one worker thread. Owns the schema,
transactions, and the translation of SQLite's errors into this project's. Does not own which sessions are
alive (`metadata.backends.sqlite.leases`).

The database is in WAL mode with `synchronous=FULL`: a committed transaction is on the disk.

Modes: a new file is 0600 under any umask. SQLite gives `-wal` and `-shm` the mode of their database. An
existing file keeps its mode, so that an operator may share a store with a group.

Invariant: a node's row id is its incarnation, since AUTOINCREMENT never uses a row id twice.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from metadata import write_outcome
from metadata.errors import (
    InvalidArgumentError,
    KeyExistsError,
    MetadataCorruptError,
    MetadataError,
    MetadataUnavailableError,
    NoSuchKeyError,
    no_cluster,
)
from metadata.ids import MALFORMED
from metadata.keys import ancestors_of, name_of, parent_of
from metadata.store import Guard, Version, Versioned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SCHEMA_VERSION = 2
APPLICATION_ID = 0x626B6D64
"""`bkmd`: distinguishes a metadata store from any other SQLite file."""

BUSY_TIMEOUT_MS = 100
"""Short: a long wait for the write lock is cut into attempts, and heartbeats run in between."""

PRIVATE = 0o600
"""The mode of a new file: metadata are for no other user of the machine."""

_SCHEMA = f"""
CREATE TABLE node (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    path TEXT NOT NULL UNIQUE,
    parent TEXT NOT NULL,
    name TEXT NOT NULL,
    value BLOB,
    number INTEGER NOT NULL,
    writers TEXT NOT NULL,
    child_changes INTEGER NOT NULL,
    session TEXT,
    made_ns INTEGER NOT NULL
);
CREATE INDEX node_parent ON node (parent, name);
CREATE INDEX node_session ON node (session) WHERE session IS NOT NULL;
CREATE TABLE counter (name TEXT PRIMARY KEY, next_id INTEGER NOT NULL);
INSERT INTO node (path, parent, name, number, writers, child_changes, made_ns)
    VALUES ('', '/', '', 0, '[]', 0, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


class BusyError(Exception):
    """Another process holds the write lock; nothing was done, try again."""


class Row(NamedTuple):
    """A node, with or without a value."""

    incarnation: int
    value: bytes | None
    number: int
    writers: tuple[str, ...]
    session: str | None

    @property
    def version(self) -> Version:
        return Version(self.number, self.incarnation, self.writers)


Signature = tuple[int, int, int] | None
"""Incarnation, number and count of child changes of a node; None where there is no node."""


class Tables:
    """The database, open."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the file.

        Args:
            create: create it where it is missing.

        Raises:
            InvalidArgumentError: the path cannot hold a database.
            NoSuchClusterError: without `create`: the file is missing, or no store has been made in it.
            MetadataCorruptError: the file is no metadata store, is damaged, or has an unknown schema.
            BusyError: another process is setting it up just now.
        """
        if path.is_dir():
            raise InvalidArgumentError(f"{path} is a directory, not a metadata database")
        if not create and not path.exists():
            raise no_cluster(_uri_of(path), "there is no such file")
        if not path.parent.is_dir():
            raise InvalidArgumentError(f"the directory {path.parent} does not exist")
        self._path = path
        self._own_commits = 0
        self._seen: tuple[int, int, tuple[str, ...]] | None = None
        with translated(self._path), ExitStack() as undo:
            self._database = connect(path, create=create)
            undo.callback(self._database.close)
            # Before WAL mode is set: a file of another program must stay unchanged, its journal mode too.
            self._check_ours()
            if not create:
                self._check_made()
            use_wal(self._database, path, synchronous="FULL")
            self._check_schema()
            undo.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # Keys

    def create(self, key: str, value: bytes, token: str, maybe_sent: bool) -> Version:
        """Create a key; see `MetadataStore.create`."""
        with self._writing():
            row = self._find(key)
            if row is not None and row.value is not None:
                return write_outcome.settle_create(key, row.version, token, maybe_sent=maybe_sent)
            return self._put(key, value, (token,), None)

    def create_missing(self, records: Sequence[tuple[str, bytes]], token: str) -> list[str]:
        """Create keys in one transaction; see `MetadataStore.create_missing`."""
        found = []
        with self._writing():
            for key, value in records:
                row = self._find(key)
                if row is None or row.value is None:
                    self._put(key, value, (token,), None)
                else:
                    found.append(key)
        return found

    def read(self, key: str) -> Versioned:
        """Read a key; see `MetadataStore.read`."""
        with translated(self._path):
            row = self._find(key)
        if row is None or row.value is None:
            raise _missing(key)
        return Versioned(row.value, row.version)

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        expected: Version,
        token: str,
        maybe_sent: bool,
        guard: Guard | None,
    ) -> Version:
        """Replace a value; see `MetadataStore.compare_and_set`."""
        with self._writing():
            row = self._find_value(key)
            if row.version != expected:
                return write_outcome.settle_compare_and_set(
                    key, expected, row.version, token, maybe_sent=maybe_sent
                )
            write_outcome.check_guard(key, guard, self._find_value)
            return self._change(key, value, write_outcome.add_writer(row.writers, token))

    def delete(self, key: str, expected: Version | None, guard: Guard | None) -> None:
        """Delete a key; see `MetadataStore.delete`."""
        with self._writing():
            row = self._find_value(key)
            if expected is not None and row.version != expected:
                raise write_outcome.conflict(key, expected, row.version)
            write_outcome.check_guard(key, guard, self._find_value)
            self._drop(key)

    def children(self, key: str) -> list[str]:
        """List the children's names; see `MetadataStore.children`."""
        with translated(self._path):
            rows = self._database.execute("SELECT name FROM node WHERE parent = ? ORDER BY name", (key,))
            return sorted(name for (name,) in rows)

    def allocate(self, name: str, count: int) -> range:
        """Draw a block of ids; see `MetadataStore.allocate_ids`."""
        with self._writing():
            ((next_id,),) = self._database.execute(
                "INSERT INTO counter (name, next_id) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET next_id = next_id + excluded.next_id RETURNING next_id",
                (name, count),
            ).fetchall()
            return range(next_id - count, next_id)

    def ids_drawn(self, name: str, least: int) -> int:
        """Return the lowest id that was not drawn; see `MetadataStore.ids_drawn`."""
        if not least:
            with translated(self._path):
                found = self._database.execute("SELECT next_id FROM counter WHERE name = ?", (name,))
                return next((int(next_id) for (next_id,) in found), 0)
        with self._writing():
            ((next_id,),) = self._database.execute(
                "INSERT INTO counter (name, next_id) VALUES (?, ?) ON CONFLICT (name) "
                "DO UPDATE SET next_id = MAX(next_id, excluded.next_id) RETURNING next_id",
                (name, least),
            ).fetchall()
            return int(next_id)

    def age_s(self, key: str) -> float:
        """Return a key's age; see `MetadataStore.age_s`."""
        with translated(self._path):
            self._find_value(key)
            ((made_ns,),) = self._database.execute("SELECT made_ns FROM node WHERE path = ?", (key,))
            return max(0.0, (_now_ns(self._path) - int(made_ns)) / 1e9)

    # Watches

    def signature(self, key: str) -> Signature:
        """Return a value that differs whenever the key's value or its children have changed."""
        with translated(self._path):
            return self._signature(key)

    def changed_signatures(self, keys: tuple[str, ...]) -> dict[str, Signature] | None:
        """Return the keys' signatures; None where nothing has changed since the last call with these keys."""
        with translated(self._path):
            ((data_version,),) = self._database.execute("PRAGMA data_version").fetchall()
            seen = (data_version, self._own_commits, keys)
            if seen == self._seen:
                return None
            signatures = {key: self._signature(key) for key in keys}
            self._seen = seen
            return signatures

    # Sessions

    def owners(self) -> list[str]:
        """List the sessions that have ephemeral keys."""
        with translated(self._path):
            rows = self._database.execute("SELECT DISTINCT session FROM node WHERE session IS NOT NULL")
            return sorted(session for (session,) in rows)

    def drop_sessions(self, sessions: Sequence[str]) -> None:
        """Remove all ephemeral keys of those sessions."""
        with self._writing():
            for session in sessions:
                keys = self._database.execute("SELECT path FROM node WHERE session = ?", (session,))
                for (key,) in keys.fetchall():
                    self._drop(key)

    def put_ephemeral(self, key: str, value: bytes, writers: tuple[str, str], session: str) -> bool:
        """Create the key, or give it its owner's new value; False where another registration holds it.

        The first of the writers marks the registration, and stays for its whole life.
        """
        with self._writing():
            row = self._find(key)
            if row is None:
                self._put(key, value, writers, session)
                return True
            if row.session is None:
                raise KeyExistsError(f"key {key!r} exists and is not ephemeral")
            if row.session != session or row.writers[0] != writers[0]:
                return False
            if row.value != value:
                self._change(key, value, writers)
            return True

    def drop_ephemeral(self, key: str, mark: str) -> None:
        """Delete the key if the registration with that mark holds it."""
        with self._writing():
            row = self._find(key)
            if row is not None and row.session is not None and row.writers[0] == mark:
                self._drop(key)

    # The methods below run inside a transaction or under `_translated`.

    def _find(self, key: str) -> Row | None:
        row = self._database.execute(
            "SELECT id, value, number, writers, session FROM node WHERE path = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        incarnation, value, number, writers, session = row
        try:
            return Row(incarnation, value, number, tuple(json.loads(writers)), session)
        except MALFORMED as error:
            raise MetadataCorruptError(
                f"key {key!r} names no writers: {error!r} in {writers!r:.200}"
            ) from error

    def _find_value(self, key: str) -> Row:
        row = self._find(key)
        if row is None or row.value is None:
            raise _missing(key)
        return row

    def _signature(self, key: str) -> Signature:
        row: Signature = self._database.execute(
            "SELECT id, number, child_changes FROM node WHERE path = ?", (key,)
        ).fetchone()
        return row

    def _put(self, key: str, value: bytes, writers: tuple[str, ...], session: str | None) -> Version:
        for ancestor in ancestors_of(key):
            row = self._find(ancestor)
            if row is None:
                self._insert(ancestor, None)
            elif row.session is not None:
                raise InvalidArgumentError(f"{ancestor!r} is ephemeral and can have no child such as {key!r}")
        if self._find(key) is None:
            self._insert(key, session)
        return self._change(key, value, writers)

    def _insert(self, key: str, session: str | None) -> None:
        self._database.execute(
            "INSERT INTO node (path, parent, name, number, writers, child_changes, session, made_ns) "
            "VALUES (?, ?, ?, 0, '[]', 0, ?, ?)",
            (key, parent_of(key), name_of(key), session, _now_ns(self._path)),
        )
        self._touch_children(parent_of(key))

    def _change(self, key: str, value: bytes, writers: tuple[str, ...]) -> Version:
        row = self._find(key)
        assert row is not None
        self._database.execute(
            "UPDATE node SET value = ?, number = number + 1, writers = ? WHERE path = ?",
            (value, json.dumps(writers), key),
        )
        return Version(row.number + 1, row.incarnation, writers)

    def _drop(self, key: str) -> None:
        if self._database.execute("SELECT 1 FROM node WHERE parent = ? LIMIT 1", (key,)).fetchone():
            raise InvalidArgumentError(f"key {key!r} has children and cannot be deleted")
        self._database.execute("DELETE FROM node WHERE path = ?", (key,))
        self._touch_children(parent_of(key))

    def _touch_children(self, parent: str) -> None:
        self._database.execute("UPDATE node SET child_changes = child_changes + 1 WHERE path = ?", (parent,))

    # Opening, transactions, errors

    def _check_ours(self) -> None:
        ((tables,),) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchall()
        ((application_id,),) = self._database.execute("PRAGMA application_id").fetchall()
        if tables > 0 and application_id != APPLICATION_ID:
            raise MetadataCorruptError(f"{self._path} is an SQLite database, but not a metadata store")

    def _check_made(self) -> None:
        ((user_version,),) = self._database.execute("PRAGMA user_version").fetchall()
        if user_version == 0:
            raise no_cluster(_uri_of(self._path), "the file is empty")

    def _check_schema(self) -> None:
        ((user_version,),) = self._database.execute("PRAGMA user_version").fetchall()
        if user_version == 0:
            self._create_schema()
            ((user_version,),) = self._database.execute("PRAGMA user_version").fetchall()
        if user_version != SCHEMA_VERSION:
            raise MetadataCorruptError(
                f"{self._path} has schema version {user_version}; this release reads {SCHEMA_VERSION}"
            )

    def _create_schema(self) -> None:
        with self._writing():
            ((user_version,),) = self._database.execute("PRAGMA user_version").fetchall()
            ((tables,),) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchall()
            if user_version == 0 and tables == 0:
                for statement in _SCHEMA.split(";"):
                    self._database.execute(statement)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with translated(self._path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                # After some errors SQLite has rolled back already, and another ROLLBACK would be an error.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
            self._own_commits += 1


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


_creating = threading.Lock()
"""Held while this process has a descriptor of a database file that is no connection's; see `connect`."""


def connect(path: Path, *, create: bool = True) -> sqlite3.Connection:
    """Open a database file; a new file is `PRIVATE`. Without `create` no file is made."""
    if not create:
        uri = f"file:{quote(os.fsencode(path))}?mode=rw"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
    # Closing any descriptor of a file drops all locks that this process has on it. So a descriptor is opened
    # only of a file that did not exist, and no connection is made meanwhile.
    with _creating, suppress(OSError):  # the file exists; or SQLite reports why it cannot be created
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, PRIVATE)
        try:
            os.fchmod(descriptor, PRIVATE)  # `os.open` applies the umask, which may take more away
        finally:
            os.close(descriptor)
    # `isolation_level=None`: only the explicit BEGIN and COMMIT of this module begin and end transactions.
    return sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)


def use_wal(connection: sqlite3.Connection, path: Path, *, synchronous: str) -> None:
    """Set WAL mode, in which several processes share the file."""
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise InvalidArgumentError(
            f"the file system of {path} cannot hold a shared SQLite database (journal mode {mode!r})"
        )
    connection.execute(f"PRAGMA synchronous = {synchronous}")


def _uri_of(path: Path) -> str:
    return f"sqlite://{quote(os.fsencode(path))}"


def _missing(key: str) -> NoSuchKeyError:
    return NoSuchKeyError(f"there is no key {key!r}")


def _now_ns(path: Path) -> int:
    """Return the time that the file's own file system gives a change made now.

    Not a process's clock: the processes that share the file may have set clocks of their own.
    """
    try:
        os.utime(path)
        return path.stat().st_mtime_ns
    except OSError as error:
        raise MetadataUnavailableError(
            f"the metadata database {path} has no time: {error.strerror}"
        ) from error
