"""The key of a run: a hash of the code that a simulated run executes.

A campaign's record counts for one key (`tests.sim.campaign.record`). The key changes when a run may change.
It stays when only prose or the names of files change.

The key covers:

- every module of this project that a run imports, found by following imports from `ENTRY`;
- imports in functions, and strings that are the dotted name of a module (`importlib.import_module`);
- the `__init__` of each package on the way;
- of each module the syntax tree: every statement, constant, annotation, and name that is not a module's.

The key does not cover:

- docstrings, bare strings behind attributes, comments, layout;
- `if TYPE_CHECKING` blocks, which never run;
- the path and the dotted name of a module, and the order of imports;
- anything outside this project's modules: Python itself, third-party packages, environment, data files;
- modules that a run does not import: the command line, Spark, the blocking client, tests, planted bugs.

A reference to a module counts as a reference to its content. So importing a name from another module changes
the key. Code that moves to another module changes it too, and so does a renamed class, function or variable.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
ENTRY = "tests.sim.campaign.runner"
"""The module that runs one seed."""


def run_key(root: Path = ROOT, entry: str = ENTRY) -> str:
    """Return the key of the code below `root` that `entry` imports: 12 hexadecimal digits."""
    trees = {name: _bare(ast.parse(path.read_text())) for name, path in modules(root, entry).items()}
    contents = {name: _hash(_text(tree, name, trees, {})) for name, tree in trees.items()}
    return _hash("".join(sorted(_hash(_text(tree, name, trees, contents)) for name, tree in trees.items())))


def modules(root: Path = ROOT, entry: str = ENTRY) -> dict[str, Path]:
    """Return the modules that a run imports, `entry` among them, each with its file."""
    found: dict[str, Path] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        path = _file(root, name)
        if name in found or path is None:
            continue
        found[name] = path
        waiting.append(name.rpartition(".")[0])
        waiting.extend(_references(_bare(ast.parse(path.read_text()))))
    return found


def _file(root: Path, name: str) -> Path | None:
    """Return the file of a module, None of a name that is none of ours."""
    if not name.replace(".", "").isidentifier():
        return None
    path = root / name.replace(".", "/")
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _references(tree: ast.AST) -> Iterator[str]:
    """Yield all dotted names that may be those of modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value


# --- the tree without what does not count -----------------------------------------------------------


def _bare(tree: ast.Module) -> ast.Module:
    """Remove bare strings and blocks that never run."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                value[:] = [statement for statement in value if not _is_idle(statement)]
    return tree


def _is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return isinstance(statement.value.value, str)
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Name)
        and statement.test.id == "TYPE_CHECKING"
        and not statement.orelse
    )


# --- the tree as text -------------------------------------------------------------------------------


def _text(tree: ast.Module, name: str, known: dict[str, ast.Module], contents: dict[str, str]) -> str:
    """Return a module as text, in which `contents` stands for each module of ours, "" where it has none."""
    aliases = dict(_aliases(tree, known))
    return _Writer(known, contents, aliases).text(tree)


def _aliases(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the local names that are bound to modules of ours: name, module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (module := f"{node.module}.{alias.name}") in known:
                    yield alias.asname or alias.name, module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in known:
                    yield alias.asname, alias.name


class _Writer:
    """Writes a syntax tree as text that is the same on every version of Python: empty fields are left out."""

    def __init__(
        self, known: dict[str, ast.Module], contents: dict[str, str], aliases: dict[str, str]
    ) -> None:
        self._known = known
        self._contents = contents
        self._aliases = aliases

    def text(self, node: Any) -> str:
        """Return the text of a node, of a list of nodes, or of a plain value."""
        if isinstance(node, list):
            return f"[{' '.join(self._imports_first(node))}]"
        if isinstance(node, ast.Attribute) and (module := self._dotted(node)) in self._known:
            return self._of(module)
        if isinstance(node, ast.Name) and node.id in self._aliases:
            return self._of(self._aliases[node.id])
        if isinstance(node, ast.Constant) and node.value in self._known and "." in str(node.value):
            return self._of(str(node.value))
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = (
            f"{field}={self.text(value)}"
            for field, value in ast.iter_fields(node)
            if value is not None and value != []
        )
        return f"{type(node).__name__}({' '.join(fields)})"

    def _imports_first(self, nodes: list[Any]) -> list[str]:
        """Return the texts of a list, the imports of a block in front and in the order of their texts."""
        imports = [
            each
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in self._bound(node)
        ]
        others = [self.text(node) for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)]
        return [*sorted(imports), *others]

    def _bound(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        """Yield a text for each name that is imported."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                yield f"import({self._of(alias.name) if alias.name in self._known else alias.name})"
                continue
            source = node.module or ""
            if (module := f"{source}.{alias.name}") in self._known:
                yield f"import({self._of(module)})"
            else:
                where = self._of(source) if source in self._known else source
                yield f"from({where} {alias.name} {alias.asname})"

    def _of(self, module: str) -> str:
        return f"module({self._contents.get(module, '')})"

    def _dotted(self, node: ast.expr) -> str:
        """Return "a.b.c" of such an expression, "" of another one; "a" alone may be a variable."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
