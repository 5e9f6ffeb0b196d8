"""Who may import what: arrows between the rooms, doors for third parties, light processes."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.sources import ROOT, everything, imports, production

# Third party → the modules it comes in by, as patterns on dotted names. One door each: adding a line is a decision, not a repair.
DOORS: Mapping[str, Sequence[str]] = {
    # the app makes Celery's app, worker steps and signals; Flower's tab reads its events
    "celery": ("millstream.*", "millstream_flower.*"),
    "billiard": ("millstream.*",),
    # RabbitMQ as data channel, source and sink; the app hands hints and control messages to Celery's own connection
    "kombu": ("millstream.*", "millstream_tasks.channels.rabbit*", "millstream_tasks.sources.rabbit*", "millstream_tasks.sinks.rabbit*"),
    "amqp": ("millstream_tasks.channels.rabbit*", "millstream_tasks.sources.rabbit*", "millstream_tasks.sinks.rabbit*"),
    "vine": (),
    # Redis as data channel, source and sink
    "redis": ("millstream_tasks.channels.redis*", "millstream_tasks.sources.redis*", "millstream_tasks.sinks.redis*"),
    "hiredis": (),
    # the control store and its migrations
    "sqlalchemy": ("millstream_schema.store*", "millstream_schema.migrations*", "millstream.*"),
    "alembic": ("millstream_schema.store*", "millstream_schema.migrations*"),
    # user databases, reached from subtask processes without a toolkit
    "psycopg": ("millstream_schema.target.connection",),
    "pymysql": ("millstream_schema.target.connection",),
    "flower": ("millstream_flower.*",),
    "tornado": ("millstream_flower.*",),
    # web frameworks, each by its integration
    "django": ("millstream.django*",),
    "flask": ("millstream.flask",),
    "flask_sqlalchemy": (),
    # cron expressions; the other one is the tests' oracle
    "cronsim": ("millstream_schema.durable.recurrence",),
    "croniter": (),
    "typer": ("millstream.*",),
    "rich": ("millstream.*",),
}
PICKLES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
BROKERS = frozenset({"celery", "kombu", "billiard", "amqp", "redis"})
SUBTASK_MAIN = ROOT / "tasks" / "millstream_tasks" / "subtask_main.py"


def _allowed(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(module, p) or module == p.removesuffix(".*") for p in patterns)


def _loaded(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("library", sorted(DOORS))
def test_a_third_party_comes_in_by_its_door(library: str) -> None:
    """Only the modules listed for it import the library, at the top or inside a function."""
    wrong = {
        f"{module.path.relative_to(ROOT)}:{found.line}"
        for module in production()
        for found in imports(module)
        if found.name.split(".")[0] == library and not _allowed(module.name, DOORS[library])
    }
    assert sorted(wrong) == []


def test_arrows_between_the_rooms_point_one_way() -> None:
    """``lint-imports`` passes: millstream → tasks | coordinator → schema, and the siblings never meet."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_production_module_imports_tests_or_examples() -> None:
    """The distribution works without them."""
    outside = {"tests", "examples", "benchmarks", "pytest", "hypothesis"}
    assert [f"{m.name}:{i.line}" for m in production() for i in imports(m) if i.name.split(".")[0] in outside] == []


def test_imports_inside_functions_are_for_optional_extras_only() -> None:
    """What is always installed is imported at the top, where a reader and a checker see it."""
    extras = {"redis", "hiredis", "amqp", "kombu", "psycopg", "pymysql", "flower", "tornado", "django", "flask"}
    # Our own doors to those, opened only by a process that was told to use them.
    doors = (
        "millstream_tasks.channels.redis",
        "millstream_tasks.channels.rabbitmq",
        "millstream_tasks.snapshots.sql",
        "millstream.messages",
        "millstream.publications",
        "millstream.schedule_imports",
    )
    wrong = [
        f"{module.path.relative_to(ROOT)}:{found.line} {found.name}"
        for module in production()
        for found in imports(module)
        if found.late and found.name.split(".")[0] not in extras and not found.name.startswith(doors)
    ]
    assert wrong == []


def test_nothing_is_pickled_anywhere() -> None:
    """Data is never code: no module of the project, its tests or examples imports a pickle of any kind."""
    assert [f"{m.name}:{i.line}" for m in everything() for i in imports(m) if i.name.split(".")[0] in PICKLES] == []


def test_importing_millstream_brings_in_no_optional_extra() -> None:
    """``pip install millstream`` without extras can be imported."""
    assert _loaded("import millstream") & {"redis", "hiredis", "psycopg", "pymysql", "flower", "tornado", "django", "flask"} == set()


def test_the_coordinator_brings_in_no_broker_and_nothing_that_runs_user_code() -> None:
    """Deciding needs no broker client, no Celery, and nothing of the rooms that run or offer."""
    every_module = (
        "import importlib, pkgutil, millstream_coordinator as c\n"
        "for m in pkgutil.walk_packages(c.__path__, c.__name__ + '.'): importlib.import_module(m.name)"
    )
    assert _loaded(every_module) & (BROKERS | {"millstream_tasks", "millstream"}) == set()


def test_a_subtask_process_loads_neither_celery_nor_kombu_nor_sqlalchemy() -> None:
    """A subtask starts in a fraction of a second and holds no client that another owns: its entry module loads none of them."""
    if not SUBTASK_MAIN.exists():
        pytest.skip("millstream_tasks.subtask_main is not written yet")
    assert _loaded("import millstream_tasks.subtask_main") & (BROKERS | {"sqlalchemy", "alembic"}) == set()
