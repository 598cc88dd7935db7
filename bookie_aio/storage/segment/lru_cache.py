"""A cache that forgets what was not used for longest, once it holds too much. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key, each with what it costs; together they cost at most `cost_max`, or there is one."""

    def __init__(self, cost_max: int) -> None:
        self._cost_max = cost_max
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.cost = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        """Give a value, which counts as used now."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, cost: int) -> None:
        """Keep a value, in the place of the one there was."""
        self.drop(key)
        self._held[key] = (value, cost)
        self.cost += cost
        while self.cost > self._cost_max and len(self._held) > 1:
            _, (_, given_back) = self._held.popitem(last=False)
            self.cost -= given_back

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        found = self._held.pop(key, None)
        if found is not None:
            self.cost -= found[1]

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self.cost = 0
