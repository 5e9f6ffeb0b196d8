"""What users' values and exceptions say of themselves, as it can be sent and stored.

What must never happen here: an exception out of a ``__str__`` that is not ours.
"""

from __future__ import annotations

from typing import Any

from millstream_schema.reasons import storable

TEXT_KEPT = 20_000
"""Characters of a text that are kept."""


def text_of(value: Any) -> str:
    """What it says, as every database takes it: no NUL, no half characters, not too long. Its own ``__str__`` may raise anything."""
    try:
        said = str(value)
    except Exception:
        return f"({type(value).__name__} whose text cannot be had)"
    return storable(said[:TEXT_KEPT])
