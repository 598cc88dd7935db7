"""docs/CLIENT.md lists the settings that there are, with their defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from client_aio import ClientConfig

PAGE = (Path(__file__).parents[2] / "docs" / "CLIENT.md").read_text()


def test_the_page_has_every_setting_with_its_default() -> None:
    table = re.search(r"<!-- settings -->(.*)<!-- /settings -->", PAGE, re.DOTALL)
    assert table is not None
    told = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table[1], re.MULTILINE)
    assert told == [(field.name, str(field.default)) for field in fields(ClientConfig)]
