"""The upsert sink over every database: one row a key, the newest value, and no value from the past."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.contract.sinks.test_sink_crashes import Fault

from millstream_schema.connectors import Sink, SinkCapability
from millstream_schema.errors import ConfigurationError, Fenced, SinkError
from millstream_schema.target.connection import TargetConnection, connect
from millstream_schema.target.failures import TargetUnavailable
from millstream_tasks.sinks.upsert import SqlUpsertSink


@pytest.fixture
def counts(sql_world: Any) -> Any:
    """A table with a two-column key."""
    sql_world.run(
        f"CREATE TABLE c_{sql_world.table} (city VARCHAR(20) NOT NULL, day INTEGER NOT NULL, total BIGINT, PRIMARY KEY (city, day))"
    )
    yield sql_world
    sql_world.run(f"DROP TABLE c_{sql_world.table}")


def sink_of(world: Any, **options: Any) -> SqlUpsertSink:
    return SqlUpsertSink(world.url, f"c_{world.table}", ["city", "day", "total"], ["city", "day"], **{"patience": 5, **options})


def rows(world: Any) -> list[tuple[Any, ...]]:
    return list(world.run(f"SELECT city, day, total FROM c_{world.table} ORDER BY city, day"))


def test_the_last_value_of_a_key_wins_within_and_across_batches(counts: Any) -> None:
    """Insert and update are one; what was written before a flush is there after it."""
    writer = sink_of(counts).open(counts.context())
    writer.write([("oslo", 1, 1), ("rome", 1, 5), ("oslo", 1, 2)], None)
    assert rows(counts) == []
    writer.flush()
    assert rows(counts) == [("oslo", 1, 2), ("rome", 1, 5)]
    writer.write([("oslo", 1, 3), ("oslo", 2, 9)], None)
    writer.flush()
    writer.flush()
    assert rows(counts) == [("oslo", 1, 3), ("oslo", 2, 9), ("rome", 1, 5)]
    writer.close()


def test_a_full_batch_is_sent_without_waiting_for_the_flush(counts: Any) -> None:
    """The buffer is bounded by keys, and many batches leave by one write."""
    writer = sink_of(counts, batch_rows=10).open(counts.context())
    writer.write([("oslo", day, day) for day in range(25)], None)
    assert len(rows(counts)) == 25
    writer.close()


def test_records_may_be_dicts_and_objects(counts: Any) -> None:
    """Columns are found by key and attribute; a missing one is named."""

    @dataclass(frozen=True)
    class Count:
        total: int
        city: str
        day: int

    writer = sink_of(counts).open(counts.context())
    writer.write([{"day": 1, "total": 2, "city": "oslo", "more": 0}, Count(3, "rome", 1), ["bonn", 2, None]], None)
    writer.flush()
    assert rows(counts) == [("bonn", 2, None), ("oslo", 1, 2), ("rome", 1, 3)]
    for wrong, word in (({"day": 1, "city": "x"}, "total"), (("x", 1), "2 values"), (("x", 1, object()), "total"), (("x", None, 1), "key")):
        with pytest.raises(SinkError, match=word):
            writer.write([wrong], None)
    writer.close()


def test_a_woken_zombie_cannot_put_an_old_value_over_a_new_one(counts: Any) -> None:
    """T-41: its next transaction reads the fence and stops, with what it had in its buffer."""
    zombie = sink_of(counts).open(counts.context(generation=7))
    zombie.write([("oslo", 1, 100)], None)
    successor = sink_of(counts).open(counts.context(generation=8))
    successor.write([("oslo", 1, 200)], None)
    successor.flush()
    with pytest.raises(Fenced):
        zombie.flush()
    with pytest.raises(Fenced):
        sink_of(counts).open(counts.context(generation=7))
    assert rows(counts) == [("oslo", 1, 200)]
    zombie.close()
    successor.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_connection_that_breaks_at_any_statement_leaves_the_newest_values(counts: Any, after: bool) -> None:
    """Each batch is sent again until it is known to be there."""
    step, seen = 1, 1
    while step <= seen:
        fault = Fault(step, after)
        writer = sink_of(counts, batch_rows=2, connect=fault.connect).open(counts.context())
        fault.armed = True
        writer.write([("oslo", 1, step), ("oslo", 2, step), ("oslo", 1, step + 1000)], None)
        writer.flush()
        seen = fault.seen
        writer.close()
        assert rows(counts) == [("oslo", 1, step + 1000), ("oslo", 2, step)]
        step += 1
    assert step > 4


def test_a_passed_lease_stops_the_writer_before_its_commit(counts: Any) -> None:
    """``guard`` is asked before each transaction and right before its COMMIT: at neither point does anything become visible."""

    class LeasePassed(BaseException):
        pass

    allowed = 0

    def guard() -> None:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise LeasePassed

    allowed = 10
    writer = sink_of(counts).open(counts.context(guard=guard))
    for left in (0, 1):
        allowed = left
        writer.write([("oslo", 1, 1)], None)
        with pytest.raises(LeasePassed):
            writer.flush()
        assert rows(counts) == []
    allowed = 2
    writer.flush()
    assert rows(counts) == [("oslo", 1, 1)]
    writer.close()


def test_a_table_without_the_key_is_refused_when_opened(counts: Any) -> None:
    """Without a unique key upserts would pile up rows."""
    wrong = SqlUpsertSink(counts.url, f"c_{counts.table}", ["city", "day", "total"], ["city"], patience=1)
    with pytest.raises(ConfigurationError, match="unique key"):
        wrong.open(counts.context())
    absent = SqlUpsertSink(counts.url, "no_such_table", ["city"], ["city"], patience=1)
    with pytest.raises(ConfigurationError, match="no_such_table"):
        absent.open(counts.context())


def test_a_table_of_keys_alone_takes_each_key_once(counts: Any) -> None:
    """With nothing to update a repeat does nothing."""
    counts.run(f"CREATE TABLE k_{counts.table} (id BIGINT PRIMARY KEY)")
    writer = SqlUpsertSink(counts.url, f"k_{counts.table}", ["id"], ["id"]).open(counts.context())
    writer.write([(1,), (2,), (1,)], None)
    writer.flush()
    writer.write([(2,), (3,)], None)
    writer.flush()
    assert counts.run(f"SELECT id FROM k_{counts.table} ORDER BY id") == [(1,), (2,), (3,)]
    writer.close()
    counts.run(f"DROP TABLE k_{counts.table}")


def test_it_describes_itself_without_secrets_and_lists_every_problem() -> None:
    """UPSERT_BY_KEY, unless commits may be lost; problems name what is wrong."""
    good = SqlUpsertSink("postgresql://u:secret@h/d", "s.t", ["a", "b"], ["a"])
    assert isinstance(good, Sink)
    assert good.problems() == []
    assert good.capability is SinkCapability.UPSERT_BY_KEY
    assert "secret" not in str(good.config())
    assert SqlUpsertSink("sqlite:///x.db", "t", ["a"], ["a"], durable=False).capability is SinkCapability.NONE
    bad = SqlUpsertSink("sqlite:///x.db", "t; drop", ["a", "a", "b c"], ["z"], batch_rows=0, lock_timeout=0)
    text = "\n".join(bad.problems())
    for word in ("t; drop", "b c", "more than once", "z", "batch_rows", "lock_timeout"):
        assert word in text


def test_a_database_that_stays_away_fails_the_write_and_keeps_the_rows(counts: Any) -> None:
    """After ``patience`` seconds the error is raised; what was buffered is sent when it is back."""
    away = False

    class Away(TargetConnection):
        def send(self, statement: str, parameters: Any = ()) -> Any:
            if away:
                self.close()
                raise TargetUnavailable("the network is down")
            return super().send(statement, parameters)

    writer = sink_of(counts, patience=0.1, connect=partial(connect, connection=Away)).open(counts.context())
    writer.write([("oslo", 1, 1)], None)
    away = True
    with pytest.raises(TargetUnavailable, match="network"):
        writer.flush()
    away = False
    writer.flush()
    assert rows(counts) == [("oslo", 1, 1)]
    writer.close()
