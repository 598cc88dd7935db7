"""A list of unlimited length: its newest rows in a head, the older ones in pages. Pure.

`metadata.access.paged_list` stores such a list. A log keeps its ledgers in one, an unbounded ledger its
fragments. A row is a JSON array whose first element is its *key*, an integer; keys strictly increase.

    head: its user's own fields · references to pages, oldest first · the newest rows
    page: {"format": 1, "rows": [[5, …], [9, …], …]}

Invariants:

- A page is written once, under a unique name, and counts only if the head refers to it. So the head alone
  defines the list, and each change of the list is one compare-and-set of the head.
- A change reads the head first and writes its new pages after that. So a sweeper lists pages, then changes
  the head's version, and may then delete the listed pages that this head does not refer to. The client that
  wrote such a page can only fail its compare-and-set.
- Rows leave at the front only: a reference is dropped, or shortened to the rows from some key on. The page
  itself is deleted after the head has ceased to refer to it.
- Rows of a page change only by a replacement page, with as many rows under the same keys (`rewrite`). The
  head then refers to the replacement.
- Appending needs the head alone, and so does changing one of the last `ROWS_KEPT` rows.
- The head's rows take at most `HEAD_ROWS_BYTES_MAX`. A reference takes some 45 bytes; its page has up to
  `PAGE_ROWS_BYTES_MAX` when its rows leave the head. So the head of 20,000 rows of 40 bytes stays below 20
  KiB. The head of a million rows stays below half of `VALUE_BYTES_MAX`.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.ids import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HEAD_ROWS_BYTES_MAX = 12 * 1024
PAGE_ROWS_BYTES_MAX = 8 * 1024
ROWS_KEPT = 4
"""The number of newest rows that always stay in the head."""

PAGE_FORMAT_VERSION = 1

Row = tuple[Any, ...]
"""A JSON array; its first element is its key."""


class PageRef(NamedTuple):
    """A head's reference to a page: only the page's last `rows` rows count, from key `first` on."""

    name: str
    first: int
    rows: int


class Page(NamedTuple):
    """A page to be written."""

    name: str
    rows: tuple[Row, ...]

    @property
    def ref(self) -> PageRef:
        """Return the reference to all rows of the page."""
        return PageRef(self.name, int(self.rows[0][0]), len(self.rows))

    def to_json(self) -> bytes:
        """Return the stored form."""
        return json.dumps({"format": PAGE_FORMAT_VERSION, "rows": self.rows}).encode()


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The part of a head that defines its list. Frozen: each change returns a new value."""

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
        """Add rows at the end, in place of the last `in_place_of` rows, which must be in the head.

        Raises:
            InvalidArgumentError: the keys do not increase.
        """
        kept = self.rows[: len(self.rows) - in_place_of]
        assert in_place_of <= len(self.rows)
        changed = replace(self, rows=(*kept, *(tuple(row) for row in rows)))
        changed._check(InvalidArgumentError)
        return changed

    def page_of(self, key: int) -> PageRef | None:
        """Return the page with the last row whose key is at most `key`; None where the head has it.

        Also None where there is no such row.
        """
        if self.rows and key >= self.rows[0][0]:
            return None
        index = bisect_right(self.pages, key, key=lambda page: page.first) - 1
        return self.pages[index] if index >= 0 else None

    def page_cut_at(self, key: int) -> PageRef | None:
        """Return the page that `drop_before(key)` cuts in two; its rows must be read first."""
        page = self.page_of(key - 1)
        if page is None or page.first >= key:
            return None
        following = self.following(page)
        return None if following <= key else page

    def following(self, page: PageRef) -> int:
        """Return the first key behind a page; behind the last page, the key of the head's first row."""
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
        """Move the oldest of the head's rows to pages, if the rows exceed their limit.

        Returns:
            The list after that, and the pages to write before the head.
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
            rows: the new rows, under the same keys as the rows of that page that count.

        Returns:
            The list after that, and the page to write before the head.
        """
        assert (int(rows[0][0]), len(rows)) == (ref.first, ref.rows), "another page has the same keys"
        made = _page_of(rows, draw_token)
        index = self.pages.index(ref)
        return replace(self, pages=(*self.pages[:index], made.ref, *self.pages[index + 1 :])), made

    def to_document(self) -> dict[str, Any]:
        """Return the members of a head's JSON object that define the list."""
        return {"pages": self.pages, "rows": self.rows}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PagedRows:
        """Parse the members that `to_document` returns; raises MetadataCorruptError."""
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
    """Check stored rows; raises ValueError."""
    if not isinstance(found, list):
        raise ValueError(f"rows are {found!r:.80}")
    for row in found:
        if not isinstance(row, list) or not row or type(row[0]) is not int:
            raise ValueError(f"a row is {row!r:.80}, no array that begins with an integer")
    return tuple(tuple(row) for row in found)


def rows_of_page(ref: PageRef, text: bytes) -> tuple[Row, ...]:
    """Return the rows of a stored page that the reference counts; raises MetadataCorruptError."""
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
