"""Objects of users' modules by ``module:attribute``, as a person or the worker's own configuration wrote it.

What must never happen here: a name taken from data.
"""

from __future__ import annotations

import importlib
from typing import Any

from millstream_schema.errors import ConfigurationError
from millstream_schema.given import shown


def loaded(target: str, what: str, attribute: str) -> Any:
    """The object; ``attribute``: the one that is meant when none is named. Raises ConfigurationError."""
    module, _, named = target.partition(":")
    try:
        return getattr(importlib.import_module(module), named or attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as exc:  # the latter two for what is no module's name
        raise ConfigurationError(f"{what} {shown(target)} cannot be loaded: {exc}; write module:attribute") from exc
