"""An import adds the entries of an export as they come from Spark: in order, and none left out."""

from __future__ import annotations

from typing import Any, cast

import pytest

from client_aio.spark.archive import _Import
from metadata.errors import BookKeeperError


class Writer:
    """A new ledger, which notes what is added to it."""

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.batches: list[list[bytes]] = []
        self.is_closed = False

    def add_batch_nowait(self, entries: list[bytes]) -> None:
        assert not self.is_closed
        self.batches.append(entries)

    def close(self) -> None:
        self.is_closed = True


class Client:
    """Makes ledgers 100, 101, …"""

    def __init__(self) -> None:
        self.made: list[Writer] = []

    def create_ledger(self, **_: object) -> Writer:
        self.made.append(Writer(100 + len(self.made)))
        return self.made[-1]


def importing() -> tuple[Client, _Import]:
    client, settings = Client(), cast("dict[int, dict[str, Any]]", {7: {}, 8: {}})
    return client, _Import(cast("Any", client), settings)


def test_entries_that_come_together_are_one_batch() -> None:
    client, task = importing()
    task.take(7, [0, 1, 2], [b"a", b"b", b"c"])
    task.take(7, [3], [b"d"])
    task.take(8, [0], [b"e"])
    task.finish()
    assert [each.batches for each in client.made] == [[[b"a", b"b", b"c"], [b"d"]], [[b"e"]]]
    assert all(each.is_closed for each in client.made)
    assert task.made == {7: 100, 8: 101}


@pytest.mark.parametrize(("entry_ids", "missing"), [([1, 2], 0), ([0, 2], 1), ([0, 0], 1), ([0, 1, 1], 2)])
def test_an_entry_that_is_missing_or_comes_twice_ends_the_import(entry_ids: list[int], missing: int) -> None:
    client, task = importing()
    with pytest.raises(BookKeeperError, match=f"entry {missing} of exported ledger 7 is missing"):
        task.take(7, entry_ids, [b"x"] * len(entry_ids))
    assert client.made[0].batches == []
