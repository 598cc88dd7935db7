"""Metadata URIs, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from metadata.access.bookies import ensure_cluster, find_cluster
from metadata.backends.uri import SqliteLocation, ZooKeeperLocation, open_store, parse_uri
from metadata.errors import InvalidArgumentError, NoSuchClusterError
from tests.metadata.conftest import new_root

if TYPE_CHECKING:
    from tests.support.zookeeper import ZooKeeperServer


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("sqlite:///var/lib/m.db", SqliteLocation(Path("/var/lib/m.db"))),
        ("sqlite:////var/lib/m.db", SqliteLocation(Path("/var/lib/m.db"))),
        ("sqlite:///with%20space.db", SqliteLocation(Path("/with space.db"))),
        ("zk://h1:2182,h2/root/sub", ZooKeeperLocation((("h1", 2182), ("h2", 2181)), "root/sub")),
        ("zk://[::1]:2182,[fe80::1]", ZooKeeperLocation((("::1", 2182), ("fe80::1", 2181)), "")),
        ("zk://127.0.0.1:2181/", ZooKeeperLocation((("127.0.0.1", 2181),), "")),
    ],
)
def test_a_uri_says_where_the_store_is(uri: str, location: object) -> None:
    assert parse_uri(uri) == location


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("", "scheme"),
        ("/var/lib/m.db", "scheme"),
        ("postgres://h/db", "scheme"),
        ("zk:/h1:2181", "scheme"),
        ("sqlite://relative.db", "absolute"),
        ("sqlite://", "absolute"),
        ("sqlite:///dir/", "directory"),
        ("sqlite:///m.db?mode=ro", "query"),
        ("zk://", "empty"),
        ("zk:///root", "empty"),
        ("zk://h1:2181,/root", "empty"),
        ("zk://h1:port/root", "port"),
        ("zk://h1:0/root", "port"),
        ("zk://h1:65536", "port"),
        ("zk://h1:99999999999999999999", "port"),
        ("zk://:2181/root", "host"),
        ("zk://user@h1:2181/root", "host"),
        ("zk://[::1/root", "address"),
        ("zk://h1:2181//root", "segment"),
        ("zk://h1:2181/zookeeper", "own"),
    ],
)
async def test_a_wrong_uri_is_refused_with_the_reason(uri: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        await open_store(uri)


@pytest.mark.parametrize("seconds", [0, -1, True, float("nan"), "1"])
async def test_a_wrong_timeout_is_refused(tmp_path: Path, seconds: float) -> None:
    for name in ("operation_timeout_s", "session_timeout_s"):
        with pytest.raises(InvalidArgumentError, match=name):
            await open_store(f"sqlite://{tmp_path}/m.db", **{name: seconds})


async def test_the_uri_of_an_open_store_opens_it_again(tmp_path: Path) -> None:
    async with await open_store(f"sqlite://{tmp_path}/m.db", create=True) as store:
        await store.create("a", b"1")
    async with await open_store(store.uri, create=True) as again:
        assert (await again.read("a")).value == b"1"


async def test_opening_makes_nothing(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    with pytest.raises(NoSuchClusterError, match=r"m\.db: there is no such file"):
        await open_store(uri)
    (tmp_path / "m.db").touch()
    with pytest.raises(NoSuchClusterError, match="empty"):
        await open_store(uri)
    assert (tmp_path / "m.db").stat().st_size == 0
    async with await open_store(uri, create=True):
        pass
    with pytest.raises(NoSuchClusterError, match="holds none"):
        await open_store(uri)
    async with await open_store(uri, create=True) as store:
        await ensure_cluster(store, draw_id=lambda: "a", now_ms=1)
    async with await open_store(uri) as store:
        assert (await find_cluster(store)).instance_id == "a"


async def test_opening_makes_no_node(zookeeper: ZooKeeperServer) -> None:
    root = new_root()
    uri = f"zk://{zookeeper.address}/{root}"
    with pytest.raises(NoSuchClusterError, match=root):
        await open_store(uri)
    async with await open_store(f"zk://{zookeeper.address}/", create=True) as above:
        assert root not in [f"tests/{name}" for name in await above.children("tests")]
    async with await open_store(uri, create=True):
        pass
    with pytest.raises(NoSuchClusterError, match="holds none"):
        await open_store(uri)


async def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        await open_store(f"sqlite://{tmp_path}/missing/m.db", create=True)


async def test_a_path_that_is_not_utf_8_is_quoted_bytes(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"latin-\xe9 100%\n#?")
    directory.mkdir()
    async with await open_store(f"sqlite://{quote(os.fsencode(directory))}/m.db", create=True) as store:
        await store.create("a", b"1")
    async with await open_store(store.uri, create=True) as again:
        assert (await again.read("a")).value == b"1"
    assert (directory / "m.db").exists()
