"""What people, drivers and user code said, as it can be stored and shown: in one line as the reason of a failure, in a form every database takes.

Called where an error of others is put into one of ours, and where a person's words come in. Some draw: psycopg repeats the statement and puts a caret under it.
What must never happen here: a word lost that is not such a drawing.
"""

from __future__ import annotations

import re

_DRAWING = re.compile(r"(^|\n)LINE \d+: [^\n]*\n[ \t]*\^")


def one_line(text: str) -> str:
    """``text`` without drawings and line breaks."""
    return " ".join(_DRAWING.sub("", text).split())


def storable(text: str) -> str:
    """``text`` as every database takes it: a NUL and half characters are written out."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
