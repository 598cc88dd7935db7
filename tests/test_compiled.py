"""The compiled form: which modules it has, that they are on the way of an add, and what they must not change.

The same tests run on both forms: `make test` on the sources, `make test-wheel` on the compiled wheel.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib
import inspect
import random
import sys
import tomllib
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.client
from bookie_aio.config import BookieConfig
from bookie_aio.server.bookie import Bookie
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk
from client_aio import InvalidArgumentError
from client_aio.ledger.writer import LedgerWriter
from client_aio.log.ledger import LogLedger
from client_aio.unbounded.writer import UnboundedLedgerWriter
from metadata import build
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from tests.support import wheel
from tests.support.pythons import VERSIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from client_aio.core.add_window import AddGroup

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES: list[str] = SETTINGS["tool"]["bookie-aio"]["compiled-modules"]
IS_COMPILED = build.form() == "compiled"
of_sources = pytest.mark.skipif(IS_COMPILED, reason="the profiler does not see compiled functions")

ADDS = 40
INTERPRETED = {
    "bookie_aio.metrics": "one call for each group of the journal",
    "bookie_aio.server.bookie": "one call for each group of the journal",
    "bookie_aio.storage.disk.disk": "the seam to the disk, which tests and the simulator replace",
    "client_aio.core.log_chain": "settings, whose source documents them; two calls for each record",
    "client_aio.log.roller": "one call for each record",
}
"""Modules that an add runs through, and that stay interpreted, and why."""


LOOKED_AT_AGAIN = {"bookie_aio.server.connection _process self._frame_since"}
"""Set to None in a loop: behind the loop it may be anything to mypy, too."""


class Deployment:
    """Three bookies and a client in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = MemoryTree()
        self.bookies: list[Bookie] = []
        self.client: client_aio.Client

    async def __aenter__(self) -> Deployment:
        for number in range(3):
            config = BookieConfig(
                f"b{number}",
                directories=(str(self.folder / f"b{number}"),),
                storage=StorageConfig(segment_bytes=16 << 20),
            )
            store = MemoryMetadataStore(self.tree)
            rng = random.Random(number)
            self.bookies.append(await Bookie.start(config, store, RealDisk(), rng=rng, now_ms=lambda: 0))
        self.client = await client_aio.connect(MemoryMetadataStore(self.tree))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()
        for bookie in self.bookies:
            await bookie.close()


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    """Bookies and a client."""
    async with Deployment(tmp_path) as running:
        yield running


def test_each_module_is_there_and_runs_in_the_form_that_is_told() -> None:
    assert len(set(MODULES)) == len(MODULES)
    for name in MODULES:
        file = importlib.import_module(name).__file__
        assert file is not None
        assert file.endswith((".so", ".pyd")) == IS_COMPILED, file


def _sources() -> Iterator[tuple[str, ast.AST]]:
    for name in MODULES:
        file = Path(importlib.import_module(name).__file__ or "").with_name(f"{name.rpartition('.')[2]}.py")
        yield name, ast.parse(file.read_text())


def test_no_call_of_a_base_passes_arguments_on_by_a_star() -> None:
    """Mypyc 2.4 passes the tuple itself: only calls of bound methods unpack it."""
    found = []
    for name, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of, stars = node.func.value, [*map(type, node.args), *(one.arg for one in node.keywords)]
                is_base = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
                if is_base and (ast.Starred in stars or None in stars):
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_method_looks_again_at_what_it_has_set_to_none() -> None:
    """Mypy takes it to be None still, whatever was called since, and compiled code then raises TypeError."""
    found = set()
    for name, tree in _sources():
        for method in ast.walk(tree):
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            ended: dict[str, int] = {}
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Constant)
                    and node.value.value is None
                ):
                    ended |= {
                        ast.unparse(one): node.lineno
                        for one in node.targets
                        if isinstance(one, ast.Attribute)
                    }
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    at = ended.get(ast.unparse(node), node.lineno)
                    if node.lineno > at:
                        found.add(f"{name} {method.name} {ast.unparse(node)}")
    assert found == LOOKED_AT_AGAIN


def _waits(body: Sequence[ast.AST]) -> bool:
    kinds = (ast.Await, ast.AsyncWith, ast.AsyncFor)
    return any(isinstance(node, kinds) for each in body for node in ast.walk(each))


def test_no_coroutine_raises_again_what_it_has_caught_before_it_waited_unless_by_name() -> None:
    """The exception in flight is the thread's: after a wait it is another task's, or none, which crashes."""
    found = []
    for name, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and _waits(node.finalbody):
                found.append(f"{name}:{node.lineno}: a `finally` that waits")
            if isinstance(node, ast.ExceptHandler) and _waits(node.body):
                bare = [one for one in ast.walk(node) if isinstance(one, ast.Raise) and one.exc is None]
                found += [f"{name}:{one.lineno}: a bare `raise`" for one in bare]
    assert found == []


def test_a_compiled_form_is_not_run_from_the_sources() -> None:
    assert (ROOT / "client_aio").exists() != IS_COMPILED


async def _modules_of(add: Callable[[bytes], asyncio.Future[Any]]) -> set[str]:
    """Return the modules of ours that run with nearly each add of one entry."""
    for _ in range(20):
        await add(b"x")
    adds: Counter[str] = Counter()
    seen: set[str] = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        for _ in range(ADDS):
            seen.clear()
            await add(bytes(100))
            adds.update(seen)
    finally:
        sys.setprofile(None)
    files = (Path(name) for name, count in adds.items() if count >= 0.8 * ADDS)
    ours = (
        path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT) and ".venv" not in path.parts
    )
    return {".".join(path.with_suffix("").parts) for path in ours if path.parts[0] != "tests"}


@of_sources
async def test_what_an_add_runs_through_is_compiled(deployment: Deployment) -> None:
    client = deployment.client
    ledger = await client.create_ledger()
    unbounded = await client.open_unbounded_ledger("unbounded", create=True)
    log = await client.open_log("log", create=True)
    on_the_way = set()
    for add in (ledger.add_entry, unbounded.add_entry, log.append):
        on_the_way |= await _modules_of(add)
    assert on_the_way - set(MODULES) == set(INTERPRETED)


class Noting(LedgerWriter):
    """A writer that notes which of its methods others call."""

    noted: list[str]
    published: asyncio.Event

    def _attach(self, *args: Any, **options: Any) -> None:
        self.noted, self.published = ["_attach"], asyncio.Event()
        super()._attach(*args, **options)

    def _complete(self, group: AddGroup[Any]) -> None:
        self.noted.append("_complete")
        super()._complete(group)

    def _publish_lac(self) -> None:
        super()._publish_lac()
        self.published.set()

    def _release(self) -> None:
        self.noted.append("_release")
        super()._release()

    @property
    def told_failures(self) -> tuple[client_aio.BookKeeperError, ...]:
        """Return those of the writer."""
        self.noted.append("told_failures")
        return super().told_failures

    async def close(self, **options: bool) -> Any:
        """Close."""
        self.noted.append("close")
        return await super().close(**options)


async def test_a_subclass_of_a_writer_overrides_what_the_writer_calls(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_aio.client, "LedgerWriter", Noting)
    writer = await deployment.client.create_ledger()
    assert isinstance(writer, Noting)
    async with writer:
        assert await writer.add_entry(b"1") == 0
        await writer.published.wait()
    told = writer.noted
    assert told[:2] == ["_attach", "_complete"]
    assert {"told_failures", "close", "_release"} <= set(told)


async def test_unbounded_ledgers_and_those_of_logs_override_what_the_writer_calls(
    deployment: Deployment,
) -> None:
    log = await deployment.client.open_log("log", create=True)
    assert type(log.current) is LogLedger
    assert await log.append(b"1") == (log.ledger_id, 0)  # `LogLedger._complete`: a position, no entry id
    opening = deployment.client.open_unbounded_ledger("ledger", create=True, fragment_bytes=100)
    async with opening as unbounded:
        assert type(unbounded) is UnboundedLedgerWriter
        for number in range(1000):
            assert await unbounded.add_entry(bytes(90)) == number
            if len(unbounded.metadata.fragments) > 1:  # `UnboundedLedgerWriter._on_reported` has rolled
                break
        assert len(unbounded.metadata.fragments) > 1


async def test_wrong_arguments_are_refused_before_anything_is_sent(deployment: Deployment) -> None:
    writer = await deployment.client.create_ledger(advanced=True)
    for entry_id in (2**63, -1, True, "3"):
        with pytest.raises(InvalidArgumentError, match=str(entry_id)):
            writer.add_entry(b"1", entry_id)  # type: ignore[arg-type]
    for data in ("text", None, 3):
        with pytest.raises(InvalidArgumentError, match="an entry is bytes"):
            writer.add_entry(data, 0)  # type: ignore[arg-type]
    assert await writer.add_entry(bytearray(b"1"), 0) == 0


async def test_a_writer_refuses_weak_references_or_ends_them(deployment: Deployment) -> None:
    """A weak reference to an object of a compiled class does not end with it, and would name freed memory."""
    writer = await deployment.client.create_ledger()
    try:
        reference = weakref.ref(writer)
    except TypeError:
        assert IS_COMPILED
        return
    await writer.close()
    await deployment.client.close()
    del writer
    gc.collect()
    assert reference() is None


def test_no_public_class_allows_weak_references_that_nobody_ends() -> None:
    public = {getattr(client_aio, name) for name in client_aio.__all__}
    compiled = [one for one in public if inspect.isclass(one) and one.__module__ in MODULES]
    assert compiled
    assert [one for one in compiled if IS_COMPILED and one.__weakrefoffset__] == []


async def test_a_close_that_is_cancelled_can_be_called_again(deployment: Deployment) -> None:
    writer = await deployment.client.create_ledger()
    adding = writer.add_entry(b"1")
    closing = asyncio.ensure_future(writer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert await adding == 0
    assert (await writer.close()).last_entry == 0
    assert writer not in deployment.client._context.handles


async def test_an_error_has_the_lines_it_came_through(deployment: Deployment) -> None:
    writer = await deployment.client.create_ledger()
    await writer.close()
    with pytest.raises(client_aio.LedgerClosedError) as caught:
        await writer.add_entries([b"1"])
    names = [each.name for each in caught.traceback]
    assert {"add_entries", "_take"} <= set(names)


# --- wheels of all versions and platforms -----------------------------------------------------------


def test_wheels_are_built_of_each_version_that_is_supported() -> None:
    recipe = SETTINGS["tool"]["cibuildwheel"]
    versions = [f"cp{major}{minor}-*" for major, minor in VERSIONS]
    assert recipe["build"].split() == versions
    classified = [each.rpartition(" ")[2] for each in SETTINGS["project"]["classifiers"] if ":: 3." in each]
    assert {f"cp{each.replace('.', '')}-*" for each in classified} <= set(versions)
    assert recipe["environment"] == {"BOOKIE_AIO_COMPILE": "1"}
    for command in (recipe["test-command"], recipe["macos"]["test-command"]):
        (tested,) = (word for word in command.split() if word.startswith("tests/"))
        assert (ROOT / tested).exists()
    for name in recipe["test-sources"]:
        assert (ROOT / name).exists()
        assert name.partition("/")[0] not in {module.partition(".")[0] for module in MODULES}


def test_each_test_that_a_wheel_is_tried_with_exists() -> None:
    """Pytest on many processes runs nothing where one is missing, and does not say why."""
    assert [name for name in (*wheel.QUICK, *wheel.FULL) if not (ROOT / name).exists()] == []


def test_what_compiles_is_required_by_the_environment_of_developers() -> None:
    extras = SETTINGS["project"]["optional-dependencies"]
    assert any("compile" in each for each in extras["dev"] if each.startswith("bookie-aio["))
    assert any(each.startswith("mypy") for each in extras["compile"])
