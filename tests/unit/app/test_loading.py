"""``module:attribute`` as a person writes it: found from where the command is typed, and what is wrong with the module is told with the line that is wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from millstream.cli import main
from millstream_schema.errors import ConfigurationError
from millstream_schema.ports import SystemClock
from millstream_tasks import loading
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
    for name in ("found_here", "raises_here", "stands_here", "imports_it"):
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


def test_an_import_that_does_not_end_is_told_of_now_and_then_with_where_it_stands(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process does nothing else, and would look as if it had nothing to do. It is waited for; what ends soon is not told of."""
    monkeypatch.setattr(loading, "TOLD_AFTER", 0.01)
    monkeypatch.setattr(loading, "TOLD_AGAIN", 0.01)
    monkeypatch.syspath_prepend(str(here))
    (here / "stands_here.py").write_text("import threading\nheld = threading.Event()\n\ndef wait():\n    assert held.wait(30)\n\nwait()\n")
    (here / "imports_it.py").write_text("import stands_here\nhandlers = 7\n")
    found: list[object] = []
    with structlog.testing.capture_logs() as logs:
        thread = threading.Thread(target=lambda: found.append(loaded("imports_it", "handlers", "handlers")))
        thread.start()
        until(lambda: len(logs) >= 2 and "in wait" in logs[-1]["at"] and "threading" in logs[-1]["at"])
        sys.modules["stands_here"].held.set()
        thread.join(30)
    assert found == [7] and logs[0]["module"] == "imports_it" and "still being imported" in logs[0]["event"]
    stands = next(entry["at"] for entry in logs if "imports_it.py, line 1" in entry["at"])
    assert stands.index("imports_it.py, line 1, in <module>") < stands.index("stands_here.py, line 7, in <module>")
    assert {t.name for t in threading.enumerate()}.isdisjoint({"millstream-import"})


def until(condition: Callable[[], bool]) -> None:
    clock, pause = SystemClock(), threading.Event()
    end = clock.monotonic() + 30
    while not condition():
        assert clock.monotonic() < end
        pause.wait(0.005)
