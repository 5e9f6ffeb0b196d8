"""What makes two keys one key, and where that key lives: canonical encoding, stable hash, shard, owner.

Called by routing (which channel a record takes), by state ownership (which subtask holds a shard) and, for fingerprints, by whoever
compiles a model. Both ends of a HASH edge call the same functions, so records arrive where their state is.

What must never happen here: a result that depends on the process. ``hash()`` is salted per process, ``repr`` and ``id`` are no
identity, and JSON loses types. The encoding is part of the format of every checkpoint: changing it moves keys away from their state.

Identity of keys::

    None                        own tag
    str, bytes                  own tags; "1", b"1" and 1 are three keys
    bool, int, float, Decimal   by exact value: True, 1, 1.0 and Decimal("1.00") are one key; -0.0 is 0.0; infinities are keys
    aware datetime              by instant
    IntEnum, StrEnum            as their value
    plain Enum                  own tag, qualified class name + member name (a Flag: + value)
    tuple, NamedTuple           own tag, element by element
    frozen dataclass            own tag, qualified class name + compared fields
    NaN, naive datetime, rest   refused

Class names are without their module: the same job is ``__main__`` when run as a script and has a module name on a worker. Two classes of
one qualified name in two modules therefore share shards. That is harmless: a shard holds many keys, and its dictionary tells them apart.
For the same reason a wall-clock time that occurs twice counts by its first instant: Python holds both folds of one zone for equal.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import hashlib
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final

import xxhash

from millstream_schema.errors import CodecError, ConfigurationError, KeyRefused

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
# An integral Decimal is written out as an integer. Beyond this many digits it is refused: Decimal("1e999999999") would take the memory.
_MAX_DECIMAL_DIGITS: Final = 20_000

_xxh3 = xxhash.xxh3_64_intdigest


def _whole(key: Any) -> bytes:
    number = int.__index__(key)
    return b"i" + number.to_bytes((number.bit_length() >> 3) + 1, "little", signed=True)


def _text(key: Any) -> bytes:
    # Lone surrogates are legal in a Python str, so they are legal in a key.
    return b"s" + str.encode(key, "utf-8", "surrogatepass")


def _decimal(key: Any) -> bytes:
    sign, digits, exponent = Decimal.as_tuple(key)
    if exponent in ("n", "N"):
        raise KeyRefused("NaN cannot be a key: it is not equal to itself. Filter such records or map them to None before key_by.")
    if exponent == "F":
        return b"f-" if sign else b"f+"
    assert isinstance(exponent, int)
    kept = bytes(digits).rstrip(b"\0")
    if not kept:
        return _whole(0)
    exponent += len(digits) - len(kept)
    if exponent < 0:
        return b"q" + (b"-" if sign else b"+") + exponent.to_bytes(8, "little", signed=True) + kept
    if exponent + len(kept) > _MAX_DECIMAL_DIGITS:
        raise KeyRefused(f"a Decimal of more than {_MAX_DECIMAL_DIGITS} digits before the point cannot be a key; use its text.")
    return _whole(int(Decimal(key)))


def _real(key: Any) -> bytes:
    number = float.__float__(key)
    return _whole(int(number)) if number.is_integer() else _decimal(Decimal(number))


def _instant(key: Any) -> bytes:
    first = dt.datetime.replace(key, fold=0)
    if first.utcoffset() is None:
        raise KeyRefused(f"the naive datetime {key!r} cannot be a key: it names no instant. Give it a time zone, for example tzinfo=UTC.")
    return b"m" + _whole((first - _EPOCH) // _MICROSECOND)


def _sequence(tag: bytes, parts: Iterable[bytes]) -> bytes:
    # Each part carries its length, so no content can look like a border: ("a", "b") and ("a#b",) never meet.
    out = bytearray(tag)
    for part in parts:
        out += len(part).to_bytes(8, "little")
        out += part
    return bytes(out)


def _tuple(key: Any) -> bytes:
    return _sequence(b"t", [_encode(item) for item in tuple.__iter__(key)])


def _nothing(_key: Any) -> bytes:
    return b"n"


def _bytes(key: Any) -> bytes:
    return b"y" + bytes.__getitem__(key, slice(None))


_EXACT: Final[dict[type, Callable[[Any], bytes]]] = {
    str: _text,
    int: _whole,
    float: _real,
    bytes: _bytes,
    Decimal: _decimal,
    tuple: _tuple,
    dt.datetime: _instant,
    bool: _whole,
    type(None): _nothing,
}
# bool and None cannot be subclassed; a subclass of the others is the same key as its base as long as it is equal to it.
_BASES: Final = (str, int, float, bytes, Decimal, tuple, dt.datetime)


def _encode(key: Any) -> bytes:
    encoder = _EXACT.get(type(key))
    return encoder(key) if encoder is not None else _encode_other(key)


def _encode_other(key: Any) -> bytes:
    kind: Any = type(key)
    for base in _BASES:
        if isinstance(key, base):
            if kind.__eq__ is not base.__eq__ or kind.__hash__ is not base.__hash__:
                raise KeyRefused(f"{_named(kind)} cannot be a key: it changes what equality of {base.__name__} means. Use a plain value.")
            return _EXACT[base](key)
    if isinstance(key, enum.Enum) and kind.__eq__ is object.__eq__:
        member = _encode(key.value) if isinstance(key, enum.Flag) else _text(key.name)
        return _sequence(b"e", [_text(kind.__qualname__), member])
    if dataclasses.is_dataclass(key):
        return _dataclass(key)
    raise KeyRefused(
        f"{_named(kind)} cannot be a key. Keys are None, str, bytes, numbers, aware datetimes, enums, and tuples or frozen dataclasses "
        "of these; return one of them from key_by."
    )


def _dataclass(key: Any) -> bytes:
    kind = type(key)
    parameters = kind.__dataclass_params__
    if not (parameters.frozen and parameters.eq):
        raise KeyRefused(f"{_named(kind)} cannot be a key: only a dataclass declared with frozen=True and eq=True has lasting equality.")
    compared = [_encode(getattr(key, field.name)) for field in dataclasses.fields(key) if field.compare]
    return _sequence(b"d", [_text(kind.__qualname__), *compared])


def _named(kind: type) -> str:
    return f"a value of type {kind.__module__}.{kind.__qualname__}"


def canonical(key: Any) -> bytes:
    """Bytes that are the same for two keys when Python holds them for equal, in every process and release.

    The table in this module's docstring says what counts as what. Raises :class:`KeyRefused` for a value that cannot be a key.
    """
    try:
        return _encode(key)
    except RecursionError:
        raise KeyRefused("a key nested this deeply cannot be encoded; use a flatter one.") from None


def stable_hash(key: Any) -> int:
    """Unsigned 64-bit hash (XXH3) of :func:`canonical`; never negative. Raises :class:`KeyRefused`."""
    kind = type(key)
    if kind is str:
        try:
            return _xxh3(b"s" + key.encode())
        except UnicodeEncodeError:
            pass
    elif kind is int:
        return _xxh3(b"i" + key.to_bytes((key.bit_length() >> 3) + 1, "little", signed=True))
    return _xxh3(canonical(key))


def shard_of(key: Any, shard_count: int) -> int:
    """The state shard of a key, in ``range(shard_count)``. Raises :class:`KeyRefused` and, for a count below 1, ConfigurationError."""
    if shard_count < 1:
        raise ConfigurationError(f"shard_count must be at least 1, not {shard_count}")
    return stable_hash(key) % shard_count


def owner_of(shard: int, parallelism: int, shard_count: int) -> int:
    """The subtask, in ``range(parallelism)``, that holds a shard. Raises :class:`ConfigurationError` for numbers that do not fit."""
    _check(parallelism, shard_count)
    if not 0 <= shard < shard_count:
        raise ConfigurationError(f"shard {shard} does not exist: there are {shard_count}")
    return shard * parallelism // shard_count


def shards_of(owner: int, parallelism: int, shard_count: int) -> range:
    """The shards a subtask holds: exactly those that :func:`owner_of` gives to it. Raises :class:`ConfigurationError`."""
    _check(parallelism, shard_count)
    if not 0 <= owner < parallelism:
        raise ConfigurationError(f"subtask {owner} does not exist: the parallelism is {parallelism}")
    return range(-(-owner * shard_count // parallelism), -(-(owner + 1) * shard_count // parallelism))


def _check(parallelism: int, shard_count: int) -> None:
    if not 1 <= parallelism <= shard_count:
        raise ConfigurationError(f"parallelism must be between 1 and shard_count ({shard_count}), not {parallelism}: a shard has one owner")


def canonical_json(value: Any) -> bytes:
    """JSON of a plain value with sorted keys and no spaces, in UTF-8: the same bytes for the same value.

    Tuples are written as arrays. Raises :class:`CodecError` for NaN, infinities, keys that are no text (JSON would make 1 and "1" one
    key) and anything that JSON cannot hold.
    """
    try:
        _check_keys(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(
            f"not a plain JSON value: {error}. Use None, bool, int, finite float, str, list, and dict with str keys."
        ) from error


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"the key {name!r} is no str")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def fingerprint(value: Any) -> str:
    """32 hexadecimal digits: BLAKE2b-128 of :func:`canonical_json`. Raises :class:`CodecError`."""
    return hashlib.blake2b(canonical_json(value), digest_size=16).hexdigest()
