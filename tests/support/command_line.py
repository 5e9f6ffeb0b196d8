"""``millstream`` called in this process, on an installation below a directory: exit code and what is shown, never a traceback."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer.main
from typer.testing import CliRunner

from millstream.cli import main


@cache
def _command() -> Any:
    """Made once: that takes longer than what most commands do."""
    return typer.main.get_command(main)


class CommandLine:
    """``before``: words that stand before the arguments of each call."""

    def __init__(self, directory: Path, *before: str) -> None:
        self.directory = directory
        self._before = before

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        with patch("typer.testing._get_command", lambda _app: _command()):
            result = CliRunner().invoke(main, [*self._before, *arguments, "--local", str(self.directory)])
        assert "Traceback" not in result.stderr
        return result.exit_code, result.stdout, result.stderr

    def done(self, *arguments: str) -> str:
        """Stdout of a command that must succeed, on one line."""
        code, out, err = self(*arguments)
        assert (code, err) == (0, ""), (code, out, err)
        return " ".join(out.split())

    def data(self, *arguments: str) -> Any:
        return json.loads(self.done(*arguments, "--json"))

    def refused(self, *arguments: str) -> tuple[int, str]:
        """Exit code and text of a command that shows nothing else."""
        code, out, err = self(*arguments)
        assert code != 0 and out == "" and err.startswith("millstream: ")
        return code, " ".join(err.split())


def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No installation from the environment of whoever runs the tests; wide, plain output."""
    for name in [n for n in os.environ if n.startswith("MILLSTREAM_") and "TEST" not in n]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
