"""Which ledgers are left by their writer or by their recovery, as far as that can be known (rule 12). Pure.

The theory. Nobody can know that a writer is gone: an idle one sends nothing. To recover its ledger fences it.
So an OPEN ledger is abandoned only if all of this holds, for a grace period:

- Its last fragment names a bookie that is lost, and another bookie could take the seat. A writer that adds
  replaces the lost one at its next add.
- Its bookies hold entries of that fragment. A log creates its next ledger long before it writes to it, and
  without entries there is no copy to make.
- No entry has come, and the metadata have not moved. All bookies of the fragment that run have said so.

A writer that was idle all the time is fenced all the same. So this is done on demand only.

A ledger that is IN_RECOVERY has no writer any more. If its recovery is alive after all, two recoveries at a
time come to the same end. A takeover of an unbounded ledger that is alive loses to the later one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from metadata.model.ledger import Fragment, LedgerState


_LOOKS = 4


class Sight(NamedTuple):
    """What moves of a ledger that is not CLOSED while somebody writes or recovers it."""

    state: LedgerState
    term: int
    last_fragment: Fragment
    last_listed: int
    """The highest entry that bookies list of the last fragment, of an OPEN ledger."""


def may_be_left(bookies: Sequence[str], lost: Collection[str], usable: Collection[str]) -> bool:
    """Return whether a fragment names a lost bookie whose seat another one could take."""
    return any(name in lost for name in bookies) and any(name not in bookies for name in usable)


class Standing:
    """For how long ledgers have stood still. Only what was seen twice counts."""

    def __init__(self, grace_s: float) -> None:
        """Begin with no ledger; one is abandoned that stands still for `grace_s`."""
        self._grace_s = grace_s
        self._seen: dict[int, tuple[Sight | None, float]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def due(self, candidates: Iterable[int], now: float, count: int) -> list[int]:
        """Forget all other ledgers; return up to `count` of these that are to be looked at now.

        A ledger that was not abandoned is looked at again sooner, since its time begins with that look.
        """
        wanted = list(candidates)
        self._seen = seen = {one: self._seen[one] for one in wanted if one in self._seen}

        def due_at(ledger_id: int) -> float:
            sight, since = seen.get(ledger_id, (None, -math.inf))
            return since + (self._grace_s / _LOOKS if sight is None else self._grace_s)

        return sorted((one for one in wanted if due_at(one) <= now), key=due_at)[:count]

    def note(self, ledger_id: int, sight: Sight | None, now: float) -> bool:
        """Note how a ledger looks, None for not abandoned; return whether it has stood still for long enough.

        It counts anew from then on.
        """
        before, since = self._seen.get(ledger_id, (None, now))
        stands = sight is not None and sight == before
        is_over = stands and now >= since + self._grace_s
        self._seen[ledger_id] = sight, since if stands and not is_over else now
        return is_over
