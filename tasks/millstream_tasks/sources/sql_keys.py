"""Key values in cursors, with their exact type.

Called by the SQL key source. What must never happen here: a key that comes back as another type or value than the database gave (an int
as a float, a timestamp without its offset or microseconds).
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from millstream_schema.connectors import Json
from millstream_schema.errors import SourceError

# type -> (tag, to text, from text). Text throughout: a JSON number may come back as another number.
_CODECS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("int", str, int),
    str: ("str", str, str),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    float: ("float", float.hex, float.fromhex),
    bool: ("bool", str, lambda text: text == "True"),
    Decimal: ("decimal", str, Decimal),
    dt.datetime: ("datetime", dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: ("date", dt.date.isoformat, dt.date.fromisoformat),
    uuid.UUID: ("uuid", str, uuid.UUID),
}
_BY_TAG = {tag: read for tag, _, read in _CODECS.values()}


def encode_key(value: Any) -> Json:
    """``[tag, text]``. Raises :class:`SourceError` for a type that cannot be a key."""
    codec = _CODECS.get(type(value))
    if codec is None:
        raise SourceError(f"a key of type {type(value).__qualname__} cannot be kept; use {', '.join(t.__name__ for t in _CODECS)}")
    return [codec[0], codec[1](value)]


def decode_key(cursor: Json) -> Any:
    """The value that :func:`encode_key` was given. Raises :class:`SourceError` for anything else."""
    if isinstance(cursor, list) and len(cursor) == 2:
        tag, text = cursor
        if isinstance(tag, str) and isinstance(text, str) and tag in _BY_TAG:
            try:
                return _BY_TAG[tag](text)
            except (ValueError, ArithmeticError):
                pass
    raise SourceError(f"{cursor!r} is not a cursor of an SQL key source")
