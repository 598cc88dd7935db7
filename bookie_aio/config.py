"""Configuration of a bookie: its identity, its addresses and its limits.

Owns the values, their defaults and the checks that make no system call. The command line decides where a
value comes from (arguments, environment, file). The effect of a value is documented where it is used.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bookie_aio.wire.frames import FRAME_BYTES_MAX, entry_room
from metadata.access.bookies import split_address
from metadata.errors import InvalidArgumentError
from metadata.ids import check_bookie_id

if TYPE_CHECKING:
    from bookie_aio.storage.config import StorageConfig

KIB = 1024
MIB = 1024 * KIB

CONNECTIONS_MAX = 10_000
FILES_MAX = 512
_OTHER_DESCRIPTORS = 64
"""Of the metadata store, the journal, the event loop, the standard streams, and the reserve of the disk."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the memory and the work that peers can cause. They bound a bookie's memory under any load."""

    connections_max: int = CONNECTIONS_MAX
    frame_bytes_max: int = FRAME_BYTES_MAX
    entry_bytes_max: int = 4 * MIB

    bytes_pending_max: int = 64 * MIB
    """Bytes of adds accepted and not yet durable, over all connections. Above it no connection is read."""
    connection_bytes_pending_max: int = 8 * MIB
    """The same for one connection. One frame may exceed each of the two limits.

    Pending adds are written in the order of their arrival. The limit therefore bounds the time that the adds
    of other connections wait for one connection that sends all it can: two large groups.
    """
    connection_frames_per_turn: int = 256
    """Frames of one connection in an event-loop iteration, before those of other connections are handled."""
    slow_lane_slice_s: float = 0.0005
    """The time for all requests but adds, over all connections, before the adds that have come go first."""
    received_bytes_max: int = 24 * MIB
    """Receive buffers of connections that have stored an add; those of all others may take as much again.

    A frame gets its buffer only where its whole length has room. Where no other frame has room, one may
    exceed the limit.
    """
    received_rate_min: int = MIB
    """Bytes per second at which a frame has to arrive while other frames wait for room."""

    read_bytes_max: int = 4 * MIB
    """Bytes of blocks in one answer to a READ. The budget of a request may be lower, never higher."""
    reads_bytes_max: int = 64 * MIB
    """Bytes of answers that are being computed or wait for a slow reader, over all connections."""
    reads_max: int = 64
    """Reads that are being computed, over all connections. It bounds the work done between two adds."""
    connection_reads_max: int = 32
    connection_reads_bytes_max: int = 8 * MIB
    connection_polls_max: int = 4096
    """Long polls that wait on one connection. Above it the bookie answers TOO_MANY_REQUESTS."""
    polls_max: int = 131_072
    """The same over all connections: about 80 MB of memory."""
    connection_watches_max: int = 32_768
    """Ledgers that one connection watches. Above it the bookie answers TOO_MANY_REQUESTS."""
    watches_max: int = 131_072
    """The same over all connections: about 50 MB of memory."""

    list_rows_max: int = 16_384
    list_ledgers_max: int = 65_536

    handshake_timeout_s: float = 10.0
    frame_progress_timeout_s: float = 30.0
    """The connection is closed if a frame is not complete within this time of its first byte."""
    write_stall_timeout_s: float = 60.0
    """A peer that takes no byte of its answers for this long is disconnected."""
    contended_stall_timeout_s: float = 2.0
    """The same while other connections wait for room that the answers of this peer take up."""
    idle_buffer_s: float = 10.0
    """A silent connection loses its receive buffer after this time, at most twice this time."""
    shutdown_timeout_s: float = 5.0
    """The time that a clean shutdown waits for peers to take their last answers."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name} {getattr(self, name)!r} is not above zero")
        if self.frame_bytes_max > FRAME_BYTES_MAX:
            raise InvalidArgumentError(
                f"frame_bytes_max {self.frame_bytes_max:,} is above the protocol's {FRAME_BYTES_MAX:,}"
            )
        room = entry_room(self.frame_bytes_max)
        for name in ("entry_bytes_max", "read_bytes_max"):
            if getattr(self, name) > room:
                raise InvalidArgumentError(
                    f"{name} {getattr(self, name):,} does not fit frames of {self.frame_bytes_max:,} bytes"
                )


def share_descriptors(
    descriptors: int, *, connections_max: int = CONNECTIONS_MAX, files_max: int = FILES_MAX
) -> tuple[int, int]:
    """Return how many connections and how many open files a process with so many descriptors may have.

    Args:
        descriptors: how many the process may have in all.
        connections_max: how many connections are wanted; fewer where the descriptors do not suffice.
        files_max: how many files are wanted; a quarter of the descriptors at most.

    Connections above their limit are accepted and closed at once. So they never use up the descriptors, and
    neither the storage nor the metadata store finds none left.
    """
    files = min(files_max, descriptors // 4)
    connections = min(connections_max, descriptors - files - _OTHER_DESCRIPTORS)
    if connections <= 0:
        raise InvalidArgumentError(
            f"{descriptors} file descriptors are too few for a bookie: raise the limit (ulimit -n)"
        )
    return connections, files


@dataclass(frozen=True, slots=True)
class BookieConfig:
    """The configuration of one bookie.

    Segments are spread over `directories`. Every start needs all of them, in any order.

    `listen` is host and port; port 0 takes any free port. `advertise` are the addresses that clients read
    from the metadata store, as `host:port`, best first. In them port 0 stands for the port listened on. With
    None, the address listened on is advertised. `storage` None stands for the storage engine's defaults.
    """

    bookie_id: str
    directories: tuple[str, ...]
    listen: tuple[str, int] = ("127.0.0.1", 0)
    advertise: list[str] | None = None
    rack: str = ""
    weight: float = 1.0
    properties: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    storage: StorageConfig | None = None
    http: tuple[str, int] | None = None
    """Host and port of the HTTP endpoint; None for none. It is open to anybody who reaches it."""
    allow_remote_without_auth: bool = False
    sweep_interval_s: float = 60.0
    """The interval of the sweeps, which find deleted ledgers that no DELETE told of (rule 15)."""
    unnamed_grace_s: float = 3600.0
    """The time before entries of a closed ledger that does not name this bookie are evicted (rule 15).

    It has to be longer than the time from a repair's copies to the metadata update that names the bookie.
    """

    age_interval_s: float = 2.0
    """The least time between two raises of the bookie's age (`bookie_aio.server.age`).

    What was written after the last raise is not protected against copies from the past.
    """
    accept_older_copy: bool = False
    """Start on an older copy of a directory that the bookie ran on elsewhere. Its ledgers have lost data."""

    def __post_init__(self) -> None:
        check_bookie_id(self.bookie_id)
        if not self.directories or len(set(self.directories)) != len(self.directories):
            raise InvalidArgumentError(
                f"a bookie has one data directory or several different ones, not {self.directories!r}"
            )
        self._check_listening(self.listen, "read and write")
        if self.http is not None:
            self._check_listening(self.http, "read the figures of the cluster")
        host, _ = self.listen
        for address in self.advertise or ():
            try:
                split_address(address)
            except ValueError as error:
                raise InvalidArgumentError(f"cannot advertise: {error}") from error
        if not self.advertise and is_wildcard(host):
            raise InvalidArgumentError(
                f"listening on {host!r}, which no client can connect to: say what to advertise"
            )
        for name in ("sweep_interval_s", "unnamed_grace_s", "age_interval_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} {getattr(self, name)!r} is not above zero")
        if not self.weight >= 0:
            raise InvalidArgumentError(f"weight {self.weight!r} is below zero")

    def _check_listening(self, where: tuple[str, int], possible: str) -> None:
        host, port = where
        if not host or not 0 <= port <= 65_535:
            raise InvalidArgumentError(f"cannot listen on {where!r}: expected a host and a port")
        if not self.allow_remote_without_auth and not is_loopback(host):
            raise InvalidArgumentError(
                f"listening on {host!r} lets anybody who reaches this machine {possible} without "
                "authentication; say so with allow_remote_without_auth (--allow-remote-without-auth), or "
                "listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Return whether a host to listen on is reachable from this machine only.

    Of names, only "localhost" counts as that.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether a host to listen on stands for all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
