"""Nothing is there for show: every public function, class and method has a caller in the product, every setting a reader."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from tests.support.sources import Module, production

import millstream

# Name → why nothing in the product refers to it. Adding a line is a decision, not a repair.
UNREFERENCED: Mapping[str, str] = {
    "millstream.program.Commands.invoke": "Typer calls it for every command",
    "millstream.django.apps.MillstreamConfig": "Django finds it by INSTALLED_APPS",
    "millstream.django.management.commands.millstream.Command": "Django finds it by its module's name",
    "millstream.django.management.commands.millstream.Command.run_from_argv": "Django calls it for the command",
    "millstream.flask.MillstreamFlask": "users' applications make it; the extra's own door, not among millstream's names",
    "millstream.celery_tasks.DurableTask.apply_async": "Celery calls it for signatures, chains and delay",
    "millstream.celery_tasks.strategy": "Celery finds it by the name in DurableTask.Strategy",
    "millstream_tasks.channels.rabbitmq_link.AmqpLink.blocking_read": "py-amqp calls it while it waits for an answer",
    "millstream_tasks.operators.timers.Timers.delete_event": "users' process functions call it on ctx.timers",
    "millstream_tasks.operators.timers.Timers.delete_processing": "users' process functions call it on ctx.timers",
    "millstream_schema.values.TypeRegistry.name_of": "the inverse of register, for whoever inspects a job's types",
    "millstream_schema.values.TypeRegistry.type_of": "the inverse of register, for whoever inspects a job's types",
    "millstream_schema.plan.DeploymentPlan": "a model's name in the contract; assignment rows are what it is made of",
}
UNREAD_SETTINGS: Mapping[str, str] = {}
SHIPPED_FOR_TESTS = "millstream.testing."
"""Users' tests are its callers."""
SETTINGS = {
    "StreamSettings": "millstream_schema.settings",
    "RestartPolicy": "millstream_schema.settings",
    "EdgeConfig": "millstream_schema.model",
    "NodeSettings": "millstream_tasks.node",
    "Installation": "millstream.installation",
    "Deployment": "millstream_schema.control",
    "ConnectorContext": "millstream_schema.connectors",
}
FRAMEWORK_BASES = ("Protocol", "StartStopStep", "BaseModel", "RequestHandler", "NodeVisitor")
"""Whose members are called by name from elsewhere, or only declare."""


def definitions(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of every public function, class and method."""
    for node in module.tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if _registered(node):
            continue
        yield f"{module.name}.{node.name}", node
        if not isinstance(node, ast.ClassDef) or _declares(node):
            continue
        for member in node.body:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and not member.name.startswith("_") and not _registered(member):
                yield f"{module.name}.{node.name}.{member.name}", member


def _registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator hands it to a framework: a command, a task, a validator, a listener."""
    plain = (
        "dataclass",
        "property",
        "staticmethod",
        "classmethod",
        "contextmanager",
        "runtime_checkable",
        "cached_property",
        "setter",
        "final",
    )
    return any(ast.unparse(d).split("(")[0].split(".")[-1] not in plain for d in node.decorator_list)


def _declares(node: ast.ClassDef) -> bool:
    return any(ast.unparse(b).split("[")[0].split(".")[-1] in FRAMEWORK_BASES for b in node.bases)


def references(node: ast.AST, skip: ast.AST | None = None) -> Counter[str]:
    """How often each name is used as a name, an attribute or a word in a string of names; imports are no use."""
    found: Counter[str] = Counter()
    stack = [node]
    while stack:
        at = stack.pop()
        if at is skip:
            continue
        if isinstance(at, ast.Name):
            found[at.id] += 1
        elif isinstance(at, ast.Attribute):
            found[at.attr] += 1
        elif isinstance(at, ast.keyword) and at.arg:
            found[at.arg] += 1
        elif isinstance(at, (ast.MatchClass,)):
            found.update(at.kwd_attrs)
        stack.extend(ast.iter_child_nodes(at))
    return found


def unreferenced(modules: Sequence[Module]) -> list[str]:
    """Definitions that nothing but themselves refers to."""
    everywhere: Counter[str] = Counter()
    for module in modules:
        everywhere.update(references(module.tree))
    public = set(millstream.__all__)
    found = []
    for module in modules:
        if module.name.startswith(SHIPPED_FOR_TESTS):
            continue
        for name, node in definitions(module):
            parts = name.removeprefix(f"{module.name}.").split(".")
            if parts[0] in public:
                continue
            own = references(node)[parts[-1]]
            if everywhere[parts[-1]] <= own:
                found.append(name)
    return sorted(found)


def test_every_public_definition_has_a_caller_in_the_product() -> None:
    """A1, A18: what only tests call does nothing for a user; it is made, or it is removed."""
    assert set(unreferenced(production())) - set(UNREFERENCED) == set()


def test_no_exemption_outlives_its_reason() -> None:
    """What is referred to by now needs no exemption."""
    assert set(UNREFERENCED) - set(unreferenced(production())) == set()
    assert all(UNREFERENCED.values()) and all(UNREAD_SETTINGS.values())


def fields_of(module: Module, name: str) -> list[str]:
    (owner,) = (n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    named = [n.target.id for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return [n for n in named if n != "model_config"]


def reads(modules: Sequence[Module], but: str) -> set[str]:
    """Attributes that are read outside one module, and inside it outside of what checks values."""
    found = set()
    for module in modules:
        for node in ast.walk(module.tree):
            if module.name == but and isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in (*SETTINGS, "problems"):
                continue
            if module.name != but and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a15_every_setting_is_read_by_the_product(name: str) -> None:
    """A setting that nobody reads is a promise that nobody keeps."""
    modules = production()
    home = SETTINGS[name]
    module = next(m for m in modules if m.name == home)
    read = reads(
        [m for m in modules if not (m.name == "millstream_schema.plan" and name == "EdgeConfig")], home if name != "NodeSettings" else ""
    )
    unread = {f"{name}.{f}" for f in fields_of(module, name) if f not in read}
    assert unread - set(UNREAD_SETTINGS) == set()
    assert {s for s in UNREAD_SETTINGS if s.startswith(f"{name}.")} - unread == set()


def test_the_check_for_callers_sees_them() -> None:
    """The check itself tells a function that is called from one that only calls itself."""
    text = "def used(): pass\ndef alone(): return alone()\nclass K:\n    def m(self): pass\n    def n(self): return self.m()\nused(K)\n"
    module = Module("p.q", production()[0].path, ast.parse(text))
    assert unreferenced([module]) == ["p.q.K.n", "p.q.alone"]
