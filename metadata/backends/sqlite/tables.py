"""The tables of an SQLite metadata store, and every statement that touches them.

Synchronous; `metadata.backends.sqlite.store` makes all calls from one worker thread, through `Tables.run`.
Owns the schema. Does not own the connection (`metadata.backends.sqlite.database`), nor which sessions are
alive (`metadata.backends.sqlite.leases`).

The database is in WAL mode with `synchronous=FULL`: a committed transaction is on the disk.

Modes: a new file is 0600 under any umask. SQLite gives `-wal` and `-shm` the mode of their database. An
existing file keeps its mode, so that an operator may share a store with a group.

Invariant: a node's row id is its incarnation, since AUTOINCREMENT never uses a row id twice.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from metadata import write_outcome
from metadata.backends.sqlite.database import Database, transaction, translated, use_wal
from metadata.errors import (
    InvalidArgumentError,
    KeyExistsError,
    MetadataCorruptError,
    MetadataUnavailableError,
    NoSuchKeyError,
    no_cluster,
)
from metadata.ids import MALFORMED
from metadata.keys import ancestors_of, name_of, parent_of
from metadata.store import Guard, Version, Versioned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from metadata.backends.sqlite.database import Connection, Result

SCHEMA_VERSION = 2
APPLICATION_ID = 0x626B6D64
"""`bkmd`: distinguishes a metadata store from any other SQLite file."""

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


Signature = tuple[int | str, ...]
"""The count of files opened; then incarnation, number, writers and count of child changes of the key.

A missing key has those of its nearest ancestor: they tell that it was made and removed since.
"""


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
        self._seen: tuple[int, int, int, tuple[str, ...]] | None = None
        self._signatures: dict[str, Signature] = {}
        self._database = Database(path, self._prepare, create=create)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def run(self, call: Callable[[], Result]) -> Result:
        """Run a call of the methods below on the file that the path names; see `Database.run`."""
        return self._database.run(call)

    # Keys

    def create(self, key: str, value: bytes, token: str, maybe_sent: bool) -> Version:
        """Create a key; see `MetadataStore.create`."""
        with self._database.writing():
            row = self._find(key)
            if row is not None and row.value is not None:
                return write_outcome.settle_create(key, row.version, token, maybe_sent=maybe_sent)
            return self._put(key, value, (token,), None)

    def create_missing(self, records: Sequence[tuple[str, bytes]], token: str) -> list[str]:
        """Create keys in one transaction; see `MetadataStore.create_missing`."""
        found = []
        with self._database.writing():
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
        with self._database.writing():
            row = self._find_value(key)
            if row.version != expected:
                return write_outcome.settle_compare_and_set(
                    key, expected, row.version, token, maybe_sent=maybe_sent
                )
            write_outcome.check_guard(key, guard, self._find_value)
            return self._change(key, value, write_outcome.add_writer(row.writers, token))

    def delete(self, key: str, expected: Version | None, guard: Guard | None) -> None:
        """Delete a key; see `MetadataStore.delete`."""
        with self._database.writing():
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
        with self._database.writing():
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
        with self._database.writing():
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
        """Return a value that differs when the key or its children have changed, even back to nothing."""
        with translated(self._path):
            return self._signature(key)

    def signatures(self, keys: tuple[str, ...]) -> dict[str, Signature]:
        """Return the keys' signatures, read anew where anything has changed since the call before."""
        with translated(self._path):
            ((data_version,),) = self._database.execute("PRAGMA data_version").fetchall()
            seen = (self._database.openings, data_version, self._database.commits, keys)
            if seen != self._seen:
                self._signatures = {key: self._signature(key) for key in keys}
                self._seen = seen
            return self._signatures

    # Sessions

    def owners(self) -> list[str]:
        """List the sessions that have ephemeral keys."""
        with translated(self._path):
            rows = self._database.execute("SELECT DISTINCT session FROM node WHERE session IS NOT NULL")
            return sorted(session for (session,) in rows)

    def ephemerals(self, session: str) -> dict[str, tuple[str, bytes | None]]:
        """Return the session's ephemeral keys, each with its registration's mark and its value."""
        with translated(self._path):
            found = self._database.execute("SELECT path FROM node WHERE session = ?", (session,)).fetchall()
            rows = {key: self._find(key) for (key,) in found}
        return {key: (row.writers[0], row.value) for key, row in rows.items() if row is not None}

    def drop_sessions(self, sessions: Sequence[str]) -> None:
        """Remove all ephemeral keys of those sessions."""
        with self._database.writing():
            for session in sessions:
                keys = self._database.execute("SELECT path FROM node WHERE session = ?", (session,))
                for (key,) in keys.fetchall():
                    self._drop(key)

    def put_ephemeral(self, key: str, value: bytes, writers: tuple[str, str], session: str) -> bool:
        """Create the key, or give it its owner's new value; False where another registration holds it.

        The first of the writers marks the registration, and stays for its whole life.
        """
        with self._database.writing():
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
        with self._database.writing():
            row = self._find(key)
            if row is not None and row.session is not None and row.writers[0] == mark:
                self._drop(key)

    # The methods below run inside a transaction or under `translated`.

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
        row: tuple[int | str, ...] | None = None
        for path in (key, *reversed(ancestors_of(key)), ""):
            row = self._database.execute(
                "SELECT id, number, writers, child_changes FROM node WHERE path = ?", (path,)
            ).fetchone()
            if row is not None:
                break
        # An older copy, or another file, may have come to the same numbers with other contents.
        return (self._database.openings, *(row or ()))

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

    # Opening

    def _prepare(self, connection: Connection, create: bool) -> None:
        # Before WAL mode is set: a file of another program must stay unchanged, its journal mode too.
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        ((application_id,),) = connection.execute("PRAGMA application_id").fetchall()
        if tables > 0 and application_id != APPLICATION_ID:
            raise MetadataCorruptError(f"{self._path} is an SQLite database, but not a metadata store")
        if not create and not _schema_version(connection):
            raise no_cluster(_uri_of(self._path), "the file is empty")
        use_wal(connection, self._path, synchronous="FULL")
        if not _schema_version(connection):
            _create_schema(connection)
        if (found := _schema_version(connection)) != SCHEMA_VERSION:
            raise MetadataCorruptError(
                f"{self._path} has schema version {found}; this release reads {SCHEMA_VERSION}"
            )


def _schema_version(connection: Connection) -> int:
    ((user_version,),) = connection.execute("PRAGMA user_version").fetchall()
    return int(user_version)


def _create_schema(connection: Connection) -> None:
    with transaction(connection):
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        if not _schema_version(connection) and tables == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)


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
