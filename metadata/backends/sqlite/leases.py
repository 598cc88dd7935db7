"""The leases of an SQLite metadata store's sessions.

Synchronous; `metadata.backends.sqlite.store` calls it from a worker thread of its own, so that a slow disk
flush of the database costs nobody its session.

The leases are a database beside the store's, `PATH-leases-BOOT`, with `synchronous=OFF`. They need no
durability: deadlines count the system-wide monotonic clock, which survives any change of the wall clock
and means nothing after a reboot. So each boot has a lease file of its own, and one that a power cut may have
torn is never read again. Heartbeats thus cost no disk flush, and do not wake who watches the database.

Besides its lease a session holds a lock on a file of its own, `PATH-leases-BOOT-SESSION`. The system gives
the lock up with the process, so that whoever looks finds a killed process gone at once; the lease catches
those that live and do not run. Where the file is missing, the lease alone decides.

Invariants: a session has its lease before it owns any key; a lease that has run out is never renewed; only
who finds a session without a lease may remove its keys.
"""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from metadata.backends.sqlite.tables import BusyError, connect, translated, use_wal
from metadata.errors import InvalidArgumentError, MetadataUnavailableError

log = logging.getLogger(__name__)


class Leases:
    """The lease file of this boot, open."""

    def __init__(self, path: Path, *, lease_s: float) -> None:
        """Open the leases of the store at `path`, and remove those of earlier boots.

        Raises:
            MetadataUnavailableError: the disk fails.
            BusyError: another process is setting the file up just now.
        """
        self._lease_ns = int(lease_s * 1e9)
        self._path = path.parent / f"{path.name}-leases-{boot_id()}"
        for stale in path.parent.glob(f"{path.name}-leases-*"):
            if not stale.name.startswith(self._path.name):
                _unlink(stale)
        self._locks: dict[str, IO[bytes]] = {}
        with translated(self._path), ExitStack() as undo:
            self._database = connect(self._path)
            undo.callback(self._database.close)
            use_wal(self._database, self._path, synchronous="OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS lease (session TEXT PRIMARY KEY, deadline_ns INTEGER NOT NULL)"
            )
            undo.pop_all()

    def close(self) -> None:
        """Close the file, and give up the locks."""
        self._database.close()
        for lock in self._locks.values():
            lock.close()

    def begin(self, session: str) -> None:
        """Take a lease.

        Raises:
            MetadataUnavailableError: there is no file to be had for its lock.
            BusyError: another process holds the write lock. Try again, with the same session.
        """
        try:
            with translated(self._path):
                if session not in self._locks:  # held since an earlier try, which found the database busy
                    self._locks[session] = self._locked(session)  # before the lease is there to be looked at
                self._database.execute(
                    "INSERT INTO lease VALUES (?, ?)", (session, time.monotonic_ns() + self._lease_ns)
                )
        except BusyError:
            raise
        except Exception:
            self.give_up(session)  # the next try is another session's
            raise

    def renew(self, session: str) -> bool:
        """Extend the lease; False when it has run out, for good."""
        now = time.monotonic_ns()
        with translated(self._path):
            cursor = self._database.execute(
                "UPDATE lease SET deadline_ns = ? WHERE session = ? AND deadline_ns > ?",
                (now + self._lease_ns, session, now),
            )
        return cursor.rowcount == 1

    def end(self, session: str) -> None:
        """Give up the lease."""
        with translated(self._path):
            self._database.execute("DELETE FROM lease WHERE session = ?", (session,))
        self.give_up(session)

    def give_up(self, session: str) -> None:
        """Let go of the lock of a session of this process that has no lease, or has lost it."""
        _unlink(self._lock_path(session))
        lock = self._locks.pop(session, None)
        if lock is not None:
            lock.close()

    def live(self) -> set[str]:
        """Return all sessions that live, and withdraw for good the leases of the others."""
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

    def _locked(self, session: str) -> IO[bytes]:
        path = self._lock_path(session)
        try:
            lock = path.open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise MetadataUnavailableError(f"no lock on {path} can be had: {error}") from error
        return lock

    def _is_gone(self, session: str) -> bool:
        """Return whether the session's process has ended: the lock that it held can be had."""
        if session in self._locks:
            return False
        try:
            with self._lock_path(session).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or missing, or there are no file descriptors left: the lease decides
            return False
        return True


def _unlink(path: Path) -> None:
    # It may be another user's, in a directory with the sticky bit. Left over, it harms nobody.
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s is left over: %s", path, error)


def boot_id() -> str:
    """Return what distinguishes this boot of the machine from all others."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.exists():
        return linux.read_text().strip()
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    raise InvalidArgumentError("an SQLite metadata store needs Linux or macOS: no boot id is to be had")
