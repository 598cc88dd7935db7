"""What can be asked of the client without an event loop: everything that can be asked with one."""

from __future__ import annotations

import inspect
import re

import pytest

import client_aio
import client_aio.sync

SHARED = sorted(
    name
    for name, member in inspect.getmembers(client_aio.sync.Client, inspect.isfunction)
    if not name.startswith("_") and hasattr(client_aio.Client, name)
)


@pytest.mark.parametrize("name", SHARED)
def test_a_blocking_method_takes_what_the_other_takes(name: str) -> None:
    taken = inspect.signature(getattr(client_aio.sync.Client, name)).parameters
    wanted = inspect.signature(getattr(client_aio.Client, name)).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        assert list(taken) == list(wanted)


@pytest.mark.pure
def test_a_blocking_method_names_the_method_that_describes_it() -> None:
    """Nothing is described twice, and each reference leads to a docstring."""
    named = 0
    for kind in (client_aio.sync.Client, client_aio.sync.LedgerWriter, client_aio.sync.LogWriter):
        for _, member in inspect.getmembers(kind):
            for owner, name in re.findall(r"^As `client_aio\.(\w+)\.(\w+)`", member.__doc__ or ""):
                assert getattr(getattr(client_aio, owner), name).__doc__
                named += 1
    assert named
