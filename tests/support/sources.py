"""The project's own Python files, parsed: what the architecture tests look at.

Called by ``tests/architecture``. What must never happen here: importing the code that is looked at. A file that cannot be parsed is an
error, not a file that is passed over.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "schema": "millstream_schema",
    "tasks": "millstream_tasks",
    "coordinator": "millstream_coordinator",
    "app": "millstream",
    "flower": "millstream_flower",
}


@dataclass(frozen=True)
class Module:
    """One parsed file. ``name`` is dotted, as it is imported."""

    name: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.stmt | ast.expr) -> str:
        """``path:line`` relative to the project."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """One imported module. ``name`` is absolute and dotted; ``late`` is an import inside a function."""

    name: str
    line: int
    late: bool


@functools.cache
def production() -> tuple[Module, ...]:
    """Every module of the five packages."""
    return tuple(_load(path, ROOT / root) for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py")))


@functools.cache
def everything() -> tuple[Module, ...]:
    """Production, tests, examples and benchmarks."""
    beside = [_load(path, ROOT) for folder in ("tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    return (*production(), *beside)


def _load(path: Path, root: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    return Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, ast.parse(path.read_text(), str(path)))


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, also those inside functions; those only for type checking are left out: they never run."""
    yield from _imports(module, module.tree, late=False)


def _imports(module: Module, node: ast.AST, *, late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for branch in child.orelse:
                yield from _imports(module, branch, late=late)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child)
            yield Import(base, child.lineno, late)
            yield from (Import(f"{base}.{alias.name}", child.lineno, late) for alias in child.names)
        else:
            inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(module, child, late=inside)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.path.name == "__init__.py" else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def functions(module: Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Every function with the class whose method it is."""
    yield from _functions(module.tree, None)


def _functions(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child, owner
            yield from _functions(child, None)
        else:
            yield from _functions(child, child if isinstance(child, ast.ClassDef) else owner)
