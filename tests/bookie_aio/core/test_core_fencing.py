"""The verdict on a request's term (rule 7)."""

from __future__ import annotations

import pytest

from bookie_aio.core.fencing import Verdict, judge
from metadata.ids import TERM_FINAL

TERMS = (0, 1, 2, 7, TERM_FINAL - 1, TERM_FINAL)


@pytest.mark.parametrize("held", TERMS)
@pytest.mark.parametrize("asked", TERMS)
def test_a_lower_term_is_refused_the_same_goes_on_and_a_higher_one_is_stored(held: int, asked: int) -> None:
    expected = {-1: Verdict.REFUSE, 0: Verdict.ACCEPT, 1: Verdict.RAISE}
    assert judge(held, asked) is expected[(asked > held) - (asked < held)]


def test_concurrent_recoveries_of_a_bounded_ledger_do_not_shut_one_another_out() -> None:
    assert judge(0, TERM_FINAL) is Verdict.RAISE
    assert judge(TERM_FINAL, TERM_FINAL) is Verdict.ACCEPT
    assert judge(TERM_FINAL, 0) is Verdict.REFUSE
