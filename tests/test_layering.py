"""Who may import what, and what the core may not touch.

The project is three packages in layers, `metadata` below `bookie_aio` below `client_aio`, and a pure core
inside each of them (ARCHITECTURE.md, "Layers"). Read from the source, so that a module that is imported
inside a function, or for types only, counts as well.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
OURS = ("metadata", "bookie_aio", "client_aio", "benchmarks", "tests", "examples")

METADATA_BASE = (
    "metadata.awake",
    "metadata.errors",
    "metadata.ids",
    "metadata.metrics",
    "metadata.owned_task",
    "metadata.store",
    "metadata.keys",
)
# Which of our modules a module may import: the first prefix that fits the importing module decides.
MAY_IMPORT: tuple[tuple[str, tuple[str, ...]], ...] = (
    # `model` says what the metadata are, `access` reads and changes them on any store, and a backend stores
    # values without knowing their meaning.
    ("metadata.model", ("metadata.model", *METADATA_BASE)),
    ("metadata.access", ("metadata.access", "metadata.model", "metadata.write_outcome", *METADATA_BASE)),
    (
        "metadata.backends",
        ("metadata.backends", "metadata.write_outcome", *METADATA_BASE),
    ),
    ("metadata", ("metadata",)),
    ("bookie_aio.wire", ("bookie_aio.wire", "metadata")),
    ("bookie_aio.core", ("bookie_aio.core", "bookie_aio.wire", "metadata")),
    ("bookie_aio.storage", ("bookie_aio.storage", "bookie_aio.metrics", "bookie_aio.wire", "metadata")),
    ("bookie_aio", ("bookie_aio", "metadata")),
    ("client_aio.core", ("client_aio.core", "bookie_aio.wire", "metadata")),
    # The command line is the place where everything is put together.
    ("client_aio.cli", ("client_aio", "bookie_aio", "metadata")),
    ("client_aio", ("client_aio", "bookie_aio.wire", "metadata")),
)

# Modules that decide and do nothing else: no clock, no randomness, no sockets, no files, no threads.
PURE = (
    "metadata.ids",
    "metadata.model.given_up",
    "metadata.model.ledger",
    "metadata.errors",
    "metadata.metrics",
    "metadata.model.paged_list",
    "metadata.model.passwords",
    "bookie_aio.wire",
    "bookie_aio.core",
    "bookie_aio.storage.segment.format",
    "bookie_aio.storage.segment.index",
    "bookie_aio.storage.ledgers.checkpoint",
    "client_aio.core",
    "client_aio.dashboard.cluster_pages",
    "client_aio.dashboard.layout",
    "client_aio.dashboard.ledger_pages",
    "client_aio.dashboard.markup",
    "client_aio.dashboard.model",
    "client_aio.dashboard.vitals",
    "client_aio.spark.encoding",
    "client_aio.spark.options",
    "client_aio.spark.scan_plan",
    "client_aio.spark.provenance",
)
# Interfaces: they may declare coroutines, and otherwise keep the same rule.
PURE_BUT_FOR_COROUTINES = ("metadata.store",)
IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "datetime",
    "fcntl",
    "glob",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
    "uvloop",
}
IMPURE_CALLS = frozenset({"open", "print", "input"})

# Third parties that exactly one module may know.
ONLY_IN = {
    "aiozk": ("metadata.backends.zookeeper.session",),
    "sqlite3": ("metadata.backends.sqlite.database",),
    "pyspark": ("client_aio.spark",),
    "typer": ("client_aio.cli",),
    "rich": ("client_aio.cli",),
    "hdrh": ("client_aio.cli",),
    "aiohttp": ("bookie_aio.server.http", "client_aio.dashboard.server"),
    "opentelemetry": ("client_aio.tracing",),
    "prometheus_client": ("metadata.metrics", "bookie_aio.server.http", "client_aio.metrics"),
}


@dataclass(frozen=True)
class Module:
    """One source file of ours."""

    name: str
    path: Path
    tree: ast.Module

    def imports(self, *, for_types_too: bool = True) -> frozenset[str]:
        """Return the dotted names that are imported anywhere in the module, `from a import b` as `a.b`."""
        return _imports(self, for_types_too=for_types_too)


@cache
def _imports(module: Module, *, for_types_too: bool) -> frozenset[str]:
    found: set[str] = set()
    nodes = ast.walk(module.tree) if for_types_too else _walk_but_types(module.tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: imports are absolute in this project"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _walk_but_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk as `ast.walk` does, past what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _walk_but_types(node)


def _modules() -> list[Module]:
    found = []
    for package in ("metadata", "bookie_aio", "client_aio"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return found


MODULES = _modules()


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _is_any_of(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(_is_within(name, prefix) for prefix in prefixes)


def _names(modules: list[Module]) -> list[str]:
    return [module.name for module in modules]


def test_all_three_packages_are_read() -> None:
    assert {"metadata.ids", "bookie_aio.wire.frames", "client_aio.cli.main"} <= set(_names(MODULES))


@pytest.mark.parametrize("module", MODULES, ids=_names(MODULES))
def test_imports_only_what_its_layer_may(module: Module) -> None:
    allowed = next(may for prefix, may in MAY_IMPORT if _is_within(module.name, prefix))
    ours = {name for name in module.imports() if name.partition(".")[0] in OURS}
    assert not {name for name in ours if not _is_any_of(name, allowed)}


PURE_MODULES = [module for module in MODULES if _is_any_of(module.name, PURE + PURE_BUT_FOR_COROUTINES)]


@pytest.mark.parametrize("module", PURE_MODULES, ids=_names(PURE_MODULES))
def test_core_touches_no_clock_randomness_socket_file_or_thread(module: Module) -> None:
    # A type such as random.Random may be named: the source of randomness comes in as an argument.
    imported = module.imports(for_types_too=False)
    assert not {name for name in imported if name.partition(".")[0] in IMPURE_MODULES}
    called = {
        node.func.id
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & IMPURE_CALLS


@pytest.mark.parametrize("module", PURE_MODULES, ids=_names(PURE_MODULES))
def test_core_is_synchronous(module: Module) -> None:
    if _is_any_of(module.name, PURE_BUT_FOR_COROUTINES):
        return
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node.lineno for node in ast.walk(module.tree) if isinstance(node, waiting)]


@pytest.mark.parametrize("third_party", sorted(ONLY_IN))
def test_third_party_stays_in_its_place(third_party: str) -> None:
    users = {
        module.name for module in MODULES if any(_is_within(name, third_party) for name in module.imports())
    }
    assert not {name for name in users if not _is_any_of(name, ONLY_IN[third_party])}


def test_the_rules_themselves_see_a_forbidden_import() -> None:
    source = "def f():\n    import time\n    from client_aio.cli import main\n"
    module = Module("bookie_aio.core.example", ROOT / "example.py", ast.parse(source))
    assert module.imports() == {"time", "client_aio.cli.main"}
    with pytest.raises(AssertionError):
        test_imports_only_what_its_layer_may(module)
    with pytest.raises(AssertionError):
        test_core_touches_no_clock_randomness_socket_file_or_thread(module)
