"""``module:attribute`` as a person writes it: found from where the command is typed, and what is wrong with the module is told with the line that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli import main
from millstream_schema.errors import ConfigurationError
from millstream_tasks.loading import loaded

PROJECT = """
from celery import Celery
from millstream import Handlers
app = Celery("found_here", broker="memory://")
handlers = Handlers(databases={"orders": "sqlite:///orders.db"})
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, which Python does not look in by itself, as under a console script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in ("found_here", "raises_here"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "--celery", "found_here:app"),
        ("schedules", "sync", "found_here:handlers"),
        ("schedules", "import", "--celery", "found_here:app", "--handlers", "found_here:handlers"),
        ("markers", "init", "--handlers", "found_here:handlers"),
    ],
)
def test_a_command_finds_the_modules_of_the_directory_it_is_typed_in(here: Path, arguments: tuple[str, ...]) -> None:
    """As ``celery -A`` does: a console script has the directory it is installed in, and no other."""
    (here / "found_here.py").write_text(PROJECT)
    run = CliRunner().invoke(main, ["--local", "data", "up"])
    assert run.exit_code == 0, run.stderr
    run = CliRunner().invoke(main, ["--local", "data", *arguments])
    assert "cannot be loaded" not in run.stderr
    assert run.exit_code in (0, 1), run.stderr  # doctor: no worker runs here


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('import os\nos.environ["NOT_SET"]', "KeyError: 'NOT_SET' ({file}, line 2)"),
        ("import not_installed_here", "No module named 'not_installed_here' ({file}, line 1)"),
        (
            "from millstream import Handlers\nhandlers = Handlers()\nfor f in (int, str):\n    handlers.task(name='a')(lambda: None)",
            "two handlers are named 'a': give one of them another name ({file}, line 4)",
        ),
    ],
)
def test_what_a_module_raises_is_told_with_its_line_and_without_other_advice(here: Path, text: str, told: str) -> None:
    """The module was found: to write another name or path would not help."""
    sys.path.insert(0, str(here))
    (here / "raises_here.py").write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        loaded("raises_here:handlers", "handlers", "handlers")
    assert str(refused.value) == f"handlers 'raises_here:handlers' cannot be loaded: {told.format(file=here / 'raises_here.py')}"


def test_a_module_that_is_not_there_is_told_with_where_it_is_looked_for(here: Path) -> None:
    """A wrong name, or a wrong directory."""
    with pytest.raises(ConfigurationError, match=r"No module named 'nowhere'; write module:attribute, .* PYTHONPATH$"):
        loaded("nowhere.at_all:app", "Celery application", "app")
