"""Which answers say that a writer is not fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from client_aio.ledger import standing
from metadata.awake import Deadline
from metadata.errors import BookieUnavailableError
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    import pytest


async def test_a_bookie_whose_error_has_no_text_does_not_say_that_the_writer_is_not_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise BookieUnavailableError("")

    monkeypatch.setattr(standing, "ask_lac", fail)
    named = ("b1", "b2", "b3")
    metadata = LedgerMetadata.new(7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=named)
    asking = standing.Standing(cast("Any", None), cast("Any", None), 1)
    with Deadline(10) as deadline:
        assert (await asking._ask(metadata, frozenset(), deadline)).keys() == set(named)
