"""Who may change a value: state must share nothing with records that travel on.

Used by windows and keyed state. What must never happen here: a copy per record of what cannot be changed anyway.
"""

from __future__ import annotations

import copy
from typing import Any

from millstream_tasks.state import immutable

_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})


def frozen(value: Any) -> bool:
    """Whether nobody can change ``value`` in place."""
    return type(value) in _ATOMS or immutable((value,))


def own(value: Any) -> Any:
    """``value`` when nobody can change it, else a deep copy."""
    return value if frozen(value) else copy.deepcopy(value)
