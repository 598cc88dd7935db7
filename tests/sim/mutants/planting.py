"""Planting: one function of the production code is replaced by a version with a bug, in this process only.

Owns the ways to do it. A mutant that does not fit the code any more fails loudly: the text that it replaces
has to be there exactly once.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _find(target: str) -> tuple[Any, Any, str]:
    """Return module, owner and name of `module:Class.name` or `module:name`."""
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return module, owner, name


def _put(owner: Any, name: str, new: Any) -> None:
    """Set an attribute; a function also where other modules have imported it by name."""
    old = inspect.getattr_static(owner, name)
    setattr(owner, name, new)
    if inspect.ismodule(owner):
        for module in list(sys.modules.values()):
            if module.__name__.startswith(_OURS) and module.__dict__.get(name) is old:
                setattr(module, name, new)


_OURS = ("client_aio", "bookie_aio", "metadata")
_SOURCES: dict[str, str] = {}  # of functions that have been edited already


@dataclass(frozen=True)
class Edit:
    """Replaces a text in the source of one function; `old` has to be there exactly once."""

    target: str
    old: str
    new: str

    def apply(self) -> None:
        """Do it."""
        module, owner, name = _find(self.target)
        attribute = inspect.getattr_static(owner, name)
        function = attribute.fget if isinstance(attribute, property) else getattr(owner, name)
        source = _SOURCES.get(self.target) or textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise LookupError(f"{self.target}: not once but {source.count(self.old)} times {self.old!r}")
        source = _SOURCES[self.target] = source.replace(self.old, self.new)
        flags = compile("from __future__ import annotations", "", "exec").co_flags
        code = compile(source, f"<mutant of {self.target}>", "exec", flags=flags)
        made: dict[str, Any] = {}
        exec(code, module.__dict__, made)
        _put(owner, name, made[name])


@dataclass(frozen=True)
class Swap:
    """Puts another object in the place of a module's or a class's."""

    target: str
    make: Callable[[Any], Any]

    def apply(self) -> None:
        """Do it; `make` is given what was there."""
        _, owner, name = _find(self.target)
        _put(owner, name, self.make(getattr(owner, name)))


@dataclass(frozen=True)
class Mutant:
    """A planted bug. `profiles` are tried in turn, seed by seed; `tests` catch what does not run here."""

    number: int
    title: str
    changes: tuple[Edit | Swap, ...] = ()
    profiles: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""

    def plant(self) -> None:
        """Put the bug in, for as long as this process lives."""
        for change in self.changes:
            change.apply()
