"""The README and the documentation say what the code does: their code runs, their links lead somewhere, their generated parts are current.

What runs is marked in the Markdown: ``<!-- run: NAME.py -->`` before a Python block, ``<!-- run -->`` before a shell block, ``<!-- save: NAME -->`` before a block that others
need, ``<!-- output -->`` before what the run above must print (log lines aside). The blocks of one document share a directory and run in order.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

from millstream.cli import main as program

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (?P<verb>run|save|output)(?:: (?P<name>[\w.]+))? -->\s*(?:<!-- include: [^>]+ -->\s*)?)?^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.M | re.S,
)
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
SECONDS = 60


class Block(NamedTuple):
    """A fenced block and the mark before it (empty: none)."""

    verb: str
    name: str
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    return [Block(m["verb"] or "", m["name"] or "", m["language"], m["text"]) for m in BLOCK.finditer(document.read_text())]


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


def generator() -> ModuleType:
    """The script that writes the generated parts."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "reference" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(block: Block, directory: Path) -> str:
    """Run one block; what it printed, without log lines."""
    if block.language == "python":
        (directory / block.name).write_text(block.text)
        command = [sys.executable, "-W", "error", block.name]
    else:
        command = ["bash", "-euc", block.text]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{block.name or block.text}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not LOG_LINE.match(line))


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(b.verb == "run" for b in blocks(d))], ids=named)
def test_the_marked_blocks_of_a_document_run_and_print_what_it_says(document: Path, tmp_path: Path) -> None:
    """A reader who copies the blocks in order gets what the document shows."""
    printed: str | None = None
    for block in blocks(document):
        match block.verb:
            case "save":
                (tmp_path / block.name).write_text(block.text)
            case "run":
                printed = execute(block, tmp_path)
            case "output":
                assert printed is not None, f"{named(document)}: an output before anything ran"
                assert printed == block.text


def test_the_readme_and_the_guides_hold_blocks_that_run() -> None:
    """The test above covers the front page and each guide that shows code, and does not pass because a mark was misspelt."""
    runnable = {named(d) for d in DOCUMENTS if any(b.verb == "run" for b in blocks(d))}
    guides = (
        "admission",
        "custom-connectors",
        "celery",
        "endings-and-savepoints",
        "poison-records",
        "rescale-and-upgrade",
        "event-time-and-windows",
        "operate",
        "transactions",
    )
    assert {"README.md", "docs/quickstart.md", *(f"docs/how-to/{g}.md" for g in guides)} <= runnable
    marks = {m for d in DOCUMENTS for m in re.findall(r"<!-- (\w+)", d.read_text())}
    assert marks <= {"run", "save", "output", "generated", "include", "end"}


def test_the_generated_parts_are_those_the_code_gives() -> None:
    """Settings, commands, states, metrics, errors, tables and included examples: ``python docs/reference/generate.py`` writes them."""
    module = generator()
    assert [named(d) for d in DOCUMENTS if module.rendered(d.read_text()) != d.read_text()] == []
    used = {m for d in DOCUMENTS for m in re.findall(r"<!-- generated: ([^>]+?) -->", d.read_text())}
    assert used == set(module.PARTS)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_internal_link_resolves(document: Path) -> None:
    """Files and headings that a document points to are there."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and anchor not in {slug(h) for h in re.findall(r"^#+ (.+)$", file.read_text(), re.M)}):
            broken.append(target)
    assert broken == []


def shell_lines() -> list[tuple[str, str]]:
    """(document, line) of every shell block, continuation lines joined."""
    found = []
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language in ("bash", "sh"):
                found += [(named(document), line.strip()) for line in block.text.replace("\\\n", " ").splitlines()]
    return found


def test_every_make_target_that_is_named_is_in_the_makefile() -> None:
    """``make demo`` and ``make test`` among them."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    wanted = {word for _, line in shell_lines() for word in re.findall(r"^make ([a-z-]+)", line)}
    assert {"demo", "test"} <= wanted <= targets


def test_every_command_line_that_is_shown_is_one_the_program_knows() -> None:
    """Commands and options of ``millstream`` in shell blocks exist."""
    root: Any = typer.main.get_command(program)
    own = {option for p in root.params for option in p.opts}
    wrong = []
    for document, line in shell_lines():
        words = line.split()
        if not words or words[0] != "millstream":
            continue
        command: Any = root
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        known = own | {option for p in command.params for option in p.opts}
        unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
        if hasattr(command, "commands") or unknown:
            wrong.append(f"{document}: {line}")
    assert wrong == []


def test_every_decision_says_when_a_change_violates_it() -> None:
    """A record ends with the sentence a reviewer looks for."""
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert len(records) >= 7
    assert [r.name for r in records if "A change violates this when" not in r.read_text().strip().split("\n\n")[-1]] == []
