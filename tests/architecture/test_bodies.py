"""What functions hold: no hollow body, no assertion that cannot fail, no clock or chance by the back door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.support.sources import Module, everything, functions, imports, production


def _is_protocol(owner: ast.ClassDef | None) -> bool:
    return owner is not None and any(ast.unparse(base).split("[")[0].split(".")[-1] == "Protocol" for base in owner.bases)


def _is_declaration(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).split(".")[-1] in ("abstractmethod", "overload") for d in function.decorator_list)


def is_hollow(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a body is nothing but pass, ``...`` or NotImplementedError.

    A method that has nothing to do is written as a docstring that begins with "Nothing" and says why.
    """
    documented = ast.get_docstring(function) or ""
    body = function.body[1:] if documented else function.body
    if not body:
        return not documented.startswith("Nothing")
    return all(_does_nothing(statement) for statement in body) and not documented.startswith("Nothing")


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Raise) and statement.exc is not None:
        return ast.unparse(statement.exc).split("(")[0] == "NotImplementedError"
    return False


def cannot_fail(assertion: ast.Assert) -> bool:
    """Whether a condition is a true constant, a non-empty tuple, or a thing compared with itself."""
    test = assertion.test
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.Tuple):
        return bool(test.elts)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(isinstance(v, ast.Constant) and v.value for v in test.values)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is, ast.LtE, ast.GtE)):
        return ast.unparse(test.left) == ast.unparse(test.comparators[0]) and not _calls(test.left)
    return False


def _calls(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expression))


def test_no_function_of_the_distribution_is_hollow() -> None:
    """A body of pass, ``...`` or NotImplementedError exists only where a Protocol, an abstract method or an overload declares."""
    found = [
        f"{module.at(function)} {function.name}"
        for module in production()
        for function, owner in functions(module)
        if not _is_protocol(owner) and not _is_declaration(function) and is_hollow(function)
    ]
    assert found == []


def test_no_assertion_is_true_by_construction() -> None:
    """Every assert, in tests and elsewhere, can fail."""
    found = [m.at(node) for m in everything() for node in ast.walk(m.tree) if isinstance(node, ast.Assert) and cannot_fail(node)]
    assert found == []


def test_every_test_states_its_property() -> None:
    """The first line of each test says what holds."""
    found = [
        f"{module.at(function)} {function.name}"
        for module in everything()
        if module.name.startswith("tests.") and module.path.name.startswith("test_")
        for function, _ in functions(module)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    """Each module of the distribution that holds code begins with a docstring."""
    assert [m.name for m in production() if m.tree.body and not ast.get_docstring(m.tree)] == []


@pytest.mark.parametrize(
    ("body", "hollow"),
    [
        ("pass", True),
        ("...", True),
        ("'''Does a thing.'''", True),
        ("raise NotImplementedError('later')", True),
        ("'''Nothing is held open.'''", False),
        ("return 1", False),
        ("raise ValueError", False),
    ],
)
def test_the_check_for_hollow_bodies_sees_them(body: str, hollow: bool) -> None:
    """The check itself tells hollow from whole."""
    function = ast.parse(f"def f():\n    {body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert is_hollow(function) is hollow


@pytest.mark.parametrize(
    ("condition", "vain"),
    [
        *[(text, True) for text in ("True", "1", "(x, 'message')", "x == x", "x or True")],
        *[(text, False) for text in ("x", "x == y", "f() == f()", "x and True")],
    ],
)
def test_the_check_for_vain_assertions_sees_them(condition: str, vain: bool) -> None:
    """The check itself tells an assertion that cannot fail from one that can."""
    statement = ast.parse(f"assert {condition}").body[0]
    assert isinstance(statement, ast.Assert)
    assert cannot_fail(statement) is vain


def test_the_check_for_imports_sees_late_and_relative_ones() -> None:
    """Imports inside functions and relative ones are found, those for type checking are not."""
    text = "from ..a import b\nif TYPE_CHECKING:\n    import celery\ndef f():\n    import redis\n"
    found = {(i.name, i.late) for i in imports(Module("p.q.r", Path("r.py"), ast.parse(text)))}
    assert found == {("p.a", False), ("p.a.b", False), ("redis", True)}
