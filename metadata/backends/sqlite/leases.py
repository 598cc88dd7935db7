"""The leases of an SQLite metadata store's sessions.

Synchronous. `metadata.backends.sqlite.store` calls it from a worker thread of its own, so that a slow fsync
of the database lets no lease run out.

The leases are a database beside the store's, `PATH-leases-BOOT`, with `synchronous=OFF`. They need no
durability: deadlines count the system-wide monotonic clock, which is unaffected by the wall clock and
meaningless after a reboot. So each boot has a lease file of its own, and a file that a power cut may have
torn is never read again. Heartbeats thus cost no fsync, and do not wake watchers of the store's database.

Besides its lease a session holds a lock on a file of its own, `PATH-leases-BOOT-SESSION`. The system releases
the lock when the process ends, so that a killed process is detected at once. The lease detects a process that
is alive and stopped. Where the lock file is missing, the lease alone decides.

Both files get the mode of the store's database. Where the lease file is removed, the next call makes another
one. The sessions that were in it have ended then.

Invariants:

- A session has its lease before it owns any key.
- A lease that has run out is never renewed.
- A session's keys are removed only after its lease was found missing.
"""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from metadata.backends.sqlite.database import PRIVATE, BusyError, Database, translated, use_wal
from metadata.errors import InvalidArgumentError, MetadataCorruptError, MetadataUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from metadata.backends.sqlite.database import Connection, Result

log = logging.getLogger(__name__)


class Leases:
    """The lease file of this boot, open."""

    def __init__(self, path: Path, *, lease_s: float) -> None:
        """Open the leases of the store at `path`, and remove those of earlier boots.

        Raises:
            MetadataUnavailableError: the disk fails.
            MetadataCorruptError: the lease file is damaged.
            BusyError: another process is creating the file.
        """
        self._lease_ns = int(lease_s * 1e9)
        self._path = path.parent / f"{path.name}-leases-{boot_id()}"
        for stale in path.parent.glob(f"{path.name}-leases-*"):
            if not stale.name.startswith(self._path.name):
                _unlink(stale)
        self._mode = path.stat().st_mode & 0o666 if path.exists() else PRIVATE
        self._locks: dict[str, IO[bytes]] = {}
        with self._advising():
            self._database = Database(self._path, self._prepare, create=True, is_made_again=True)

    def _prepare(self, connection: Connection, _: bool) -> None:
        with suppress(OSError):  # another user's file
            self._path.chmod(self._mode)
        use_wal(connection, self._path, synchronous="OFF")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS lease (session TEXT PRIMARY KEY, deadline_ns INTEGER NOT NULL)"
        )

    def run(self, call: Callable[[], Result]) -> Result:
        """Run a call of the methods below on the file that the path names; see `Database.run`."""
        with self._advising():
            return self._database.run(call)

    @contextmanager
    def _advising(self) -> Iterator[None]:
        """Have the error of a damaged file say what the file holds."""
        try:
            yield
        except MetadataCorruptError as error:
            raise MetadataCorruptError(
                f"{error}. It holds only the leases of processes that run: while none does, it may be removed"
            ) from error

    def close(self) -> None:
        """Close the file, and release the locks."""
        self._database.close()
        for lock in self._locks.values():
            lock.close()

    def begin(self, session: str) -> None:
        """Take a lease.

        Raises:
            MetadataUnavailableError: the lock file could not be created or locked.
            BusyError: another process holds the write lock. Try again, with the same session.
        """
        try:
            with translated(self._path):
                if session not in self._locks:  # an earlier attempt may have locked it, then raised BusyError
                    self._locks[session] = self._lock_file(session)  # before the lease: see `_is_gone`
                self._database.execute(
                    "INSERT INTO lease VALUES (?, ?)", (session, time.monotonic_ns() + self._lease_ns)
                )
        except BusyError:
            raise
        except Exception:
            self.release_lock(session)  # the caller's next attempt has another session
            raise

    def renew(self, session: str) -> bool:
        """Extend the lease; False where it has run out, for good."""
        now = time.monotonic_ns()
        with translated(self._path):
            cursor = self._database.execute(
                "UPDATE lease SET deadline_ns = ? WHERE session = ? AND deadline_ns > ?",
                (now + self._lease_ns, session, now),
            )
        return cursor.rowcount == 1

    def end(self, session: str) -> None:
        """End the session: delete its lease and release its lock."""
        with translated(self._path):
            self._database.execute("DELETE FROM lease WHERE session = ?", (session,))
        self.release_lock(session)

    def release_lock(self, session: str) -> None:
        """Release the lock of a session of this process that has no lease, or has lost it."""
        _unlink(self._lock_path(session))
        lock = self._locks.pop(session, None)
        if lock is not None:
            lock.close()

    def live(self) -> set[str]:
        """Return all live sessions, and withdraw the leases of the others for good."""
        now = time.monotonic_ns()
        with translated(self._path):
            leases = self._database.execute("SELECT session, deadline_ns FROM lease").fetchall()
            dead = {
                session
                for session, deadline_ns in leases
                if (deadline_ns <= now or self._is_gone(session)) and self._withdraw(session, deadline_ns)
            }
        return {session for session, _ in leases} - dead

    def _withdraw(self, session: str, deadline_ns: int) -> bool:
        """Withdraw a lease for good; False where it has been renewed since its deadline was read."""
        self._database.execute(
            "DELETE FROM lease WHERE session = ? AND deadline_ns = ?", (session, deadline_ns)
        )
        if self._database.execute("SELECT 1 FROM lease WHERE session = ?", (session,)).fetchone():
            return False
        _unlink(self._lock_path(session))
        return True

    def _lock_path(self, session: str) -> Path:
        return self._path.parent / f"{self._path.name}-{session}"

    def _lock_file(self, session: str) -> IO[bytes]:
        path = self._lock_path(session)
        try:
            lock = path.open("wb")
            path.chmod(self._mode)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise MetadataUnavailableError(f"no lock on {path} can be had: {error}") from error
        return lock

    def _is_gone(self, session: str) -> bool:
        """Return whether the session's process has ended, that is, its lock is free."""
        if session in self._locks:
            return False
        try:
            with self._lock_path(session).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # the lock is held or missing, or file descriptors have run out: the lease decides
            return False
        return True


def _unlink(path: Path) -> None:
    # The file may be another user's, in a directory with the sticky bit. A file left over does no harm.
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s is left over: %s", path, error)


def boot_id() -> str:
    """Return an id of this boot of the machine, different from every other boot's."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.exists():
        return linux.read_text().strip()
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    raise InvalidArgumentError("an SQLite metadata store needs Linux or macOS: no boot id is to be had")
