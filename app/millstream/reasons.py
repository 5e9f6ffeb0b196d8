"""A job's reason as one line. Reasons quote what drivers and user code raised, and some of those draw: psycopg repeats the statement and puts a caret under it.

Called by ``Jobs`` and the CLI. What must never happen here: a word of the error lost that is not such a drawing.
"""

from __future__ import annotations

import re

_DRAWING = re.compile(r"\nLINE \d+: [^\n]*\n[ \t]*\^")


def one_line(text: str) -> str:
    """``text`` without drawings and line breaks."""
    return " ".join(_DRAWING.sub("", text).split())
