"""How far an attempt says it is, and what it notes: evidence for people, never a decision. Pure.

Told by handlers (``ctx.progress``, ``ctx.note``), kept with the attempt, shown beside its task. What must never happen here: something told that a database refuses, so that a
heartbeat or an end could not be written beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ..reasons import one_line, storable

NOTES = 100
"""Notes of one attempt that are kept: its first."""
TEXT, FIELDS, VALUE = 2_000, 20, 500
"""Characters of a note or message, fields of a note, characters of a field's name or value: what is beyond is cut off."""


class Progress(msgspec.Struct, frozen=True):
    """So much of ``total`` is done; None: nobody knows of how much. ``number`` grows within the attempt."""

    number: int
    done: float
    total: float | None
    message: str


class Note(msgspec.Struct, frozen=True):
    """A remark. ``fields``: a JSON object, or empty; ``number``: which of its attempt, from 1."""

    number: int
    text: str
    fields: str


class Told(msgspec.Struct, frozen=True):
    """What an attempt has said since it was last heard."""

    progress: Progress | None = None
    notes: tuple[Note, ...] = ()


class ProgressRow(msgspec.Struct, frozen=True, kw_only=True):
    """The last progress of an attempt, and when it was stored (UTC µs)."""

    task: str
    fence: int
    number: int
    done: float
    total: float | None
    message: str
    at_us: int


class NoteRow(msgspec.Struct, frozen=True, kw_only=True):
    """A note of an attempt, and when it was stored (UTC µs)."""

    task: str
    fence: int
    number: int
    text: str
    fields: str
    at_us: int


def progress_of(number: int, done: float, total: float | None, message: str) -> Progress:
    """As it can be stored. Raises ValueError, TypeError for what is no finite number."""
    amounts = [float(a) for a in (done, total) if a is not None]
    if done is None or not all(math.isfinite(a) for a in amounts):
        raise ValueError(f"progress is told in finite numbers, not {done!r} of {total!r}")
    return Progress(number, amounts[0], amounts[1] if total is not None else None, _cut(message, TEXT))


def note_of(number: int, text: str, fields: Mapping[str, object]) -> Note:
    """As it can be stored: what is too much is cut off, what is no plain value is written out."""
    kept = {_cut(k, VALUE): _plain(v) for k, v in list(fields.items())[:FIELDS]}
    return Note(number, _cut(text, TEXT), msgspec.json.encode(kept).decode() if kept else "")


def later(before: Told | None, now: Told) -> Told:
    """Both, the newer progress alone."""
    if before is None:
        return now
    return Told(now.progress or before.progress, before.notes + now.notes)


def told(row: ProgressRow) -> str:
    """In one line, without the time."""
    far = f"{_amount(row.done)} of {_amount(row.total)}" if row.total is not None else _amount(row.done)
    said = f" ({one_line(row.message)})" if row.message else ""
    return f"{far} done{said}"


def _amount(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and abs(number) < 2**53 else f"{number:g}"


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _cut(value, VALUE)


def _cut(value: object, length: int) -> str:
    """Its own ``__str__`` may raise anything."""
    try:
        said = str(value)
    except Exception:
        return f"({type(value).__name__} whose text cannot be had)"
    return storable(said[:length])


__all__ = ["NOTES", "Note", "NoteRow", "Progress", "ProgressRow", "Told", "later", "note_of", "progress_of", "told"]
