"""A process of ours that a supervisor starts and keeps: its log, its Celery application, when it ends, and the last line it says when it cannot go on.

Called by the entry points of node and task processes. What must never happen here: a traceback for what a person can mend; a process that outlives who started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from millstream_schema.errors import ConfigurationError, MillstreamError
from millstream_tasks.loading import loaded
from millstream_tasks.logs import log_through_celery, log_to_stderr

from .installation import Installation
from .lifetime import ended_with_signals, ended_with_stdin


class Runs(Protocol):
    """What a process does until it is told to stop; ``stop`` is thread-safe and signal-safe."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


def celery_application(target: str) -> Any:
    """The Celery application ``module:attribute``. Raises ConfigurationError."""
    found = loaded(target, "Celery application", "app")
    if not hasattr(found, "connection_for_write"):
        raise ConfigurationError(f"{target!r} is not a Celery application: write module:attribute of one")
    return found


def kept(log: Any, shown: str, name: str, celery: str | None, made: Callable[[Installation, Any], Runs]) -> int:
    """Make a process and run it until it ends; its exit code. ``shown``: the process's name in Celery's log format. ``made``: from the
    installation of the environment and the Celery application, or None.

    The installation never comes from the command line: a URL may hold a password.
    """
    log_to_stderr(os.environ.get("MILLSTREAM_LOG", "info"))
    app: Any = None
    try:
        if celery:
            app = celery_application(celery)
            log_through_celery(app, shown, name, os.environ)
        process = made(Installation.from_environment(os.environ), app)
        ended_with_signals(process.stop)
        ended_with_stdin(process.stop)
        process.run()
    except MillstreamError as exc:  # whoever keeps this process reads its last line
        if app is None:
            sys.stderr.write(f"millstream: {exc}\n")
        else:
            log.error(str(exc))
        return 1
    return 0
