"""Opens the metadata store that a URI names: the one module that knows all kinds of stores.

zk://HOST:PORT,HOST:PORT/ROOT    a ZooKeeper ensemble; the port may be left out (2181)
sqlite:///ABSOLUTE/PATH          a file shared by processes of one machine
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from metadata.errors import InvalidArgumentError, NoSuchKeyError, no_cluster
from metadata.ids import KEY_CLUSTER
from metadata.keys import check_key

if TYPE_CHECKING:
    from metadata.store import MetadataStore

ZOOKEEPER_PORT = 2181
SESSION_TIMEOUT_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class SqliteLocation:
    """The parts of an `sqlite:` URI."""

    path: Path


@dataclass(frozen=True, slots=True)
class ZooKeeperLocation:
    """The parts of a `zk:` URI. `root` is a key, empty for the root of the tree."""

    servers: tuple[tuple[str, int], ...]
    root: str


async def open_store(
    uri: str,
    *,
    create: bool = False,
    needs_cluster: bool = True,
    operation_timeout_s: float = 10.0,
    session_timeout_s: float | None = None,
) -> MetadataStore:
    """Open the metadata store that the URI names; it is an async context manager.

    Opening is not creating: a mistyped URI would else be a cluster without ledgers.

    Args:
        uri: see this module's docstring.
        create: make the store where it is missing, for a caller that then makes a cluster in it.
        needs_cluster: without `create`: refuse a store that is there, and holds no cluster.
        operation_timeout_s: how long one operation, and opening the store, is retried before it raises.
        session_timeout_s: how long registrations outlive their process; by default 2 s for SQLite and 6 s for
            ZooKeeper, whose servers may raise it to their own minimum.

    Raises:
        InvalidArgumentError: the URI or an argument is wrong; the message says what is expected.
        NoSuchClusterError: without `create`: there is no store, or it holds no cluster and has to. Nothing
            was made.
        MetadataCorruptError: the file or node is no metadata store, or is damaged.
        MetadataUnavailableError: no server answers in time, or the file cannot be used.
    """
    location = parse_uri(uri)
    _check_seconds("operation_timeout_s", operation_timeout_s)
    if session_timeout_s is not None:
        _check_seconds("session_timeout_s", session_timeout_s)
    store = await _open(location, create, operation_timeout_s, session_timeout_s)
    if needs_cluster and not create:
        try:
            await check_cluster(store)
        except BaseException:
            await store.close()
            raise
    return store


async def check_cluster(store: MetadataStore) -> None:
    """Raise NoSuchClusterError where the store holds no cluster; a lagging server's no is checked again."""
    try:
        await store.read(KEY_CLUSTER)
    except NoSuchKeyError:
        await store.sync(KEY_CLUSTER)
    else:
        return
    try:
        await store.read(KEY_CLUSTER)
    except NoSuchKeyError:
        raise no_cluster(store.uri, "the store holds none") from None


async def _open(
    location: SqliteLocation | ZooKeeperLocation,
    create: bool,
    operation_timeout_s: float,
    session_timeout_s: float | None,
) -> MetadataStore:
    # Imported here, so that the libraries of the other kind are not loaded.
    if isinstance(location, SqliteLocation):
        from metadata.backends.sqlite.store import LEASE_S, SqliteMetadataStore

        return await SqliteMetadataStore.open(
            location.path,
            create=create,
            lease_s=LEASE_S if session_timeout_s is None else session_timeout_s,
            operation_timeout_s=operation_timeout_s,
        )
    from metadata.backends.zookeeper.store import SESSION_TIMEOUT_S, ZooKeeperMetadataStore

    return await ZooKeeperMetadataStore.open(
        location.servers,
        location.root,
        create=create,
        session_timeout_s=SESSION_TIMEOUT_S if session_timeout_s is None else session_timeout_s,
        operation_timeout_s=operation_timeout_s,
    )


def parse_uri(uri: str) -> SqliteLocation | ZooKeeperLocation:
    """Parse a metadata URI, touching neither files nor network; raises InvalidArgumentError."""
    if not isinstance(uri, str):
        raise InvalidArgumentError(f"a metadata URI is a string, not {uri!r}")
    scheme, separator, rest = uri.partition("://")
    if separator and scheme == "sqlite":
        return _parse_sqlite(uri, rest)
    if separator and scheme == "zk":
        return _parse_zookeeper(uri, rest)
    raise _wrong(uri, "its scheme is unknown")


def _parse_sqlite(uri: str, rest: str) -> SqliteLocation:
    if "?" in rest or "#" in rest:
        raise _wrong(uri, "it takes no query and no fragment")
    try:
        path = os.fsdecode(unquote_to_bytes(os.fsencode(rest)))
    except UnicodeEncodeError:
        raise _wrong(uri, "the locale's encoding cannot write its path") from None
    if not path.startswith("/") or "\x00" in path:
        raise _wrong(uri, "its path is not absolute (three slashes: sqlite:///absolute/path)")
    if path.endswith("/"):
        raise _wrong(uri, "its path names a directory, not a file")
    # Four slashes are the form of other libraries. POSIX leaves the meaning of a path with two to the system.
    return SqliteLocation(Path("/" + path.lstrip("/")))


def _parse_zookeeper(uri: str, rest: str) -> ZooKeeperLocation:
    servers_text, _, root = rest.partition("/")
    root = root.rstrip("/")
    try:
        check_key(root, root_allowed=True)
    except InvalidArgumentError as error:
        raise _wrong(uri, str(error)) from error
    servers = []
    for text in servers_text.split(","):
        if not text:
            raise _wrong(uri, "its list of hosts is empty or has an empty host")
        servers.append(_parse_server(uri, text))
    return ZooKeeperLocation(tuple(servers), root)


def _parse_server(uri: str, text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, port_text = text[1:].partition("]")
        if not bracket or (port_text and not port_text.startswith(":")):
            raise _wrong(uri, f"{text!r} is not [address]:port")
        port_text = port_text[1:] if port_text else str(ZOOKEEPER_PORT)
    else:
        host, colon, port_text = text.partition(":")
        if not colon:
            port_text = str(ZOOKEEPER_PORT)
    if not host or any(character.isspace() or character == "@" for character in host):
        raise _wrong(uri, f"{text!r} has no legal host")
    if not port_text.isascii() or not port_text.isdecimal() or not 1 <= int(port_text[:6]) <= 65535:
        raise _wrong(uri, f"{port_text!r} is not a port from 1 to 65535")
    return host, int(port_text)


def _check_seconds(name: str, value: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= SESSION_TIMEOUT_MAX_S
    ):
        raise InvalidArgumentError(
            f"{name} {value!r} is not between 0 and {SESSION_TIMEOUT_MAX_S:.0f} seconds"
        )


def _wrong(uri: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"metadata URI {uri!r}: {why}; use zk://host:2181,host:2181/root or sqlite:///absolute/path"
    )
