"""The client's settings, with their defaults, and where programs read the passwords of ledgers.

Also here: `tune_gc`, the settings of Python's garbage collector for a process that runs for long.

A program reads a password from a file or from the environment. It is never taken from a command line or from
an option of a job: other users can see those, and they are logged.
"""

from __future__ import annotations

import gc
import math
import os
from dataclasses import dataclass
from pathlib import Path

from bookie_aio.wire.frames import FRAME_BYTES_MAX, entry_room
from client_aio.core.liveness import PING_TIMEOUT_S
from metadata.errors import InvalidArgumentError
from metadata.model.passwords import PASSWORD_BYTES_MAX

MIB = 1024 * 1024


def check_flags(**flags: bool) -> None:
    """Raise InvalidArgumentError for an argument that is neither True nor False: "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name} {value!r} is neither True nor False")


def check_seconds(name: str, value: float) -> None:
    """Raise InvalidArgumentError unless a time in seconds is a finite number, 0 or more."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # nor NaN
        raise InvalidArgumentError(f"{name} {value!r} is not a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of one client. Times are in seconds, sizes in bytes."""

    max_in_flight_bytes: int = 64 * MIB
    """Per writer: above it `drain()` waits. Above four times it `add_entry` raises BackpressureError."""

    lag_bytes_max: int = 32 * MIB
    """Per writer and bookie: how many bytes of acknowledgements a bookie may owe beyond the bytes in flight.

    A bookie that owes more counts as failed. The other bookies have acknowledged those bytes, which are held
    in memory for this bookie alone."""

    connect_timeout_s: float = 5.0
    """The timeout of one connection attempt, with its handshake."""

    ping_timeout_s: float = PING_TIMEOUT_S
    """A bookie of which nothing comes for this time after a PING is gone; the connection is closed.

    A PING is sent when nothing has come for half a second while requests are outstanding."""

    add_timeout_s: float = 10.0
    """A bookie that has not acknowledged an add within this time counts as failed."""

    read_timeout_s: float = 10.0
    """The timeout of one read from one bookie."""

    speculative_read_s: float = 1.0
    """A read not answered within this time is sent to the next bookie as well."""

    metadata_timeout_s: float = 10.0
    """The timeout of one operation on the metadata store."""

    session_timeout_s: float = 10.0
    """The timeout of the session with the metadata store."""

    ensemble_change_timeout_s: float = 60.0
    """How long a writer waits for a definite answer to an ensemble change before it gives up."""

    replacement_retry_s: float = 1.0
    """How long a writer without a replacement for a failed bookie waits before it looks again.

    A bookie that failed is not seated again before this time has passed since it was last seated. A
    closing with a loss waits as long before it asks a bookie again that fell silent."""

    ensemble_changes_max: int = 1000
    """How often a writer replaces bookies before it goes on without those that fail."""

    add_quorum_timeout_s: float = 120.0
    """A writer fails if adds wait and none is acknowledged for this long."""

    quarantine_s: float = 10.0
    """How long a bookie that failed is not chosen for an ensemble while there are enough others."""

    explicit_lac_delay_s: float = 0.01
    """How long a writer is idle before it publishes its LAC to the bookies (rule 13)."""

    read_ahead_bytes: int = 1 * MIB
    """The size limit of one read's answer."""

    read_ahead_requests: int = 4
    """How many answers a sequential read asks for ahead of its consumer."""

    long_poll_s: float = 10.0
    """How long one long poll for the LAC waits at a bookie."""

    entry_bytes_max: int = 4 * MIB
    """Larger entries are refused before anything is sent."""

    ledger_id_block: int = 32
    """How many ledger ids are drawn from the metadata store at a time."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
                raise InvalidArgumentError(f"{name} {value!r} is not a positive number")
            if not name.endswith("_s") and not isinstance(value, int):
                raise InvalidArgumentError(f"{name} {value!r} is not a whole number")
        for name, low, high in (
            ("entry_bytes_max", 1, entry_room(FRAME_BYTES_MAX)),
            ("read_ahead_bytes", 1, 2**32 - 1),
            ("long_poll_s", 0.001, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidArgumentError(f"{name} {getattr(self, name)!r} is not from {low} to {high:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How one writer adds; chosen with `create_ledger`."""

    advanced: bool = False
    """The application assigns the entry ids."""

    deferred_sync: bool = False
    """An add's future is done when Qa bookies have received the entry; `force` makes entries durable."""


_COUNTS = ("reads_per_pass", "reads_at_once", "tasks_max", "worker_bytes_per_s", "cluster_bytes_per_s")
"""The settings of auto recovery that are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRecoveryConfig:
    """Settings of one auditor and one worker. Times are in seconds, sizes in bytes."""

    lost_bookie_delay_s: float = 600.0
    """A bookie that is gone for longer is lost: its entries are copied to others."""

    look_interval_s: float = 1.0
    """How often the auditor looks which bookies are registered. A look costs no read."""

    pass_interval_s: float = 30.0
    """The pause between two passes over the metadata.

    A pass lists all ledgers, and reads those that are new or not CLOSED."""

    reads_per_pass: int = 3000
    """At most so many ledgers that are not CLOSED are read in one pass; they take turns."""

    reread_interval_s: float = 6 * 3600.0
    """Within this time every CLOSED ledger is read once again. Repairs by hand change it."""

    reads_at_once: int = 16
    """The number of reads from the metadata store that are under way at once."""

    tasks_max: int = 5000
    """At most so many tasks stand in the metadata store; further ledgers wait in the auditor's memory."""

    check_interval_s: float = 24 * 3600.0
    """Within this time the replicas of every ledger are checked once."""

    checks_per_s: float = 10.0
    """At most so many ledgers are checked in a second."""

    info_interval_s: float = 30.0
    """How often each bookie is asked whether it lost data."""

    worker_bytes_per_s: int = 16 * MIB
    """How many bytes a worker reads in a second, for copying and for verifying."""

    cluster_bytes_per_s: int = 64 * MIB
    """How many bytes all workers together read in a second. Each gets the same share."""

    retry_s: float = 10.0
    """A task that failed is tried again after this time, and then each time after twice as long."""

    retry_max_s: float = 600.0
    """The longest of these pauses."""

    poll_interval_s: float = 30.0
    """How often an idle worker looks for tasks, beside the watch that tells it of new ones."""

    recover_after_s: float | None = None
    """Recover ledgers that stay in recovery for longer, and abandoned ones; without it, none.

    A ledger is abandoned if it is open, has entries on a lost bookie that another one could replace, and
    nothing of it has moved for so long. A writer that adds replaces the bookie at its next add. One that was
    idle all the time is fenced. Of ledgers with a password the tasks only say so."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "recover_after_s" and value is None:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise InvalidArgumentError(f"{name} {value!r} is not a positive number")
            if name in _COUNTS and not isinstance(value, int):
                raise InvalidArgumentError(f"{name} {value!r} is not a whole number")


_GC_THRESHOLDS = (50_000, 20, 50)
"""After so many new objects the collector looks at the new ones. Python's default is 700, 10, 10."""


def tune_gc() -> None:
    """Have the garbage collector look less often at what lives for long: modules, ledgers, outstanding adds.

    For a process that does little but write or read ledgers; call it when the process has started. Every
    command of `bookie-aio` does so. The client never calls it, since it concerns the whole process.

    All objects of this moment are taken for permanent: a cycle of them is not collected later. Cycles that
    come later are collected after 50,000 new objects, not 700. Until then they keep their memory. Objects
    without a cycle are freed at once, as ever. The client itself leaves no cycle that holds entries.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


PASSWORD_VARIABLE = "BOOKIE_AIO_PASSWORD"


def password_in_environment(variable: str = PASSWORD_VARIABLE) -> bytes:
    """Return the password in an environment variable; b"" if it is not set."""
    return os.environb.get(os.fsencode(variable), b"")


def password_in_file(file: str | Path) -> bytes:
    """Return the password in a file, without one newline at its end.

    Raises:
        InvalidArgumentError: the file cannot be read, is empty, or is too large to be a password. The message
            contains nothing of the file's contents.
    """
    try:
        with Path(file).open("rb") as source:
            password = source.read(PASSWORD_BYTES_MAX + 3)  # the end of the line, and one byte more
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(f"{file}: {reason}") from error
    password = password.removesuffix(b"\n").removesuffix(b"\r")
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        raise InvalidArgumentError(f"{file}: a password has 1 to {PASSWORD_BYTES_MAX:,} bytes")
    return password
