"""``examples/tasks``: each program runs as its docstring says and prints what it says, line by line; none is missing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "examples" / "tasks"
NOT_EXAMPLES = {"__init__", "workplace"}
NAMES = sorted(path.stem for path in HOME.glob("*.py") if path.stem not in NOT_EXAMPLES)
WANTED = {
    "application_quota": "an application's quota over all its queues",
    "batch_accept": "files accepted in one batch: identity for each, partial results",
    "cancel_running": "cancel while running",
    "changed_parameters": "a linked task with changed parameters",
    "file_conversion": "CSV to JSON with a worker",
    "health_check": "health check",
    "manual_recovery": "a standalone task reviewed and retried as a linked task",
    "operation_lookup": "looking up operations",
    "outbox": "transactional outbox",
    "periodic_sync": "periodic data sync",
    "priority_isolation": "priority and isolation of applications",
    "queue_limits": "rate limit and backpressure of a queue",
    "relative_delay": "relative delay",
    "result_inbox": "reliable subscription to results",
    "safe_retry": "limited safe retry",
    "shared_resource": "a resource shared across queues",
}
"""What people do with durable tasks, and the example that shows it."""
SECTIONS = ("Shows", "Set-up", "Source", "Command", "Input", "Expected output", "Failure path", "Clean-up")
ID = re.compile(r"\b(?:task|session|subscription|lease|request)-[0-9a-f]{12,20}\b")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
SECONDS = 90


def sections(name: str) -> dict[str, str]:
    """The parts of an example's docstring; "" is what comes before them."""
    text = ast.get_docstring(ast.parse((HOME / f"{name}.py").read_text())) or ""
    parts = re.split(rf"^({'|'.join(map(re.escape, SECTIONS))})$", text, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def unindented(text: str) -> list[str]:
    return [line.removeprefix("    ") for line in text.strip("\n").rstrip().splitlines()]


def with_stable_ids(lines: list[str]) -> list[str]:
    """Ids, which chance makes, as TASK-1, TASK-2 … in the order in which they appear."""
    known: dict[str, str] = {}

    def stable(found: re.Match[str]) -> str:
        kind = found[0].partition("-")[0].upper()
        return known.setdefault(found[0], f"{kind}-{1 + sum(name.startswith(kind) for name in known.values())}")

    return [ID.sub(stable, line) for line in lines]


def printed(command: str, temporary: Path) -> list[str]:
    """Run an example as its reader does; what it printed, log lines aside."""
    words = command.split()
    assert words[0] == "python"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")} | {"TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-W", "error", *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return [line for line in done.stdout.splitlines() if not LOG_LINE.match(line)]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_its_docstring_says(name: str, tmp_path: Path) -> None:
    """In a temporary directory, which it removes."""
    command = f"python -m examples.tasks.{name}"
    parts = sections(name)
    assert unindented(parts["Command"]) == [f"``{command} [--directory DIR]``"]
    assert with_stable_ids(printed(command, tmp_path)) == unindented(parts["Expected output"])
    assert list(tmp_path.iterdir()) == []


def test_an_example_works_in_the_directory_it_is_given(tmp_path: Path) -> None:
    """What it leaves there is the reader's to look at."""
    given = tmp_path / "mine"
    assert printed(f"python -m examples.tasks.file_conversion --directory {given}", tmp_path)
    assert (given / "orders.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_all_its_reader_needs(name: str) -> None:
    """Each part is there, in order, and says something; only public names are imported."""
    parts = sections(name)
    assert tuple(parts) == ("", *SECTIONS)
    assert [part for part, text in parts.items() if len(text.split()) < 1] == []
    tree = ast.parse((HOME / f"{name}.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert [m for m in imported if m.partition(".")[0].startswith("millstream") and m != "millstream"] == []


def test_every_use_has_its_example_and_its_line_in_the_table() -> None:
    """Nothing is missing, nothing is left over; the README names the command of each."""
    assert set(NAMES) == set(WANTED)
    table = (HOME / "README.md").read_text()
    assert [name for name in NAMES if f"`python -m examples.tasks.{name}`" not in table] == []
