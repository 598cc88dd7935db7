"""The pages say what is so: their Python compiles, and their links lead to files and headings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the blocks of a language, each with the line that it begins at."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start(2)) + 1, found[2])
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_are_examples_to_compile() -> None:
    assert sum(len(blocks_of(page, "python")) for page in PAGES) > 5


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_example_compiles(page: Path) -> None:
    for line, text in blocks_of(page, "python"):
        try:
            compile(text, named(page), "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            where = line + (error.lineno or 1) - 1
            pytest.fail(f"{named(page)}:{where}: the example does not compile: {error.msg}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        parts = urlsplit(target)
        if parts.scheme:
            continue
        file = (page.parent / parts.path).resolve() if parts.path else page
        assert file.exists(), f"{named(page)} links to {target}: there is no {file}"
        if parts.fragment and file.suffix == ".md":
            assert parts.fragment in anchors_of(file), f"{named(page)} links to {target}: no such heading"
