"""A bookie that takes entries of all content terms for one, for tests that show why none does.

    python -m tests.support.termblind bookie serve …

It stores and fences as every bookie does. What it leaves out is the comparison: of the copies of an entry it
gives the newest, whatever term that was asked for. `blind_client` does the same to a client in this process,
which would pass such an answer over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.storage.read import lookup, reader
from bookie_aio.wire.blocks import parse_blocks
from client_aio.cli.main import main
from client_aio.core import read_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from bookie_aio.storage.read.reader import Found, Source
    from bookie_aio.wire.blocks import Block
    from client_aio.core.read_plan import ClassRange

_gather = reader.gather
_in_order = read_plan.blocks_in_order


class TermBlindReader(reader.Reader):
    """Reads as if all content terms were 0."""

    def __init__(self, ledger_id: int, sources: Sequence[Source], content_term: int, bytes_max: int) -> None:
        super().__init__(ledger_id, sources, 0, bytes_max)


async def _blind_gather(
    sources: Sequence[Source], low: int, high: int, count_max: int
) -> tuple[list[Found], int]:
    found, horizon = await _gather(sources, low, high, count_max)
    return [one._replace(content_term=0) for one in found], horizon


def _blind_in_order(asked: ClassRange, body: memoryview) -> Iterator[Block]:
    terms = [block.content_term for block in parse_blocks(body)]
    return _in_order(asked._replace(content_term=terms[0]) if terms else asked, body)


def blind_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients in this process take answers of any content term."""
    monkeypatch.setattr(read_plan, "blocks_in_order", _blind_in_order)


if __name__ == "__main__":
    vars(reader)["gather"] = _blind_gather
    vars(lookup)["Reader"] = TermBlindReader
    main()
