"""Objects of users' modules by ``module:attribute``, as a person or the worker's own configuration wrote it.

What must never happen here: a name taken from data.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from millstream_schema.errors import ConfigurationError, MillstreamError
from millstream_schema.given import shown


def loaded(target: str, what: str, attribute: str) -> Any:
    """The object; ``attribute``: the one that is meant when none is named. Raises ConfigurationError."""
    module, _, named = target.partition(":")
    refused = f"{what} {shown(target)} cannot be loaded"
    try:
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
