"""The quickstart's page for Celery, followed to the letter: its blocks, in their order, in a directory of their own; only the servers' addresses are others."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import tenancy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
SECONDS = 60
ENTRY = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}: [A-Z]+/\w+\] ")
"""How Celery begins a line, unless it is told otherwise."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def saved() -> dict[str, str]:
    """Files the page has its reader save, by name."""
    return {
        m[0]: m[1] for m in re.findall(r"<!-- save: ([\w.]+) -->\s*(?:<!-- include: [^>]+ -->\s*)?```\w+\n(.*?)^```", PAGE, re.M | re.S)
    }


@contextlib.contextmanager
def started(line: str, directory: Path, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of the page's lines that go on, in a terminal of its own; ended with SIGTERM, as a service manager does it."""
    with (
        log.open("wb") as out,
        subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=directory, env=environment, stdout=out, stderr=out) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


@pytest.mark.processes
@pytest.mark.redis
@pytest.mark.postgres
def test_whoever_follows_the_page_gets_what_it_shows_and_one_log(tmp_path: Path, redis_url: str, postgres_url: str) -> None:
    """Exports, tables, worker, beat, submit: the job finishes with the totals on the page, and every line of the worker's log has Celery's format."""
    section = PAGE[PAGE.index("## Run it on Celery") : PAGE.index("## Next")]
    administration, _check, exports, first, second, third = blocks(section, "bash")
    assert "CREATE DATABASE" in administration
    for name, text in saved().items():
        (tmp_path / name).write_text(text)
    with tenancy.redis_database(redis_url.rpartition("/")[0] + "/0") as channels:
        for shown, real in {
            "redis://127.0.0.1:6379/0": redis_url,
            "redis://127.0.0.1:6379/1": channels,
            "postgresql+psycopg://shop:secret@127.0.0.1/shop": postgres_url,
        }.items():
            assert shown in exports
            exports = exports.replace(shown, real)
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("MILLSTREAM_", "SHOP_"))}
        plain["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = dict(line.split("=", 1) for line in run(f"{exports}\nenv -0", tmp_path, plain).split("\0") if line)
        up, worker = first.strip().splitlines()
        run(up, tmp_path, environment)
        log = tmp_path / "worker.log"
        with started(worker, tmp_path, environment, log), started(second.strip(), tmp_path, environment, tmp_path / "beat.log"):
            said = run(third, tmp_path, environment)
    assert said == next(b for b in blocks(section, "text") if b.startswith("revenue is"))
    lines = log.read_text().splitlines()
    ours = [line for line in lines if "node started" in line]
    assert len(ours) == 1 and ENTRY.match(ours[0]) and "INFO/MillstreamNode" in ours[0]
    after_banner = lines[next(i for i, line in enumerate(lines) if ENTRY.match(line)) :]
    others = [line for line in after_banner if line.strip() and not ENTRY.match(line)]
    assert [line for line in others if not line.startswith("worker: ")] == []  # Celery's own farewell has no format


def run(script: str, directory: Path, environment: dict[str, str]) -> str:
    """Standard output of a block that must succeed."""
    done = subprocess.run(["bash", "-euc", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{script}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
