"""May a bookie start on these directories? (rule 6)"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bookie_aio.core.identity import Action, DirectoryState, decide
from metadata.access.bookies import Cookie
from metadata.errors import CookieMismatchError

MINE = Cookie(bookie_id="b1", instance_id="cluster", incarnation="aa", directories=2)
EMPTY = DirectoryState("/d")
DRAFT = DirectoryState("/d", draft=MINE)
FINAL = DirectoryState("/d", cookie=MINE, has_data=True)


def decide_on(directories: list[DirectoryState], stored: Cookie | None) -> Action:
    return decide(directories, stored, bookie_id="b1", instance_id="cluster")


@pytest.mark.parametrize(
    ("directories", "stored", "action"),
    [
        ([EMPTY, EMPTY], None, Action.FORMAT),
        ([DRAFT, EMPTY], None, Action.FORMAT),
        ([DRAFT, DRAFT], None, Action.FORMAT),
        ([DRAFT, DRAFT], MINE, Action.FINISH),
        ([FINAL, DRAFT], MINE, Action.FINISH),
        ([FINAL, FINAL], MINE, Action.GO_ON),
    ],
)
def test_each_state_that_a_start_or_a_crash_of_formatting_leaves(
    directories: list[DirectoryState], stored: Cookie | None, action: Action
) -> None:
    assert decide_on(directories, stored) is action


@pytest.mark.parametrize(
    ("directories", "stored", "says"),
    [
        ([EMPTY, EMPTY], MINE, "emptied or is not mounted"),
        ([FINAL, EMPTY], MINE, "emptied or is not mounted"),
        ([FINAL, FINAL], None, "decommissioned"),
        ([DirectoryState("/d", has_data=True), EMPTY], None, "holds data but no cookie"),
        ([FINAL], MINE, "formatted with 2 data directories"),
        ([FINAL, FINAL], replace(MINE, incarnation="bb"), "an older one"),
        ([DRAFT, DRAFT], replace(MINE, incarnation="bb"), "an older one"),
        ([DirectoryState("/d", cookie=replace(MINE, bookie_id="b2"))] * 2, MINE, "belongs to bookie b2"),
        (
            [DirectoryState("/d", cookie=replace(MINE, instance_id="other"))] * 2,
            MINE,
            "belongs to a bookie of cluster other",
        ),
    ],
)
def test_everything_else_is_refused_and_says_why(
    directories: list[DirectoryState], stored: Cookie | None, says: str
) -> None:
    with pytest.raises(CookieMismatchError, match=says):
        decide_on(directories, stored)
