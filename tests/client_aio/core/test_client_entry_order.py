"""Entry ids assigned by the application: any order in, one order out, each id once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.core.add_window import EntryOrder
from metadata.errors import InvalidArgumentError


@given(st.permutations(range(12)))
def test_any_order_comes_out_in_order_as_soon_as_it_is_contiguous(ids: list[int]) -> None:
    order: EntryOrder[int] = EntryOrder()
    out: list[int] = []
    seen: set[int] = set()
    for entry_id in ids:
        out += order.take(entry_id, entry_id)
        seen.add(entry_id)
        contiguous = next(n for n in range(13) if n not in seen)
        assert out == list(range(contiguous))
        assert order.following == contiguous
        assert order.waiting == sorted(seen - set(out))


@pytest.mark.parametrize("entry_id", [0, 2, -1, 2**63, True, "3", None])
def test_an_id_that_was_given_or_is_none_is_refused_and_changes_nothing(entry_id: int) -> None:
    order: EntryOrder[str] = EntryOrder()
    order.take(0, "zero")
    order.take(2, "two")
    with pytest.raises(InvalidArgumentError, match=str(entry_id)):
        order.take(entry_id, "again")
    assert order.take(1, "one") == ["one", "two"]


def test_what_waits_is_given_back_in_order() -> None:
    order: EntryOrder[str] = EntryOrder()
    order.take(7, "seven")
    order.take(3, "three")
    assert order.give_up() == ["three", "seven"]
    assert order.waiting == []
