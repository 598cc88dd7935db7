"""The pages say what is so: their Python compiles, and their links lead to files and headings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "deploy" / "README.md",
    ]
)
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


MODULE = re.compile(r"`((?:metadata|bookie_aio|client_aio|benchmarks|tests|examples)(?:\.[a-z_]+)+)[.:`(]")
FILE = re.compile(r"`((?:metadata|bookie_aio|client_aio|benchmarks|tests|examples|docs)/[\w/.]*\w/?)`")
SOURCES = sorted(
    path
    for folder in ("metadata", "bookie_aio", "client_aio", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
VALUES = frozenset({"metadata.db", "metadata.py"})
"""File names that look like modules."""


def _is_there(dotted: str) -> bool:
    """Return whether a dotted name is a module, or begins with one that has the next name in its text."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.is_dir():
            return length == len(parts) or parts[length] in (path / "__init__.py").read_text()
        if path.with_suffix(".py").is_file():
            return length == len(parts) or parts[length] in path.with_suffix(".py").read_text()
    return False


@pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=named)
def test_modules_and_files_that_prose_names_exist(page: Path) -> None:
    text = page.read_text()
    missing = {name for name in MODULE.findall(text) if name not in VALUES and not _is_there(name)}
    missing |= {
        name
        for name in FILE.findall(text)
        if not any(part.isupper() for part in re.split(r"[/.]", name)) and not (ROOT / name).exists()
    }
    assert not missing
