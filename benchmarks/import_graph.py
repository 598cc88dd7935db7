"""The import graph of the product: circles, upward imports, and how large each package is.

    python -m benchmarks.import_graph [ROOT]

`make check` runs it; the exit code is 1 if there is a circle or an upward import. Every import counts, also
one in a function or for types only.

- A *box* of a package is one of its direct children: a file, or a folder with all that is in it. The
  package's own `__init__` is a box if it has an arrow.
- An *arrow* leads from one box to another if a module in the first imports a module in the second.
- A *circle* is a set of modules, or of boxes of one package, in which each leads to each other.
- An import is *upward* if its arrow is part of a circle of boxes: such boxes have no order from top to
  bottom.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGES = ("metadata", "bookie_aio", "client_aio")
BEFORE = {"client_aio": (34, 143), "bookie_aio.storage": (28, 122), "metadata": (27, 88)}
"""Boxes and arrows at commit d0c2853, when these packages were flat."""

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One source file of the product."""

    path: Path
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Return whether this is the `__init__` of a package."""
        return self.path.name == "__init__.py"

    @property
    def is_code(self) -> bool:
        """Return whether this file defines a function or a class."""
        return any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in self.tree.body
        )


def read(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Module]:
    """Return all modules below the packages, by dotted name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            source = path.read_text()
            found[name] = Module(path, source, ast.parse(source))
    return found


def imports(modules: dict[str, Module]) -> Graph:
    """Return which modules each module imports: `a.b` for `from a import b` if that is a module, else `a`."""
    graph: Graph = {}
    for name, module in modules.items():
        imported = graph[name] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                dotted = (f"{node.module}.{alias.name}" for alias in node.names)
                imported.update(each if each in modules else node.module for each in dotted)
        imported.intersection_update(modules)
        imported.discard(name)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one node, each sorted."""
    reached = {node: _reached(graph, node) for node in graph}
    found = {tuple(sorted(other for other in reached[node] if node in reached[other])) for node in graph}
    return sorted(list(circle) for circle in found if len(circle) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph[waiting.pop()] - reached:
            reached.add(node)
            waiting.append(node)
    return reached


@dataclass(frozen=True)
class Boxes:
    """The boxes of one package: its arrows, and the imports that each arrow is made of."""

    graph: Graph
    imports_of: dict[tuple[str, str], list[tuple[str, str]]]

    @property
    def arrows(self) -> int:
        """Return how many arrows there are."""
        return len(self.imports_of)

    def upward(self) -> list[tuple[str, str]]:
        """Return the imports that are part of a circle of boxes."""
        return sorted(
            pair
            for circle in circles(self.graph)
            for (source, target), pairs in self.imports_of.items()
            if source in circle and target in circle
            for pair in pairs
        )


def boxes(graph: Graph, package: str) -> Boxes:
    """Return the boxes of a package, "" for the packages themselves."""
    imports_of: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, imported in graph.items():
        for other in imported:
            source, target = _box(name, package), _box(other, package)
            if source and target and source != target:
                imports_of[source, target].append((name, other))
    inner = {box for name in graph if (box := _box(name, package)) and box != package}
    arrows: Graph = {box: set() for box in sorted(inner | {box for pair in imports_of for box in pair})}
    for source, target in imports_of:
        arrows[source].add(target)
    return Boxes(arrows, imports_of)


def _box(name: str, package: str) -> str:
    """Return the box of a package that a module is in, "" of a module outside the package."""
    if not package:
        return name.partition(".")[0]
    if name == package:
        return package
    if not name.startswith(f"{package}."):
        return ""
    return f"{package}.{name.removeprefix(f'{package}.').partition('.')[0]}"


# --- sizes ------------------------------------------------------------------------------------------


def longest_function(modules: dict[str, Module]) -> tuple[int, str]:
    """Return the lines of the longest function, and its name."""
    return max(
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.name}")
        for name, node in _nodes(modules)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def largest_class(modules: dict[str, Module]) -> tuple[int, str]:
    """Return the number of methods of the class that has most, and its name."""
    return max(
        (
            len(
                {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            ),
            f"{name}:{node.name}",
        )
        for name, node in _nodes(modules)
        if isinstance(node, ast.ClassDef)
    )


def _nodes(modules: dict[str, Module]) -> Iterator[tuple[str, ast.AST]]:
    for name, module in modules.items():
        for node in ast.walk(module.tree):
            yield name, node


# --- the report -------------------------------------------------------------------------------------


def report(modules: dict[str, Module]) -> tuple[list[str], bool]:
    """Return the lines to print, and whether there is neither a circle nor an upward import."""
    graph = imports(modules)
    packages = ["", *(name for name, module in modules.items() if module.is_package)]
    of_package = {package: boxes(graph, package) for package in packages}
    lines = [f"circle of files: {' '.join(circle)}" for circle in circles(graph)]
    for package, its in of_package.items():
        where = package or "the product"
        lines += [f"circle of boxes in {where}: {' '.join(circle)}" for circle in circles(its.graph)]
        lines += [f"upward import in {where}: {source} imports {target}" for source, target in its.upward()]
    is_good = not lines
    if is_good:
        lines = ["no circle among files, no circle among boxes, no upward import"]
    for package, (boxes_before, arrows_before) in BEFORE.items():
        if package in of_package:
            its = of_package[package]
            lines.append(
                f"{package}: {len(its.graph)} boxes, {its.arrows} arrows "
                f"({boxes_before} and {arrows_before} at d0c2853)"
            )
    lengths = [len(module.source.splitlines()) for module in modules.values() if module.is_code]
    (function_lines, function), (methods, of_class) = longest_function(modules), largest_class(modules)
    lines.append(
        f"{len(lengths)} files of {fmean(lengths):.0f} lines in the mean, {max(lengths)} at most "
        f"(besides, {len(modules) - len(lengths)} that define nothing: reading guides of packages)"
    )
    lines.append(f"longest function: {function}, {function_lines} lines; most methods: {of_class}, {methods}")
    return lines, is_good


def main() -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_graph")
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="of another working tree")
    lines, is_good = report(read(parser.parse_args().root))
    print("\n".join(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
