"""What a driver or user code said, as one line: it is stored as the reason of a failure and shown in tables and logs.

Called where an error of others is put into one of ours. Some draw: psycopg repeats the statement and puts a caret under it. What must never happen here: a word
of the error lost that is not such a drawing.
"""

from __future__ import annotations

import re

_DRAWING = re.compile(r"(^|\n)LINE \d+: [^\n]*\n[ \t]*\^")


def one_line(text: str) -> str:
    """``text`` without drawings and line breaks."""
    return " ".join(_DRAWING.sub("", text).split())
