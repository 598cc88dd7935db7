"""Unbounded ledgers by the blocking adapter: written, taken over, trimmed, followed and sealed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import client_aio
import client_aio.sync
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """Bookies on a thread of their own: what is tested blocks."""
    with Bookies(tmp_path, bookies=1) as bookies:
        yield bookies.uri


def test_a_ledger_is_taken_over_and_goes_on_under_a_higher_term(uri: str) -> None:
    with client_aio.sync.connect(uri) as client:
        first = client.open_unbounded_ledger("payments", **SMALL)
        assert [first.add_entry(b"%d" % number) for number in range(3)] == [0, 1, 2]
        with client.open_unbounded_ledger("payments") as second:
            assert second.term > first.term
            with pytest.raises(client_aio.LedgerFencedError):
                first.add_entry(b"late")
            first.abort()
            assert second.add_entry_nowait(b"3").result(30) == 3
            assert second.add_entries([b"4", b"5"]) == (4, 5)
        assert client.list_unbounded_ledgers() == [("payments", second.ledger_id)]
        found = [entry.data for entry in client.read_unbounded_ledger("payments", follow=False)]
        assert found == [b"%d" % number for number in range(6)]
        with client.open_ledger("payments") as reader:
            assert reader.last_add_confirmed == 5


def test_trimming_drops_whole_fragments_behind_what_was_put_in_before(uri: str) -> None:
    with client_aio.sync.connect(uri) as client:
        ledger_id = client.create_unbounded_ledger("trimmed", **SMALL)
        with client.open_unbounded_ledger(ledger_id, create=False) as ledger:
            for number in range(10):
                ledger.add_entry_nowait(b"%d" % number)
            assert ledger.roll() == 10, "the new fragment begins behind what was put in before"
            ledger.add_entry(b"10")
            assert ledger.trim(11) == ledger.first_entry == 10
        assert [one.entry_id for one in client.read_unbounded_ledger("trimmed", None, follow=False)] == [10]
        with pytest.raises(client_aio.NoSuchEntryError):
            next(client.read_unbounded_ledger("trimmed", 0, follow=False))


def test_a_follower_ends_when_the_ledger_is_sealed(uri: str) -> None:
    with client_aio.sync.connect(uri) as client:
        ledger = client.open_unbounded_ledger("sealed", **SMALL)
        followed: list[bytes] = []
        has_one = threading.Event()

        def follow() -> None:
            for entry in client.read_unbounded_ledger("sealed"):
                followed.append(entry.data)
                has_one.set()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        ledger.add_entry(b"first")
        assert has_one.wait(30)
        ledger.add_entry_nowait(b"last")
        assert ledger.close(seal=True).is_closed
        follower.join(30)
        assert not follower.is_alive()
        assert followed == [b"first", b"last"]
        with pytest.raises(client_aio.LedgerClosedError):
            client.open_unbounded_ledger("sealed")
