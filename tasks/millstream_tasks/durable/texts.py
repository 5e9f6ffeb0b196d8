"""What users' values and exceptions say of themselves, as it can be sent and stored.

What must never happen here: an exception out of a ``__str__`` that is not ours.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

import millstream_schema
from millstream_schema.reasons import storable

TEXT_KEPT = 20_000
"""Characters of a text that are kept."""
_OURS = tuple(str(Path(module).parent) for module in (__file__, millstream_schema.__file__))
_FOREIGN = ("<", *_OURS, *{path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")})


def text_of(value: Any) -> str:
    """What it says, as every database takes it: no NUL, no half characters, not too long. Its own ``__str__`` may raise anything."""
    try:
        said = str(value)
    except Exception:
        return f"({type(value).__name__} whose text cannot be had)"
    return storable(said[:TEXT_KEPT])


def where_of(error: BaseException) -> str:
    """Where it was raised, and, when that is in a library, the line of the user's own code that called it; empty for what was never raised."""
    frames = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    theirs = [f for f in frames if not f[0].co_filename.startswith(_OURS)] or frames
    own = [f for f in theirs if not f[0].co_filename.startswith(_FOREIGN)] or theirs[:1]
    last, called = frames[-1], own[-1]
    return f" (at {_line(*last)})" if last is called else f" (at {_line(*last)}, called by {_line(*called)})"


def _line(code: CodeType, number: int) -> str:
    return f"{code.co_name}, {'/'.join(Path(code.co_filename).parts[-2:])} line {number}"
