"""Lists with a head and pages: what the head says, without a store."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.model.paged_list import (
    HEAD_ROWS_BYTES_MAX,
    PAGE_ROWS_BYTES_MAX,
    ROWS_KEPT,
    PagedRows,
    PageRef,
    Row,
    rows_of_page,
)


class World:
    """A head with its pages, kept in their stored form."""

    def __init__(self) -> None:
        self.head = PagedRows()
        self.pages: dict[str, bytes] = {}
        self._numbers = count()

    def append(self, rows: list[Row], *, in_place_of: int = 0) -> None:
        head, made = self.head.append(rows, in_place_of=in_place_of).spill(lambda: f"t{next(self._numbers)}")
        for page in made:
            assert page.name not in self.pages
            self.pages[page.name] = page.to_json()
        # What is stored is what counts.
        self.head = PagedRows.from_document(json.loads(json.dumps(head.to_document())))

    def drop_before(self, key: int) -> None:
        cut = self.head.page_cut_at(key)
        self.head = self.head.drop_before(key, self.read(cut) if cut is not None else ())

    def rewrite(self, ref: PageRef, rows: list[Row]) -> None:
        self.head, page = self.head.rewrite(ref, rows, lambda: f"t{next(self._numbers)}")
        assert page.name not in self.pages
        self.pages[page.name] = page.to_json()

    def read(self, ref: PageRef) -> tuple[Row, ...]:
        return rows_of_page(ref, self.pages[ref.name])

    def all(self) -> list[Row]:
        return [row for ref in self.head.pages for row in self.read(ref)] + list(self.head.rows)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 400), st.integers(1, 5)),
        st.tuples(st.just("replace"), st.integers(0, ROWS_KEPT), st.integers(1, 5)),
        st.tuples(st.just("drop"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("rewrite"), st.integers(0, 20), st.integers(0, 400)),
    ),
    max_size=16,
)


@settings(deadline=None)
@given(actions)
def test_a_paged_list_is_a_list(script: list[tuple[str, int, int]]) -> None:
    world, model, following = World(), list[Row](), 0
    for what, number, step in script:
        if what == "drop":
            key = following * number // 1000
            model = [row for row in model if row[0] >= key]
            world.drop_before(key)
        elif what == "rewrite":
            if not world.head.pages:
                continue
            ref = world.head.pages[number % len(world.head.pages)]
            rows = list(world.read(ref))
            old = rows[step % len(rows)]
            rows[step % len(rows)] = new = (old[0], "y" * step)
            model[model.index(old)] = new
            world.rewrite(ref, rows)
        else:
            replaced = min(number, len(model)) if what == "replace" else 0
            rows = [
                (following + index * step, "x" * 60) for index in range(1 if what == "replace" else number)
            ]
            following += len(rows) * step
            model = model[: len(model) - replaced] + rows
            world.append(rows, in_place_of=replaced)
        head = world.head
        assert world.all() == model
        assert len(head) == len(model)
        assert (head.first_key, head.last_key) == ((model[0][0], model[-1][0]) if model else (None, None))
        assert len(json.dumps(head.rows)) <= HEAD_ROWS_BYTES_MAX
        for row in model[:: max(1, len(model) // 20)]:
            ref = head.page_of(row[0])
            assert row in (head.rows if ref is None else world.read(ref))


def test_the_head_of_many_rows_stays_small_and_so_does_each_page() -> None:
    world = World()
    for start in range(0, 20_000, 20):
        world.append([(number, number, 1_790_000_000_000) for number in range(start, start + 20)])
    assert len(json.dumps(world.head.to_document())) <= 20 * 1024
    assert max(map(len, world.pages.values())) <= PAGE_ROWS_BYTES_MAX + 100
    assert len(world.head) == 20_000


def test_large_rows_stay_in_the_head_where_they_are_the_last() -> None:
    world = World()
    for number in range(10):
        world.append([(number, "x" * 20_000)])
    assert len(world.head.rows) == ROWS_KEPT
    assert len(world.pages) == 10 - ROWS_KEPT


def test_a_page_in_the_place_of_another_is_found_where_that_one_was() -> None:
    world = World()
    world.append([(number, "x" * 2000) for number in range(40)])
    world.drop_before(5)
    first, second, *rest = world.head.pages
    assert first.rows < len(json.loads(world.pages[first.name])["rows"])  # it is shortened
    before = dict(world.pages)
    for ref in (first, second):
        world.rewrite(ref, [(key, "y") for key, _ in world.read(ref)])
    assert {name: world.pages[name] for name in before} == before  # written once
    assert [ref.name for ref in world.head.pages[2:]] == [ref.name for ref in rest]
    assert not {ref.name for ref in world.head.pages[:2]} & before.keys()
    assert [row[0] for row in world.all()] == list(range(5, 40))
    assert world.head.page_of(second.first) == world.head.pages[1]
    assert world.head.following(world.head.pages[0]) == second.first
    with pytest.raises(AssertionError):
        world.rewrite(world.head.pages[0], [(key + 1, "y") for key, _ in world.read(world.head.pages[0])])


@pytest.mark.parametrize("rows", [[(3,), (3,)], [(3,), (2,)]])
def test_keys_must_increase(rows: list[Row]) -> None:
    with pytest.raises(InvalidArgumentError, match="do not increase"):
        PagedRows().append(rows)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"pages": [], "rows": [[]]},
        {"pages": [], "rows": [["a"]]},
        {"pages": [], "rows": [[True]]},
        {"pages": [], "rows": [[2], [1]]},
        {"pages": [["p", 0]], "rows": [[5]]},
        {"pages": [["p", 0, 0]], "rows": [[5]]},
        {"pages": [["p", 0, 1]], "rows": []},
        {"pages": [["p", 7, 1]], "rows": [[5]]},
        {"pages": 5, "rows": 5},
    ],
)
def test_a_damaged_head_is_told(document: dict[str, Any]) -> None:
    with pytest.raises(MetadataCorruptError):
        PagedRows.from_document(document)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"format": 2, "rows": [[1]]}',
        b'{"format": 1, "rows": [[2]]}',
        b'{"format": 1, "rows": []}',
    ],
)
def test_a_damaged_page_is_told(text: bytes) -> None:
    with pytest.raises(MetadataCorruptError, match="page p of a list"):
        rows_of_page(PageRef("p", 1, 1), text)
