"""Objects of users' modules by ``module:attribute``, as a person or the worker's own configuration wrote it.

What must never happen here: a name taken from data; an import that never ends and of which nobody hears.
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from millstream_schema.errors import ConfigurationError, MillstreamError
from millstream_schema.given import shown

log = structlog.get_logger(__name__)
TOLD_AFTER, TOLD_AGAIN = 10.0, 300.0
"""Seconds after which an import that has not ended is told of, and told of again."""


@contextmanager
def watched(module: str) -> Iterator[None]:
    """Tell of an import that does not end, and where it stands: meanwhile its process does nothing else. It is waited for all the same."""
    over = threading.Event()
    watch = threading.Thread(target=_tell, args=(module, threading.get_ident(), over), name="millstream-import", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _tell(module: str, thread: int, over: threading.Event) -> None:
    waited, pause = 0.0, TOLD_AFTER
    while not over.wait(pause):
        waited, pause = waited + pause, TOLD_AGAIN
        frame = sys._current_frames().get(thread)
        log.warning(
            "a module is still being imported; nothing runs here before that has ended",
            module=module,
            seconds=waited,
            at=_where(traceback.extract_stack(frame)),
        )


def _where(stack: traceback.StackSummary) -> str:
    """The lines of modules that import each other, and what is run just now."""
    lines = [f for f in stack if f.name == "<module>" and not f.filename.startswith("<")]
    if stack and stack[-1] not in lines:
        lines.append(stack[-1])
    return " > ".join(f"{f.filename}, line {f.lineno}, in {f.name}" for f in lines[-4:])


def loaded(target: str, what: str, attribute: str) -> Any:
    """The object; ``attribute``: the one that is meant when none is named. Raises ConfigurationError."""
    module, _, named = target.partition(":")
    refused = f"{what} {shown(target)} cannot be loaded"
    try:
        with watched(module):
            found = importlib.import_module(module)
    except MillstreamError as exc:
        raise ConfigurationError(f"{refused}: {exc}{_line(exc)}") from exc
    except Exception as exc:  # whatever the user's module raises, and what is no module's name
        missing = exc.name if isinstance(exc, ModuleNotFoundError) and exc.name else ""
        said = str(exc) if missing else f"{type(exc).__name__}: {exc}"
        advice = "; write module:attribute, and start this where that module can be imported, or name its directory in PYTHONPATH"
        raise ConfigurationError(f"{refused}: {said}{_line(exc)}{advice if f'{module}.'.startswith(f'{missing}.') else ''}") from exc
    try:
        return getattr(found, named or attribute)
    except AttributeError as exc:
        raise ConfigurationError(f"{refused}: {exc}; write module:attribute") from exc


def _line(error: Exception) -> str:
    """The line of a module that raised while it was imported, where one did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
