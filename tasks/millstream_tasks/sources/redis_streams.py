"""Redis streams as a source: one split a stream, read by entry id, no consumer groups.

Built by user code; read by the subtask runner. Replayable for as long as the stream keeps its entries. What must never happen here:
entries that were trimmed before they were read passed over in silence; the look at the stream's counters and the read are one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from millstream_schema.connectors import ConnectorContext, Json, PoisonPolicy, Read, SourceCapability, Split
from millstream_schema.errors import ConfigurationError, SourceError, SourceUnavailable
from millstream_tasks.sources.broker_urls import BrokerUrl
from millstream_tasks.sources.memory import qualified_name
from millstream_tasks.sources.outage import Outage, negative_problems
from millstream_tasks.sources.poison import PoisonTally, policy_problem

FETCH_ENTRIES = 1000
START = "0-0"
SCHEMES = ("redis", "rediss", "unix")
EXAMPLE = "redis://host:6379/0"


class Position(NamedTuple):
    """Last entry taken, and how many entries the stream ever had up to it (None: not known yet, or Redis < 7)."""

    id: str
    entries_read: int | None


class RedisStreamSource:
    """Entries of Redis streams as dicts of their fields.

    - ``streams``: keys; ``match``: a glob of further keys that hold streams, looked for again and again. Each is read from its beginning.
    - ``decode``: the encoding of field names and values, None leaves bytes. ``parse`` is called with the dict; what it raises is poison.
    - ``id_timestamps=True``: the milliseconds of the entry's id are the record's event time.
    - ``poison``: ``fail``, ``skip`` or ``dead-letter`` (the raw bytes are the fields as a MessagePack array).
    - ``poll_interval`` and ``give_up`` in seconds.

    A field given twice in one entry keeps its last value. Redis ≥ 7 counts entries, so a loss is found exactly; on 6.2 the stream must
    keep the last entry read (or be empty of newer ones), else the source stops because it cannot tell.
    """

    kind = "redis-stream"
    version = 1
    bounded = False
    capability = SourceCapability.REPLAYABLE

    def __init__(
        self,
        url: str,
        streams: Sequence[str] = (),
        *,
        match: str | None = None,
        decode: str | None = "utf-8",
        parse: Callable[[dict[Any, Any]], Any] | None = None,
        id_timestamps: bool = False,
        poison: PoisonPolicy | str = PoisonPolicy.FAIL,
        poll_interval: float = 0.02,
        give_up: float = 30.0,
    ) -> None:
        self._url = BrokerUrl(url, SCHEMES, EXAMPLE)
        self._streams = [streams] if isinstance(streams, str) else list(streams)
        self._match = match
        self._decode = decode
        self._parse = parse
        self._id_timestamps = id_timestamps
        self._poison = str(poison)
        self._poll_interval = poll_interval
        self._give_up = give_up

    def config(self) -> dict[str, Json]:
        return {
            "redis": self._url.redacted(),
            "streams": list(self._streams),
            "match": self._match,
            "decode": self._decode,
            "parse": None if self._parse is None else qualified_name(self._parse),
            "id_timestamps": self._id_timestamps,
            "poison": self._poison,
        }

    def problems(self) -> list[str]:
        found = policy_problem(self._poison) + self._url.problems()
        if not self._streams and self._match is None:
            found.append("no stream is named: give streams=[...] or match='prefix:*'")
        if len(set(self._streams)) != len(self._streams) or "" in self._streams:
            found.append(f"streams={self._streams!r} must be distinct, non-empty keys")
        try:
            if self._decode is not None:
                "a".encode(self._decode)  # not b"": an empty text is never looked at
        except (LookupError, TypeError):
            found.append(f"decode={self._decode!r} is no encoding; write one such as 'utf-8', or None for bytes")
        return found + negative_problems(poll_interval=self._poll_interval, give_up=self._give_up)

    @property
    def give_up(self) -> float:
        """Seconds of not reaching Redis, in reading and in looking for streams."""
        return self._give_up

    def discover(self, known: frozenset[str]) -> list[Split]:
        names = dict.fromkeys(self._streams)
        if self._match is not None:
            names.update(dict.fromkeys(sorted(self._matching(self._match))))
        return [Split(name) for name in names if name not in known]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> RedisStreamReader:
        return RedisStreamReader(
            _client(self._url.text),
            split.split_id,
            None if cursor is None else _position(cursor, split.split_id),
            decode=self._decode,
            parse=self._parse,
            id_timestamps=self._id_timestamps,
            tally=PoisonTally(PoisonPolicy(self._poison), f"Redis stream {split.split_id}"),
            poll_interval=self._poll_interval,
            outage=Outage(f"Redis at {self._url.redacted()}", self._give_up),
        )

    def _matching(self, pattern: str) -> list[str]:
        import redis

        client = _client(self._url.text)
        try:
            return [key.decode() for key in client.scan_iter(match=pattern, count=1000, _type="stream")]
        except UnicodeDecodeError as error:
            raise SourceError(f"a stream that matches {pattern!r} has a key that is not UTF-8: {error.object!r}") from error
        except redis.AuthenticationError as error:
            raise SourceError(f"Redis refuses the login for streams that match {pattern!r}: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise SourceUnavailable(
                f"streams that match {pattern!r} cannot be listed, {self._url.redacted()} is not reached: {error}"
            ) from error
        except redis.RedisError as error:
            raise SourceError(f"streams that match {pattern!r} cannot be listed: {error}") from error
        finally:
            client.close()


class RedisStreamReader:
    """Reads one stream, one fetch ahead. The cursor is ``{id, entries_read}``."""

    def __init__(
        self,
        client: Any,
        stream: str,
        position: Position | None,
        *,
        decode: str | None,
        parse: Callable[[dict[Any, Any]], Any] | None,
        id_timestamps: bool,
        tally: PoisonTally,
        poll_interval: float,
        outage: Outage,
    ) -> None:
        self._client = client
        self._stream = stream
        self._done = position
        self._fetched = position
        self._decode = decode
        self._parse = parse
        self._id_timestamps = id_timestamps
        self._tally = tally
        self._poll_interval = poll_interval
        self._outage = outage
        self._ahead: list[tuple[Position, dict[bytes, bytes]]] = []
        self._at = 0
        self._not_before = 0.0

    def poll(self, limit: int) -> Read:
        if self._at == len(self._ahead):
            self._fetch(max(limit, FETCH_ENTRIES))
        values: list[Any] = []
        stamps: list[int] = []
        for position, fields in self._ahead[self._at : self._at + limit]:
            try:
                value = self._value(fields)
            except Exception as error:  # the poison policy decides
                if self._tally.fails and values:
                    break
                raw = msgspec.msgpack.encode([part for pair in fields.items() for part in pair])
                self._tally.record(f"{self._stream} {position.id}", raw, f"{type(error).__name__}: {error}")
            else:
                values.append(value)
                stamps.append(int(position.id.partition("-")[0]))
            self._at += 1
            self._done = position
        dead, skipped = self._tally.drain()
        return Read(values, stamps if self._id_timestamps else None, False, dead, skipped)

    def cursor(self) -> Json:
        return None if self._done is None else {"id": self._done.id, "entries_read": self._done.entries_read}

    def close(self) -> None:
        self._client.close()

    def _value(self, fields: dict[bytes, bytes]) -> Any:
        value: dict[Any, Any] = fields
        if (encoding := self._decode) is not None:
            value = {name.decode(encoding): text.decode(encoding) for name, text in fields.items()}
        return value if self._parse is None else self._parse(value)

    def _fetch(self, count: int) -> None:
        now = time.monotonic()
        if now < self._not_before or not self._outage.may_try():
            return
        answer = self._ask(count)
        if answer is None:
            return
        info, entries = answer
        base = check_loss(self._stream, info, self._fetched)
        number = base.entries_read
        self._ahead, self._at = [], 0
        for key, fields in entries:
            number = None if number is None else number + 1
            base = Position(key.decode(), number)
            self._ahead.append((base, fields))
        if len(entries) < count and info is not None:
            # Caught up: entries that were deleted unread are accounted for too, else a later trim would look like a loss.
            base = Position(base.id, _number(info, "entries-added"))
            if self._ahead:
                self._ahead[-1] = (base, self._ahead[-1][1])
        self._fetched = base
        if not self._ahead:
            self._done = base
            self._not_before = now + self._poll_interval

    def _ask(self, count: int) -> tuple[dict[str, Any] | None, list[tuple[bytes, dict[bytes, bytes]]]] | None:
        """The stream's counters (None: no such key) and next entries, of one moment. None while it cannot be reached."""
        import redis

        last = START if self._fetched is None else self._fetched.id
        try:
            pipe = self._client.pipeline(transaction=True)
            pipe.xinfo_stream(self._stream)
            pipe.xrange(self._stream, min=f"({last}", max="+", count=count)
            info, entries = pipe.execute(raise_on_error=False)
        except redis.AuthenticationError as error:
            raise SourceError(f"Redis refuses the login for stream {self._stream}: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self._outage.failed(error)
            return None
        except redis.RedisError as error:
            raise SourceError(f"Redis stream {self._stream} cannot be read: {error}") from error
        if isinstance(entries, Exception):
            raise SourceError(f"Redis stream {self._stream} cannot be read: {entries}") from entries
        self._outage.over()
        if isinstance(info, Exception):
            if "no such key" not in str(info):
                raise SourceError(f"Redis stream {self._stream} cannot be read: {info}") from info
            return None, []
        return info, [entry for entry in entries if entry[1] is not None]


def check_loss(stream: str, info: dict[str, Any] | None, position: Position | None) -> Position:
    """Where to count from. Raises :class:`SourceError` when entries after ``position`` were removed, or the stream is another one.

    ``info`` is the answer of XINFO STREAM, None when the key does not exist.
    """
    if info is None:
        if position is None or (position.id == START and not position.entries_read):
            return Position(START, 0)
        raise SourceError(f"Redis stream {stream} is gone; it was read up to {position.id}. {_REMEDY}")
    added, length = _number(info, "entries-added"), int(info["length"])
    if position is None:
        return Position(START, None if added is None else added - length)
    newest = _text(info["last-generated-id"])
    if _order(newest) < _order(position.id):
        raise SourceError(f"Redis stream {stream} ends at {newest} and was read up to {position.id}: it was made anew. {_REMEDY}")
    if added is not None and position.entries_read is not None:
        lost = added - length - position.entries_read
        if lost > 0:
            raise SourceError(f"Redis stream {stream} lost {lost} entries after {position.id} that were not read yet. {_REMEDY}")
        return position
    first = info.get("first-entry")
    oldest = _text(first[0]) if first else None
    known_kept = position.id == START or newest == position.id or (oldest is not None and _order(oldest) <= _order(position.id))
    if not known_kept:
        raise SourceError(f"Redis stream {stream} no longer has entry {position.id}; entries after it may be lost too. {_REMEDY}")
    # An older server was upgraded: its counters are right from now on, ours is known only at the end of the stream.
    return Position(position.id, added if newest == position.id else None)


_REMEDY = "Keep entries until they are read (a larger MAXLEN or MINID); start the job without this state to go on with what is left"


def _client(url: str) -> Any:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigurationError("Redis streams need a client: pip install 'millstream[redis]'") from error
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=5, socket_connect_timeout=5)


def _position(cursor: Json, stream: str) -> Position:
    if isinstance(cursor, dict):
        key, number = cursor.get("id"), cursor.get("entries_read")
        if isinstance(key, str) and key.replace("-", "", 1).isdigit() and (number is None or type(number) is int):
            return Position(key, number)
    raise SourceError(f"{cursor!r} is not a cursor of Redis stream {stream}")


def _number(info: dict[str, Any], name: str) -> int | None:
    value = info.get(name)
    return None if value is None else int(value)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
