"""The public surface: a sorted, stored list, each name resolved only when it is asked for."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import millstream
import millstream_schema.errors

ROOT = Path(__file__).resolve().parents[3]
STORED = Path(__file__).with_name("public_names.txt")
HEAVY = {"sqlalchemy", "alembic", "celery", "kombu", "billiard", "amqp", "redis", "psycopg", "pymysql", "typer", "rich", "django", "flask"}


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys, json\nprint(json.dumps([*{{m.split('.')[0] for m in sys.modules}}]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_public_names_are_the_stored_list() -> None:
    """A name that is added or removed is a decision: it changes ``public_names.txt`` too."""
    assert STORED.read_text().split() == millstream.__all__


def test_the_public_names_are_sorted_without_repeats() -> None:
    """``__all__`` reads as an index."""
    assert sorted(set(millstream.__all__)) == millstream.__all__


@pytest.mark.parametrize("name", millstream.__all__)
def test_every_public_name_resolves_to_what_carries_it(name: str) -> None:
    """``from millstream import name`` gives the object of that name."""
    value = getattr(millstream, name)
    assert getattr(value, "__name__", name) == name


def test_type_checkers_see_every_public_name() -> None:
    """What is resolved lazily is imported for type checkers from the same module."""
    text = Path(str(millstream.__file__)).read_text()
    seen: dict[str, str] = {}
    for module, names in re.findall(r"^    from (\S+) import (\([^)]*\)|[^\n(]+)$", text, re.M):
        home = "millstream" + module if module.startswith(".") else module
        seen |= dict.fromkeys(re.findall(r"\w+", names), home)
    assert seen == {name: module for name, (module, _) in millstream._NAMES.items()}


def test_every_error_is_public() -> None:
    """Whatever Millstream raises on purpose can be caught by its public name."""
    errors = {n for n, v in vars(millstream_schema.errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert errors - set(millstream.__all__) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A typing error is told as such."""
    with pytest.raises(AttributeError, match="'millstream' has no attribute 'Pipelins'"):
        _ = millstream.Pipelins


def test_the_version_is_the_distributions() -> None:
    """One version, kept in one place."""
    assert millstream.__version__ == importlib.metadata.version("millstream")


def test_the_extra_for_redis_brings_what_kombus_transport_imports() -> None:
    """kombu names a part of it in its own extra only; without it neither Celery nor Millstream reaches the broker of a fresh environment."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [r.partition(";")[0] for r in importlib.metadata.requires("kombu") or () if 'extra == "redis"' in r]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted}
    assert len(names) > 1 and names <= {re.split(r"[^\w-]", requirement)[0] for requirement in extras["redis"]}


def test_what_a_module_of_pipelines_imports_is_light() -> None:
    """A subtask process that imports pipelines, sources and sinks loads neither SQLAlchemy nor Celery nor a broker's client."""
    names = "Pipelines, FileSource, SqlKeySource, RedisStreamSource, RabbitQueueSource, SqlAppendSink, SqlUpsertSink, FileSink, ProcessFunction, ValueState"
    assert loaded_after(f"from millstream import {names}") & HEAVY == set()


def test_importing_millstream_alone_loads_nothing_of_it() -> None:
    """``import millstream`` costs nothing but the table of names."""
    assert loaded_after("import millstream") & (HEAVY | {"millstream_schema", "millstream_tasks", "pydantic", "msgspec"}) == set()
