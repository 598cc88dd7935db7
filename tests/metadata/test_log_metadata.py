"""A log's metadata: positions, the legal changes of the list, its stored form, and the list in a store."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metadata.access.logs import LogStore, log_names, names_ever
from metadata.errors import InvalidArgumentError, MetadataCorruptError, NoSuchLogError
from metadata.model.log import TRANSACTIONS_MAX, LogHead, LogRow, Position, Transaction, check_log_name

if TYPE_CHECKING:
    from metadata.store import MetadataStore
    from tests.metadata.conftest import Backend


def rows(*ids: int) -> list[LogRow]:
    return [LogRow(each, each, each * 1000) for each in ids]


def test_positions_order_and_have_a_text_form() -> None:
    positions = [Position(7, 2), Position(7, 10), Position(11, 0)]
    assert sorted(positions, reverse=True)[::-1] == positions
    assert [str(each) for each in positions] == ["7:2", "7:10", "11:0"]
    assert [Position.parse(str(each)) for each in positions] == positions
    for wrong in ("", "7", "7:", ":2", "7:-1", "a:b", "7:2:3", "9223372036854775808:0", " 7:2"):
        with pytest.raises(InvalidArgumentError):
            Position.parse(wrong)
    for pair in ((-1, 0), (0, -1), (0, 2**62), (True, 0), (1,), "7:2"):
        with pytest.raises(InvalidArgumentError):
            Position.check(pair)


def test_names_are_those_of_nodes() -> None:
    for name in ("a", "_x", "orders.eu-west@v2:1+b", "9" * 200):
        assert check_log_name(name) == name
    for name in ("", ".", "..", "-a", "a/b", "a b", "ä", "9" * 201):
        with pytest.raises(InvalidArgumentError):
            check_log_name(name)


def test_an_id_lies_above_all_that_were_ever_listed() -> None:
    head = LogHead("a").append(rows(3, 9))
    assert head.id_min == 10
    assert head.drop_all().id_min == 10
    with pytest.raises(AssertionError):
        head.append(rows(9))


def test_the_times_of_rows_never_go_back_whatever_the_clocks_of_those_who_list_them() -> None:
    head = LogHead("orders").append([LogRow(1, 1, 5000)])
    head = head.append([LogRow(2, 2, 3000), LogRow(3, 3, 6000), LogRow(4, 4, 5500)])
    assert [row.created_ms for row in head.newest] == [5000, 5000, 6000, 6000]


def test_a_truncation_drops_what_lies_before_and_remembers_it_until_it_is_gone() -> None:
    head = LogHead("a").append(rows(3, 9, 12))
    cut = head.truncate(Position(9, 5), ())
    assert [row.id for row in cut.newest] == [9, 12]
    assert (cut.begins_at, cut.dropped.rows) == (Position(9, 5), (rows(3)[0],))
    assert cut.finish_dropping(head.dropped) is None
    done = cut.finish_dropping(cut.dropped)
    assert done is not None
    assert not done.has_dropped
    last = done.truncate(Position(12, 100), ())
    assert [row.id for row in last.newest] == [12]  # never the last one
    assert last.begins_at == Position(12, 100)
    finished = last.finish_dropping(last.dropped)
    assert finished is not None
    assert finished.truncate(Position(3, 0), ()).begins_at == Position(12, 100)  # never backwards


def long_log() -> tuple[LogHead, dict[str, tuple[Any, ...]]]:
    pages: dict[str, tuple[Any, ...]] = {}
    names, head = count(), LogHead("a")
    for start in range(0, 4000, 500):
        head = head.append(rows(*range(start, start + 500, 2)))
        spilled, made = head.rows.spill(lambda: f"t{next(names)}")
        head = LogHead.from_json(head.with_rows(spilled).to_json())
        pages |= {page.name: page.rows for page in made}
    return head, pages


LONG, PAGES = long_log()


@settings(deadline=None)
@given(st.lists(st.integers(0, 4000), min_size=1, max_size=6))
def test_every_row_is_listed_or_dropped_once(cuts: list[int]) -> None:
    head = LONG

    def read(ref: Any) -> tuple[Any, ...]:
        return PAGES[ref.name][-ref.rows :]

    gone: list[int] = []
    for cut in cuts:
        ref = head.rows.page_cut_at(head.first_id_kept(Position(cut, 0)))
        head = head.truncate(Position(cut, 0), () if ref is None else read(ref))
        dropped = [row[0] for page in head.dropped.pages for row in read(page)]
        dropped += [row[0] for row in head.dropped.rows]
        gone += dropped
        listed = [row[0] for page in head.rows.pages for row in read(page)] + [row.id for row in head.newest]
        assert gone + listed == list(range(0, 4000, 2))
        assert all(each < cut for each in dropped)
        assert listed[-1] == 3998
        head = LogHead.from_json(head.to_json())
        if head.has_dropped:
            finished = head.finish_dropping(head.dropped)
            assert finished is not None
            head = finished


def test_the_last_batch_of_each_query_is_kept_and_of_the_quietest_forgotten() -> None:
    head = LogHead("a")
    for number in range(TRANSACTIONS_MAX):
        head = head.record(Transaction(f"q{number}", number))
    head = head.record(Transaction("q0", 1000, "rows")).record(Transaction("new", 1))
    assert head.last_transaction("q0") == Transaction("q0", 1000, "rows")
    assert head.last_transaction("q1") is None
    assert head.last_transaction("q2") == Transaction("q2", 2)
    assert len(head.transactions) == TRANSACTIONS_MAX


def test_custom_metadata_stay_small_however_they_are_put_together() -> None:
    head = LogHead("a", 5)
    for name in "abc":
        head = head.with_custom({name: bytes(20_000)})
    with pytest.raises(InvalidArgumentError, match="64 KiB"):
        head.with_custom({"d": bytes(20_000)})
    assert set(head.with_custom({"a": b""}).custom) == set("abc")


def test_the_stored_form_says_everything_and_damage_is_told() -> None:
    head = LogHead("a", 5).append(rows(3, 9, 12)).truncate(Position(9, 5), ())
    head = head.with_custom({"k": b"\xff"}).record(Transaction("q", 7, "rows"))
    assert LogHead.from_json(head.to_json()) == head
    assert LogHead.from_json(head.delete().to_json()).is_deleted if not head.has_dropped else True
    for change in (
        {"format": 1}, {"log": "a/b"}, {"rows": [[1, 2]]}, {"rows": [[-1, 2, 3]]}, {"begins_at": [0]},
        {"custom": {"k": "*"}}, {"transactions": [["q"]]}, {"dropped": {}}, {"created_ms": None},
        {"created_ms": float("inf")}, {"transactions": [["q", float("nan"), ""]]},
        {"transactions": [["q", 7]]},
    ):  # fmt: skip
        document = {**json.loads(head.to_json()), **change}
        with pytest.raises(MetadataCorruptError):
            LogHead.from_json(json.dumps(document).encode())
    for text in (b"", b"[]", b"{}", b"\xff"):
        with pytest.raises(MetadataCorruptError):
            LogHead.from_json(text)


_tokens = count()


def a_list(store: MetadataStore, name: str = "a") -> LogStore:
    return LogStore(store, name, draw_token=lambda: f"l{next(_tokens)}")


async def test_a_long_list_is_found_in_by_id_and_read_whole(backend: Backend) -> None:
    store = await backend.open()
    lists = a_list(store)
    with pytest.raises(NoSuchLogError):
        await lists.read()
    await lists.create(custom={"k": b"v"}, created_ms=1)
    await lists.create(custom={}, created_ms=2)  # there is one
    head, version = await lists.read()
    for start in range(0, 3000, 300):
        more = rows(*range(start, start + 300, 3))
        changed = await lists.change_now(head, version, lambda found, more=more: found.append(more))
        head, version = changed.head, changed.version
    assert len(head.rows.pages) > 1
    assert [row.id for row in await lists.rows(head)] == list(range(0, 3000, 3))
    for row_id in (*range(0, 3000, 97), 2996, 2997):
        found = [row.id for row in await lists.rows_around(head, row_id)]
        assert (row_id + 2) // 3 * 3 in found
        assert len(found) < 800
    assert (await lists.rows_around(head, 5000))[-1].id == 2997
    assert (await lists.rows_at_page(head, 10**6))[-1].id == 2997
    assert await log_names(store, sync=True) == ["a"]
    assert await names_ever(store) == {"a"}

    cut = await lists.cut_at(head, 500)
    changed = await lists.change_now(head, version, lambda found: found.truncate(Position(500, 0), cut))
    assert [row.id for row in await lists.dropped_rows(changed.head)] == list(range(0, 500, 3))
    assert await lists.sweep_pages() == []  # those that name dropped ledgers stay
    finished = await lists.finish_dropping(changed.head, changed.version)
    assert not finished.head.has_dropped
    assert len(await store.children("log-pages/a")) == len(finished.head.rows.pages)
    again = await lists.finish_dropping(changed.head, changed.version)  # somebody else, later
    assert not again.is_done

    gone = await lists.change_now(again.head, again.version, lambda found: found.delete())
    with pytest.raises(NoSuchLogError):
        await lists.read()
    with pytest.raises(NoSuchLogError):
        await lists.change_now(gone.head, gone.version, lambda found: found)
    await lists.delete((await lists.finish_dropping(gone.head, gone.version)).version)
    assert await store.children("log-pages/a") == []
    assert await log_names(store, sync=True) == []
