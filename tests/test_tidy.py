"""Style that matters is a failing test: sizes, names, leftovers, ambient clocks and randomness.

What ruff and mypy check is not repeated here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("metadata", "bookie_aio", "client_aio", "benchmarks", "examples", "tests")
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
CLASS_METHODS_MAX = 30

# Classes that may have more methods than that: how many at most, and why they stay one class.
LARGE_CLASSES = {
    "bookie_aio/storage/engine.py:Engine": (50, "the storage interface: most are three lines before a part"),
    "client_aio/ledger/writer.py:LedgerWriter": (
        47,
        "the public handle; an add changes all of it in one step",
    ),
    "bookie_aio/server/connection.py:Connection": (
        42,
        "asyncio's protocol: one state decides if bytes are read",
    ),
    "client_aio/core/add_window.py:AddWindow": (
        36,
        "one state machine; a third are properties for its shell",
    ),
}

# Files of one package whose stems differ by an ending only, and why both names stay.
PAIRED_STEMS = {
    frozenset({"checkpoint", "checkpointer"}): "the file's format, and the task that writes the file",
}
ENDINGS = ("ing", "ed", "er", "s")

# Where wall clocks and random sources enter; from there they travel as arguments.
SHELLS = (
    "client_aio/cli/",
    "metadata/backends/zookeeper/session.py",
    "metadata/backends/memory.py",
    "metadata/backends/sqlite/store.py",
    "metadata/keys.py",
    "bookie_aio/server/bookie.py",
    "client_aio/client.py",
    "client_aio/spark/",
)
AMBIENT = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "monotonic"),
    ("time", "perf_counter"),
    ("time", "sleep"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("os", "urandom"),
    ("uuid", "uuid4"),
    ("uuid", "uuid1"),
}
AMBIENT_MODULES = {"random", "secrets"}

# Split in two so that this list does not find itself.
LEFTOVERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|breakpoint\(\)|\bpdb\b")


def _sources() -> list[Path]:
    """Return the project's Python files: tracked ones, and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *(f"{folder}/*.py" for folder in FOLDERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        return [path for name in sorted(listed.stdout.split()) if (path := ROOT / name).exists()]
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


SOURCES = _sources()
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in FOLDERS[:3]]


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", SOURCES, ids=_ids(SOURCES))
def test_file_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("path", SOURCES, ids=_ids(SOURCES))
def test_functions_are_short(path: Path) -> None:
    too_long = {
        node.name: lines
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert not too_long


def _methods(tree: ast.AST) -> dict[str, int]:
    """Return how many methods each class has; a property and its setter count once."""
    return {
        node.name: len(
            {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def test_classes_have_few_methods() -> None:
    large = {
        f"{path.relative_to(ROOT)}:{name}": count
        for path in PRODUCT
        for name, count in _methods(ast.parse(path.read_text())).items()
        if count > CLASS_METHODS_MAX
    }
    allowed = {name: most for name, (most, _) in LARGE_CLASSES.items()}
    assert {name: count for name, count in large.items() if count > allowed.get(name, 0)} == {}
    assert set(allowed) <= set(large), "a class that is no longer large leaves the table"


def _stem(name: str) -> str:
    """Return a file's stem without endings: "ledgers" as "ledg", as "ledger", "reading" as "read"."""
    return "_".join(_root(word) for word in name.split("_"))


def _root(word: str) -> str:
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) > 2:
            return _root(word.removesuffix(ending))
    return word.removesuffix("e")


def _alike(names: list[str]) -> list[set[str]]:
    """Return the groups of names that differ only by an ending."""
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(_stem(name), set()).add(name)
    return [group for group in groups.values() if len(group) > 1 and frozenset(group) not in PAIRED_STEMS]


PACKAGES = sorted({path.parent for path in SOURCES if path.name == "__init__.py"})


@pytest.mark.parametrize("package", PACKAGES, ids=_ids(PACKAGES))
def test_no_two_files_of_a_package_are_called_nearly_the_same(package: Path) -> None:
    assert not _alike([path.stem for path in SOURCES if path.parent == package and path.stem[:2] != "__"])


def test_the_check_for_names_nearly_the_same_sees_them() -> None:
    assert _alike(["ledger", "ledgers", "log"]) == [{"ledger", "ledgers"}]
    assert _alike(["page", "paged"]) == [{"page", "paged"}]
    assert _alike(["read", "reads", "reader", "reading"]) == [{"read", "reads", "reader", "reading"}]
    assert _alike(["log_reads", "log_reader"]) == [{"log_reads", "log_reader"}]
    assert not _alike(["read", "seed", "ring", "log", "segment", "segment_set"])


@pytest.mark.parametrize("path", SOURCES, ids=_ids(SOURCES))
def test_nothing_is_left_over(path: Path) -> None:
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LEFTOVERS.search(line)
    ]
    assert not found


@pytest.mark.parametrize("path", PRODUCT, ids=_ids(PRODUCT))
def test_module_says_what_it_owns(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module opens with a docstring"


def _ambient_uses(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            if pair in AMBIENT or (pair[0] in AMBIENT_MODULES and pair[1] != "Random"):
                found.append(f"{node.lineno}: {pair[0]}.{pair[1]}")
        elif isinstance(node, ast.ImportFrom):
            found += [
                f"{node.lineno}: from {node.module} import {alias.name}"
                for alias in node.names
                if (node.module, alias.name) in AMBIENT
                or (node.module in AMBIENT_MODULES and alias.name != "Random")
            ]
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=_ids(PRODUCT))
def test_time_and_randomness_come_in_as_arguments(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(SHELLS):
        return
    assert not _ambient_uses(path.read_text())


def test_the_check_for_ambient_time_sees_it() -> None:
    assert _ambient_uses("import time\nx = time.time()\n") == ["2: time.time"]
    assert _ambient_uses("from random import choice\n") == ["1: from random import choice"]
    assert not _ambient_uses("import random\nx = random.Random(1)\n")


def test_groups_of_tests_have_effect(request: pytest.FixtureRequest) -> None:
    """pytest-xdist 3.8 ignores them under pytest 9.2 without a word: each process then starts all servers."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@test_tidy.py")
