"""Two minutes to a durable task: the three example projects, each by the lines of its README, with a real ``celery worker`` and, where there is one, the framework's own server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.processes, pytest.mark.redis]


class Shop:
    """A copy of one example project, and the lines of its README."""

    def __init__(self, name: str, home: Path, broker: str) -> None:
        self.home = home / name
        shutil.copytree(ROOT / "examples" / name, self.home)
        (self.home / "data").mkdir()
        self.readme = (self.home / "README.md").read_text()
        self.environment = {**os.environ, "SHOP_BROKER": broker, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
        self.log = self.home / "worker.log"

    def blocks(self) -> list[list[str]]:
        found = re.findall(r"^```bash\n(.*?)^```", self.readme, re.M | re.S)
        return [[line for line in block.splitlines() if line and not line.startswith("pip install")] for block in found]

    def line(self, command: str) -> str:
        """One line, to its end; its output."""
        done = subprocess.run(["bash", "-c", command], cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (
            f"{command}: {done.stdout}{done.stderr}\n{self.log.read_text(errors='replace') if self.log.exists() else ''}"
        )
        return done.stdout

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """One line that goes on."""
        with (
            self.log.open("ab") as log,
            subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.home, env=self.environment, stdout=log, stderr=log) as process,
        ):
            try:
                yield
            finally:
                process.terminate()
                try:
                    process.wait(20)
                finally:
                    process.kill()

    def eventually(self, command: str, what: str, wanted: int) -> None:
        """Until ``tasks list`` shows so many as succeeded."""
        deadline, pause = time.monotonic() + 40, threading.Event()
        while True:
            states = [t["state"] for t in json.loads(self.line(f"{command} --json"))]
            if states.count("SUCCEEDED") == wanted and len(states) == wanted:
                return
            assert time.monotonic() < deadline, f"{what}: {states}\n{self.log.read_text(errors='replace')}"
            pause.wait(0.2)


def test_a_celery_project(tmp_path: Path, redis_url: str) -> None:
    """delay and ``celery call``: both run."""
    shop = Shop("shop_celery", tmp_path, redis_url)
    setup, (worker,), (first, call, listed) = shop.blocks()
    for line in setup:
        shop.line(line)
    with shop.running(worker):
        assert shop.line(first).splitlines() == ["invoice 7 is sent"]
        shop.line(call)
        shop.eventually(listed, "both tasks succeeded", 2)


@pytest.mark.parametrize(
    ("name", "server"),
    [("shop_flask", "flask --app shop:flask run --port 5001"), ("shop_django", "python manage.py runserver 8001 --noreload")],
)
def test_a_web_project(name: str, server: str, tmp_path: Path, redis_url: str) -> None:
    """An order and its task commit together; an order that fails leaves no task."""
    shop = Shop(name, tmp_path, redis_url)
    setup, (post, listed) = shop.blocks()
    assert server.removesuffix(" --noreload") in shop.readme
    for line in setup:
        shop.line(line)
    worker = re.findall(r"`(celery -A [\w.]+ worker)`", shop.readme)[0]
    with ExitStack() as stack:
        stack.enter_context(shop.running(worker))
        stack.enter_context(shop.running(server))
        retried = f"{post} --fail --silent --show-error --retry 40 --retry-connrefused --retry-delay 0 --retry-max-time 30"
        assert shop.line(retried).startswith("task-")
        shop.eventually(listed, "the task succeeded", 1)
        again = subprocess.run(
            ["bash", "-c", f"{post} --silent -o /dev/null -w '%{{http_code}}'"], cwd=shop.home, capture_output=True, text=True, timeout=30
        )
        assert again.stdout == "500"
        shop.eventually(listed, "the failed order left no task", 1)
