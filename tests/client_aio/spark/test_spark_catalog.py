"""What a query may see of a log that is rolled while it is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from client_aio.spark.catalog import Catalog, Listed
from client_aio.spark.options import parse_read
from client_aio.spark.scan_plan import Stretch
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIONS = parse_read({"metadata": "sqlite:///unused.db", "log": "a,b"})


class Rolling(Catalog):
    """A catalogue whose ledgers change between one look and the next: each row says what is seen of it."""

    def __init__(self, seen: dict[int, Stretch]) -> None:
        super().__init__(cast("Any", None), OPTIONS)
        self._seen = seen

    async def _metadata_of(self, rows: Sequence[Listed]) -> list[LedgerMetadata | None]:
        new = LedgerMetadata.new
        sizes = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
        return [new(row.ledger_id, bookies=["b1"], **sizes) for row in rows]

    async def _stretch_of(
        self, row: Listed, metadata: LedgerMetadata, created_ms: int, rows: Sequence[Listed]
    ) -> Stretch:
        return self._seen[row.row_id]


async def test_nothing_behind_a_ledger_that_may_still_grow_is_given() -> None:
    # The first was looked at before the roll, the second after it: entries of the first are missing here.
    seen = {
        1: Stretch("a", 1, 1, 0, 9, 0, is_complete=False),
        2: Stretch("a", 2, 2, 0, 4, 0, is_complete=False),
        3: Stretch("b", 3, 3, 0, 2, 0),
        4: Stretch("b", 4, 4, 0, 1, 0, is_complete=False),
    }
    listed = [Listed(stretch.log, number, number, 0, 0) for number, stretch in seen.items()]
    found = await Rolling(seen).stretches(listed)
    assert [one.stretch.row_id for one in found] == [1, 3, 4]
