"""Where things stand: source roots, package names, what may lie at the top."""

from __future__ import annotations

import re

from tests.support.sources import ROOT, SOURCE_ROOTS, everything

import millstream

FOLDERS = frozenset({"app", "tasks", "coordinator", "schema", "tests", "flower", "docs", "examples", "benchmarks"})
FILES = frozenset({"pyproject.toml", "docker-compose.yml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"})
MADE = ("__pycache__", "build", "dist")  # by tools; ignored by git
NAMELESS = frozenset({"utils", "util", "helpers", "helper", "common", "models", "manager", "managers", "misc"})
NAMED_BY_DJANGO = {"examples.shop_django.shop.models"}


def test_no_package_file_lies_directly_in_a_source_root() -> None:
    """``app/__init__.py`` and the like would shadow users' own packages of that name."""
    assert [root for root in SOURCE_ROOTS if (ROOT / root / "__init__.py").exists()] == []


def test_each_source_root_holds_one_package_of_a_unique_name() -> None:
    """``tasks/`` holds ``millstream_tasks`` and nothing else that can be imported."""
    for root, package in SOURCE_ROOTS.items():
        packages = {path.parent.name for path in (ROOT / root).glob("*/__init__.py")}
        assert packages == {package}, root


def test_nothing_new_lies_at_the_top() -> None:
    """The top level is what its reader sees first."""
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and p.name not in MADE and not p.name.endswith(".egg-info")}
    assert found - FOLDERS - FILES == set()


def test_no_module_has_a_name_that_says_nothing() -> None:
    """A module is named after a noun of the domain."""
    found = [m.name for m in everything() if NAMELESS & set(m.name.split("."))]
    assert [name for name in found if name not in NAMED_BY_DJANGO] == []


def test_the_public_surface_is_a_sorted_list_of_what_is_there() -> None:
    """``millstream.__all__`` is sorted, without repeats, and every name in it can be imported."""
    names = list(getattr(millstream, "__all__", []))
    assert names, "millstream names nothing public"
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(millstream, name)] == []


def test_continuous_integration_is_one_command() -> None:
    """``.ci/run`` stops at the first error and calls ``make test``, nothing else."""
    script = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in script.splitlines() if line.strip() and not re.match(r"\s*#(?!!)|cd ", line)]
    assert lines == ["#!/usr/bin/env bash", "set -euo pipefail", "make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
