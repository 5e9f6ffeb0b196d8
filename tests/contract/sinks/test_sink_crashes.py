"""Crashes and lost answers at every single step of staging, sealing and committing: after recovery every durable row is there once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.contract.sinks.conftest import SQL
from tests.contract.sinks.worlds import FileWorld, records

from millstream_schema.connectors import CommitResult
from millstream_schema.errors import CommitUnknown, Fenced, SinkError
from millstream_schema.target import connection as door
from millstream_schema.target.connection import TargetConnection
from millstream_schema.target.failures import TargetUnavailable
from millstream_tasks.sinks.sql import SqlAppendSink

DONE = (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED)


class Crash(BaseException):
    """The process dies here."""


class Fault:
    """Breaks at the ``step``-th statement, ``before`` or ``after`` it took effect; once. ``step`` 0 only counts."""

    def __init__(self, step: int = 0, after: bool = False, crash: bool = False) -> None:
        self.step, self.after, self.crash = step, after, crash
        self.seen = 0
        self.armed = False

    def around(self, call: Callable[[], Any], lose: Callable[[], None]) -> Any:
        if not self.armed:
            return call()
        self.seen += 1
        if self.seen != self.step:
            return call()
        if self.after:
            call()
        lose()
        if self.crash:
            raise Crash
        raise TargetUnavailable("the network is down")

    def connect(self, url: str, *, durable: bool, lock_timeout: float) -> TargetConnection:
        fault = self

        class Faulty(TargetConnection):
            def send(self, statement: str, parameters: Any = ()) -> Any:
                return fault.around(lambda: super(Faulty, self).send(statement, parameters), self.close)

            def send_many(self, statement: str, rows: Any) -> None:
                fault.around(lambda: super(Faulty, self).send_many(statement, rows), self.close)

        return door.connect(url, durable=durable, lock_timeout=lock_timeout, connection=Faulty)


# A death before a statement is the death after the one before it.
KINDS = [(False, False), (True, False), (True, True)]


def sink_of(world: Any, fault: Fault) -> SqlAppendSink:
    return SqlAppendSink(world.url, world.table, ["id", "name"], batch_rows=2, patience=5, connect=fault.connect)


def steps_of(run: Callable[[Fault], None]) -> int:
    """How many statements a run takes."""
    counter = Fault()
    run(counter)
    assert counter.seen > 2
    return counter.seen


def break_everywhere(run: Callable[[Fault], None], *, after: bool, crash: bool = False) -> None:
    """Run once to count the steps, then once for each step with a fault there."""
    for step in range(1, steps_of(run) + 1):
        fault = Fault(step, after, crash)
        run(fault)
        assert fault.seen >= step, "the fault was never reached"


@pytest.mark.parametrize(("after", "crash"), KINDS)
def test_a_commit_broken_at_any_statement_is_finished_by_repeating_it(sql_world: Any, sealed: Any, after: bool, crash: bool) -> None:
    """T-01, T-28, T-39: before and after each statement, COMMIT's lost answer included; process death or lost connection."""
    expected: list[int] = []
    serial = iter(range(1, 10_000))

    def run(fault: Fault) -> None:
        number = next(serial)
        writer = world.open(sink_of(world, fault), operator=f"op{number}")
        committables = sealed(writer, 1, number * 10, number * 10 + 1, number * 10 + 2)
        expected.extend(range(number * 10, number * 10 + 3))
        fault.armed = True
        try:
            answer = writer.commit(committables)
            assert answer.result in (*DONE, CommitResult.RETRY, CommitResult.UNKNOWN)
        except Crash:
            writer.close()
            writer = world.open(operator=f"op{number}", generation=2)
            writer.clean(committables)
        fault.armed = False
        assert writer.commit(committables).result in DONE
        assert writer.commit(committables).result is CommitResult.ALREADY_COMMITTED

    world = sql_world
    break_everywhere(run, after=after, crash=crash)
    assert world.visible() == sorted(expected)
    assert world.staged() == 0


@pytest.mark.parametrize("after", [False, True])
def test_staging_over_a_connection_that_breaks_at_any_statement_stages_each_row_once(sql_world: Any, sealed: Any, after: bool) -> None:
    """A chunk whose COMMIT answer was lost is sent again under its number, and is there once."""
    expected: list[int] = []
    serial = iter(range(1, 10_000))

    def run(fault: Fault) -> None:
        number = next(serial)
        writer = sql_world.open(sink_of(sql_world, fault), operator=f"op{number}")
        fault.armed = True
        committables = sealed(writer, 1, number * 10, number * 10 + 1, number * 10 + 2)
        fault.armed = False
        expected.extend(range(number * 10, number * 10 + 3))
        assert [c.rows for c in committables] == [3]
        assert writer.commit(committables).result is CommitResult.COMMITTED

    break_everywhere(run, after=after)
    assert sql_world.visible() == sorted(expected)


def test_a_subtask_that_dies_at_any_statement_of_staging_leaves_nothing_behind(sql_world: Any, sealed: Any) -> None:
    """What was not sealed by a durable epoch is deleted by the next generation and never seen."""
    serial = iter(range(1, 10_000))

    def run(fault: Fault) -> None:
        number = next(serial)
        writer = sql_world.open(sink_of(sql_world, fault), operator=f"op{number}")
        fault.armed = True
        try:
            sealed(writer, 1, 1, 2, 3)
        except Crash:
            pass
        fault.armed = False
        writer.close()
        sql_world.open(operator=f"op{number}", generation=2).clean([])

    for after in (False, True):
        break_everywhere(run, after=after, crash=True)
    assert sql_world.visible() == []
    assert sql_world.staged() == 0


def test_opening_over_a_connection_that_breaks_at_any_statement_raises_the_fence(sql_world: Any) -> None:
    """Tables and fence are made by statements that may be repeated."""
    serial = iter(range(1, 10_000))
    sql_world.open()  # makes the tables, so that every run takes the same steps

    def run(fault: Fault) -> None:
        operator = f"op{next(serial)}"
        fault.armed = True
        sql_world.open(sink_of(sql_world, fault), operator=operator, generation=4)
        fault.armed = False
        with pytest.raises(Fenced):
            sql_world.open(operator=operator, generation=3)

    break_everywhere(run, after=True)


FILE_CALLS = ("open", "write", "fsync", "rename", "replace", "ftruncate")


@pytest.mark.parametrize("after", [False, True])
def test_a_file_sink_that_dies_at_any_system_call_publishes_each_row_once(
    tmp_path: Any, sealed: Any, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Between journal, rename and directory flush there is no step at which a repeat loses or doubles a row."""
    world = FileWorld(tmp_path)
    expected: list[int] = []
    serial = iter(range(1, 10_000))

    def run(fault: Fault) -> None:
        number = next(serial)
        operator = f"op{number}"
        writer = world.open(operator=operator)
        committables = sealed(writer, 1, number * 10) + sealed(writer, 2, number * 10 + 1)
        expected.extend([number * 10, number * 10 + 1])
        fault.armed = True
        with monkeypatch.context() as patch:
            for name in FILE_CALLS:
                original = getattr(os, name)
                patch.setattr(os, name, lambda *a, original=original, **k: fault.around(lambda: original(*a, **k), lambda: None))
            try:
                writer.commit(committables)
            except Crash:
                pass
        recovered = world.open(operator=operator, generation=2)
        assert recovered.commit(committables).result in DONE
        recovered.clean(committables)
        assert recovered.commit(committables).result is CommitResult.ALREADY_COMMITTED

    break_everywhere(run, after=after, crash=True)
    assert world.visible() == sorted(expected)
    assert world.staged() == 0
    world.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_file_sink_that_dies_while_writing_leaves_only_hidden_files_that_the_next_generation_deletes(
    tmp_path: Any, sealed: Any, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Nothing unsealed is ever published."""
    world = FileWorld(tmp_path)
    serial = iter(range(1, 10_000))

    def run(fault: Fault) -> None:
        operator = f"op{next(serial)}"
        writer = world.open(operator=operator)
        fault.armed = True
        with monkeypatch.context() as patch:
            for name in FILE_CALLS:
                original = getattr(os, name)
                patch.setattr(os, name, lambda *a, original=original, **k: fault.around(lambda: original(*a, **k), lambda: None))
            try:
                sealed(writer, 1, 1)
            except Crash:
                pass
        writer.close()
        world.open(operator=operator, generation=2).clean([])

    break_everywhere(run, after=after, crash=True)
    assert world.visible() == []
    assert world.staged() == 0
    world.close()


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_to_commit_is_unknown_and_the_repeat_decides(sql_world: Any, sealed: Any, committed: bool) -> None:
    """T-39: whether the COMMIT got through or not, it is CommitUnknown; the sink runs the transaction again and the marker tells."""
    lose = False

    class Lossy(TargetConnection):
        def send(self, statement: str, parameters: Any = ()) -> Any:
            nonlocal lose
            if not (lose and statement == "COMMIT"):
                return super().send(statement, parameters)
            lose = False
            if committed:
                super().send(statement, parameters)
            self.close()
            raise TargetUnavailable("the answer never came")

    def connect(url: str, *, durable: bool, lock_timeout: float) -> TargetConnection:
        return door.connect(url, durable=durable, lock_timeout=lock_timeout, connection=Lossy)

    writer = sql_world.open(SqlAppendSink(sql_world.url, sql_world.table, ["id", "name"], connect=connect))
    committables = sealed(writer, 1, 1, 2)
    lose = True
    assert writer.commit(committables).result is (CommitResult.ALREADY_COMMITTED if committed else CommitResult.COMMITTED)
    assert not lose
    assert sql_world.visible() == [1, 2]
    bare = connect(sql_world.url, durable=True, lock_timeout=3)
    lose = True
    with pytest.raises(CommitUnknown), bare.transaction() as transaction:
        transaction.execute(f"INSERT INTO {sql_world.table} VALUES (3, 'c')")
    assert sql_world.visible() == ([1, 2, 3] if committed else [1, 2])
    bare.close()


@pytest.mark.parametrize("world", ["files", *SQL], indirect=True)
def test_a_second_writer_of_the_same_generation_is_found_out(world: Any, sealed: Any) -> None:
    """Two copies of one subtask never mix their rows into one committable: the one that comes second is refused."""
    first, second = world.open(), world.open()
    first.write(records(1), None)
    first.flush()
    with pytest.raises(SinkError, match="second writer"):
        second.write(records(2), None)
        second.flush()
    assert first.commit(first.prepare_commit(1)).result is CommitResult.COMMITTED
    assert world.visible() == [1]
