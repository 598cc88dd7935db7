"""Identity: whether a bookie may start on these directories (rule 6).

A bookie has a cookie in each of its data directories and in the metadata store. The cookie holds the bookie's
id, the cluster's instance id, and an incarnation drawn when the bookie was formatted. A bookie that starts
without its data has lost its fences, and a fenced ledger would grow again. A bookie therefore starts only
where all cookies agree.

Formatting survives a crash at each point, since it writes in this order:

1. a *draft* of the cookie into each directory, and then the marks of empty storage;
2. the cookie into the metadata store;
3. each draft is renamed to its final name.

    directories         metadata store   what it means                        what is done
    empty               nothing          a new bookie                         FORMAT (1, 2, 3)
    empty or drafts     nothing          crashed before the end of 2          FORMAT again: none relied on it
    drafts or final     the same         crashed in 2 or 3                    FINISH (3)
    all final           the same         an ordinary start                    GO_ON
    all final           nothing          decommissioned, or the metadata      refused
                                         store was wiped
    empty               a cookie         the disk was lost or exchanged       refused
    anything else                        foreign                              refused

With the store first, a crash would leave an empty directory under a known id. A lost disk looks the same, and
must be refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.errors import CookieMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from metadata.access.bookies import Cookie


class Action(enum.Enum):
    """The action of a bookie's start on its cookies."""

    FORMAT = "format"
    FINISH = "finish"
    GO_ON = "go on"


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The cookie and the draft found in one data directory."""

    path: str
    cookie: Cookie | None = None
    draft: Cookie | None = None
    has_data: bool = False
    """Whether the directory holds files that formatting does not leave: segments, another program's files."""


def decide(
    directories: Sequence[DirectoryState], stored: Cookie | None, *, bookie_id: str, instance_id: str
) -> Action:
    """Return the action that the cookies found ask for. `stored` is the metadata store's cookie.

    Raises:
        CookieMismatchError: the bookie must not start; the message names the reason and the remedy.
    """
    for directory in directories:
        _check_owner(directory, bookie_id, instance_id)
    if stored is None:
        return _decide_unregistered(directories, bookie_id)
    if stored.directories != len(directories):
        raise CookieMismatchError(
            f"bookie {bookie_id} was formatted with {stored.directories} data directories and is started "
            f"with {len(directories)}",
            bookie_id=bookie_id,
        )
    for directory in directories:
        found = directory.cookie or directory.draft
        if found is None:
            raise CookieMismatchError(
                f"the metadata store knows bookie {bookie_id}, but {directory.path} holds no cookie: it has "
                "been emptied or is not mounted. Start it with the directory it had; if that is lost, start "
                "a new bookie under another id",
                bookie_id=bookie_id,
            )
        if found != stored:
            raise CookieMismatchError(
                f"{directory.path} is of incarnation {found.incarnation} of bookie {bookie_id}, and the "
                f"metadata store knows incarnation {stored.incarnation}: this directory is an older one, "
                "or another bookie was formatted under the same id",
                bookie_id=bookie_id,
            )
    return Action.GO_ON if all(directory.cookie for directory in directories) else Action.FINISH


def _check_owner(directory: DirectoryState, bookie_id: str, instance_id: str) -> None:
    cookie = directory.cookie
    if cookie is None:
        return
    if cookie.instance_id != instance_id:
        raise CookieMismatchError(
            f"{directory.path} belongs to a bookie of cluster {cookie.instance_id}, and this metadata store "
            f"is that of cluster {instance_id}",
            bookie_id=bookie_id,
        )
    if cookie.bookie_id != bookie_id:
        raise CookieMismatchError(
            f"{directory.path} belongs to bookie {cookie.bookie_id}, not to {bookie_id}", bookie_id=bookie_id
        )


def _decide_unregistered(directories: Sequence[DirectoryState], bookie_id: str) -> Action:
    for directory in directories:
        if directory.cookie is not None:
            raise CookieMismatchError(
                f"{directory.path} is that of bookie {bookie_id}, which the metadata store does not know: it "
                "has been decommissioned, or the metadata store has lost its data. Empty the directory to "
                "start anew",
                bookie_id=bookie_id,
            )
        if directory.has_data:
            raise CookieMismatchError(
                f"{directory.path} holds data but no cookie: it is not the directory of a bookie, or its "
                "cookie has been deleted",
                bookie_id=bookie_id,
            )
    return Action.FORMAT
