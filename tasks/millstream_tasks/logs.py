"""Where events of a process of Millstream's own go: lines on standard error, or the logging that Celery sets up.

Called by whoever starts such a process: the CLI, ``millstream dev``, a node process, a task process and its handler processes. Never by the library: in the user's process
events go where the user's structlog sends them.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

PACKAGES = ("millstream", "millstream_tasks", "millstream_coordinator", "millstream_schema")


def level_of(text: str) -> int:
    """A level by name; INFO for a name that is none."""
    return logging.getLevelNamesMapping().get(text.upper(), logging.INFO)


def log_to_stderr(level: str) -> None:
    """One line an event, on standard error, from ``level`` up."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level_of(level)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is when an event is logged
    )


def log_of_a_command(environ: Mapping[str, str]) -> None:
    """Likewise, for a command, unless its process has logging of its own already: standard output is for what the command gives, which programs read."""
    if not structlog.is_configured():
        log_to_stderr(environ.get("MILLSTREAM_LOG", "info"))


def log_through_celery(app: Any, process: str, hostname: str, environ: Mapping[str, str]) -> None:
    """Events go through ``logging`` as Celery sets it up for the worker that started this process: same format, level, file and ``setup_logging`` receivers.

    Celery leaves ``-l`` and ``-f`` to its children in ``CELERY_LOG_LEVEL`` and ``CELERY_LOG_FILE``. ``MILLSTREAM_LOG`` is another level for Millstream's own events.
    """
    multiprocessing.current_process().name = process  # what Celery's format shows as processName
    level = environ.get("CELERY_LOG_LEVEL", "")
    app.log.setup_logging_subsystem(
        loglevel=int(level) if level.isdecimal() else logging.INFO, logfile=environ.get("CELERY_LOG_FILE") or None, hostname=hostname
    )
    if environ.get("MILLSTREAM_LOG"):
        for package in PACKAGES:
            logging.getLogger(package).setLevel(level_of(environ["MILLSTREAM_LOG"]))
    structlog.configure(
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _line],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """The event, what it is about, and an exception's traceback below."""
    text, trace = event.pop("event"), event.pop("exception", "")
    return " ".join([str(text), *(f"{k}={v!r}" for k, v in event.items())]) + (f"\n{trace}" if trace else "")
