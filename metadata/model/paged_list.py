"""A list that may grow long: its newest rows in a head, the older ones in pages behind it.

The pure half; `metadata.access.paged_list` stores it. A log keeps its ledgers in such a list, an unbounded
ledger its
fragments. A row is a JSON array whose first element is its *key*, an integer; keys strictly increase.

    head: what its user keeps there · references to pages, oldest first · the newest rows
    page: {"format": 1, "rows": [[5, …], [9, …], …]}

Invariants:

- A page is written once, under a name that nobody else uses, and counts only if the head refers to it. So
  the head alone says what the list is, and each change of the list is one compare-and-set of the head.
- A page that a change refers to is made after the head was read that the change is made from. So a sweeper
  that lists pages, then changes the head's version, then finds some of the listed ones unreferred to, may
  delete those: whoever made them can only fail its compare-and-set.
- Rows leave at the front only: a reference is dropped, or shortened to the rows from some key on. The page
  itself is deleted after the head has ceased to refer to it.
- Rows of a page change only by another page, with as many rows under the same keys, that the head refers to
  in its place (`rewrite`).
- Appending needs the head alone, and so does changing one of the last `ROWS_KEPT` rows.
- The head's rows take at most `HEAD_ROWS_BYTES_MAX`; a reference takes some 45 bytes, and is to a page of
  up to `PAGE_ROWS_BYTES_MAX` when its rows leave the head. So the head of 20,000 rows of 40 bytes stays
  below 20 KiB, and one of a million below half of what a value may hold.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.model.json_fields import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HEAD_ROWS_BYTES_MAX = 12 * 1024
PAGE_ROWS_BYTES_MAX = 8 * 1024
ROWS_KEPT = 4
"""How many of the newest rows always stay in the head."""

PAGE_FORMAT_VERSION = 1

Row = tuple[Any, ...]
"""A JSON array; its first element is its key."""


class PageRef(NamedTuple):
    """A head's reference to a page: the rows of it that count are the last `rows`, from key `first` on."""

    name: str
    first: int
    rows: int


class Page(NamedTuple):
    """A page about to be written."""

    name: str
    rows: tuple[Row, ...]

    @property
    def ref(self) -> PageRef:
        """Return the reference to all of it."""
        return PageRef(self.name, int(self.rows[0][0]), len(self.rows))

    def to_json(self) -> bytes:
        """Return the stored form."""
        return json.dumps({"format": PAGE_FORMAT_VERSION, "rows": self.rows}).encode()


@dataclass(frozen=True, slots=True)
class PagedRows:
    """What a head says of its list. Frozen: a change gives another one."""

    pages: tuple[PageRef, ...] = ()
    rows: tuple[Row, ...] = ()

    def __len__(self) -> int:
        return sum(page.rows for page in self.pages) + len(self.rows)

    @property
    def first_key(self) -> int | None:
        """Return the key of the oldest row, None for an empty list."""
        if self.pages:
            return self.pages[0].first
        return int(self.rows[0][0]) if self.rows else None

    @property
    def last_key(self) -> int | None:
        """Return the key of the newest row, None for an empty list."""
        return int(self.rows[-1][0]) if self.rows else None

    def append(self, rows: Iterable[Sequence[Any]], *, in_place_of: int = 0) -> PagedRows:
        """Add rows at the end, in the place of the last few, which must be in the head (`ROWS_KEPT`).

        Raises:
            InvalidArgumentError: the keys do not increase.
        """
        kept = self.rows[: len(self.rows) - in_place_of]
        assert in_place_of <= len(self.rows)
        changed = replace(self, rows=(*kept, *(tuple(row) for row in rows)))
        changed._check(InvalidArgumentError)
        return changed

    def page_of(self, key: int) -> PageRef | None:
        """Return the page that holds the last row whose key is at most `key`; None where the head does.

        Also None where there is no such row.
        """
        if self.rows and key >= self.rows[0][0]:
            return None
        index = bisect_right(self.pages, key, key=lambda page: page.first) - 1
        return self.pages[index] if index >= 0 else None

    def page_cut_at(self, key: int) -> PageRef | None:
        """Return the page that `drop_before(key)` cuts in two, which must be read first."""
        page = self.page_of(key - 1)
        if page is None or page.first >= key:
            return None
        following = self.following(page)
        return None if following <= key else page

    def following(self, page: PageRef) -> int:
        """Return the first key behind a page: behind the last one is the head's first row."""
        index = self.pages.index(page) + 1
        return self.pages[index].first if index < len(self.pages) else int(self.rows[0][0])

    def drop_before(self, key: int, page_rows: Sequence[Row] = ()) -> PagedRows:
        """Drop the rows whose key is below `key`.

        Args:
            page_rows: the rows that count of the page that `page_cut_at(key)` names, if it names one.
        """
        if self.rows and self.rows[0][0] < key:
            start = bisect_left(self.rows, key, key=lambda row: int(row[0]))
            return PagedRows((), self.rows[start:])
        cut = self.page_cut_at(key)
        pages = []
        for page in self.pages:
            if page.first >= key:
                pages.append(page)
            elif page == cut:
                left = [row for row in page_rows if row[0] >= key]
                assert len(page_rows) == page.rows, "the page to be cut must have been read"
                if left:
                    pages.append(PageRef(page.name, int(left[0][0]), len(left)))
        return PagedRows(tuple(pages), self.rows)

    def spill(self, draw_token: Callable[[], str]) -> tuple[PagedRows, list[Page]]:
        """Move the oldest of the head's rows to pages, if they take too much room.

        Returns:
            What the head says then, and the pages to write before the head.
        """
        made: list[Page] = []
        rows = self.rows
        if len(json.dumps(rows)) <= HEAD_ROWS_BYTES_MAX:
            return self, made
        sizes = [len(json.dumps(row)) + 2 for row in rows]
        left, start = sum(sizes), 0
        while left > HEAD_ROWS_BYTES_MAX and len(rows) - start > ROWS_KEPT:
            stop, taken = start, 0
            while stop < len(rows) - ROWS_KEPT and (not taken or taken + sizes[stop] <= PAGE_ROWS_BYTES_MAX):
                taken += sizes[stop]
                stop += 1
            made.append(_page_of(rows[start:stop], draw_token))
            start, left = stop, left - taken
        return PagedRows((*self.pages, *(page.ref for page in made)), rows[start:]), made

    def rewrite(
        self, ref: PageRef, rows: Sequence[Row], draw_token: Callable[[], str]
    ) -> tuple[PagedRows, Page]:
        """Change rows of a page, by another page in its place.

        Args:
            ref: one of `pages`.
            rows: what is to stand where those of it that count do, under the same keys.

        Returns:
            What the head says then, and the page to write before the head.
        """
        assert (int(rows[0][0]), len(rows)) == (ref.first, ref.rows), "another page has the same keys"
        made = _page_of(rows, draw_token)
        index = self.pages.index(ref)
        return replace(self, pages=(*self.pages[:index], made.ref, *self.pages[index + 1 :])), made

    def to_document(self) -> dict[str, Any]:
        """Return the part of a head's JSON object that says what the list is."""
        return {"pages": self.pages, "rows": self.rows}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PagedRows:
        """Parse that part; raises MetadataCorruptError."""
        try:
            found = cls(
                tuple(PageRef(str(name), int(first), int(rows)) for name, first, rows in document["pages"]),
                parse_rows(document["rows"]),
            )
        except MALFORMED as error:
            raise MetadataCorruptError(f"the head of a paged list is damaged: {error!r}") from error
        found._check(MetadataCorruptError)
        return found

    def _check(self, error: type[InvalidArgumentError | MetadataCorruptError]) -> None:
        keys = [page.first for page in self.pages] + [row[0] for row in self.rows]
        if any(later <= earlier for earlier, later in pairwise(keys)):
            raise error(f"the keys of a paged list do not increase: {keys[-8:]} at its end")
        if any(page.rows < 1 for page in self.pages) or (self.pages and not self.rows):
            raise error("a paged list refers to an empty page, or has pages and no rows in its head")


def _page_of(rows: Sequence[Row], draw_token: Callable[[], str]) -> Page:
    return Page(f"{rows[0][0]:019d}-{draw_token()}", tuple(rows))


def parse_rows(found: object) -> tuple[Row, ...]:
    """Check rows as they were stored; raises ValueError."""
    if not isinstance(found, list):
        raise ValueError(f"rows are {found!r:.80}")
    for row in found:
        if not isinstance(row, list) or not row or type(row[0]) is not int:
            raise ValueError(f"a row is {row!r:.80}, no array that begins with an integer")
    return tuple(tuple(row) for row in found)


def rows_of_page(ref: PageRef, text: bytes) -> tuple[Row, ...]:
    """Return the rows of a stored page that count; raises MetadataCorruptError."""
    try:
        document = json.loads(text)
        if document["format"] != PAGE_FORMAT_VERSION:
            raise ValueError(f"format version is not {PAGE_FORMAT_VERSION}")
        rows = parse_rows(document["rows"])[-ref.rows :]
        if len(rows) != ref.rows or rows[0][0] != ref.first:
            raise ValueError(f"it does not hold {ref.rows} rows from key {ref.first} on")
    except MALFORMED as error:
        raise MetadataCorruptError(f"page {ref.name} of a list is damaged: {error!r}") from error
    return rows
