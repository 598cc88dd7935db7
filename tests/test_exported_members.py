"""What `client_aio` exports is what README.md promises, and it can be used as promised."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import client_aio
from metadata import errors

README = (Path(__file__).parent.parent / "README.md").read_text()


def _promised() -> set[str]:
    names = re.search(r"<!-- names -->(.*)<!-- /names -->", README, re.DOTALL)
    assert names is not None, "README.md has lost its list of public names"
    return set(re.findall(r"`(\w+)`", names.group(1)))


def test_exports_are_those_that_the_readme_lists() -> None:
    assert set(client_aio.__all__) == _promised()


def test_no_name_is_exported_twice() -> None:
    assert len(client_aio.__all__) == len(set(client_aio.__all__))


def test_every_error_of_the_tree_is_exported() -> None:
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and name.endswith("Error")}
    assert tree <= set(client_aio.__all__)
    assert all(issubclass(getattr(client_aio, name), client_aio.BookKeeperError) for name in tree)


@pytest.mark.parametrize("name", sorted(client_aio.__all__))
def test_exported_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(client_aio, name))


@pytest.mark.parametrize(
    "name", sorted(name for name in client_aio.__all__ if inspect.isclass(getattr(client_aio, name)))
)
def test_public_members_of_exported_classes_are_documented(name: str) -> None:
    members = inspect.getmembers(getattr(client_aio, name))
    undocumented = [
        member
        for member, value in members
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and not inspect.getdoc(value)
    ]
    assert not undocumented
