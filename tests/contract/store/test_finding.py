"""Pages of tasks on three databases: complete, in order, unchanged by what comes in meanwhile, and cheap however large the table is."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import HOUR, SECOND, ending, every, new, read, session, settle, submit, take, taken

from millstream.installation import Installation
from millstream.tasks import Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.finding import Place, TaskFilter, matching
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError, TokenRefused
from millstream_schema.store import claims, finding, settling
from millstream_schema.store.database import Transaction

T = TaskState
ONCE = Policy(attempts=1)


@pytest.fixture
def client(store: Opened, tmp_path: Path) -> Callable[..., Tasks]:
    """A client of this database; the installation's row is made again, as each test begins with empty tables."""
    store.db.run(lambda tx: tx.insert_or_nothing(tx.t.installation, id=1, uid="installation-1", secret="secret-1"))
    return lambda namespace="default": Tasks(Installation.local(tmp_path), None, namespace, database=store.db)


def keys(rows: list[TaskRow]) -> list[str]:
    return [r.key for r in rows]


def paged(tasks: Tasks, where: TaskFilter, limit: int) -> Iterator[list[str]]:
    text = ""
    while True:
        page = tasks.find(where, limit=limit, cursor=text)
        yield keys(page.tasks)
        text = page.cursor
        if not text:
            return


def ended(store: Opened) -> None:
    """One task in every state, of two handlers, by several ways in."""
    policy = {"policy": ONCE}
    rows = taken(
        store.db, new("done"), new("failed", **policy), new("review"), new("again"), new("running", queue="slow"),
    )  # fmt: skip
    by = {r.key: r for r in rows}
    settle(store.db, ending(by["done"]), ending(by["failed"], o.Raised("ValueError", "no")), ending(by["review"], o.AskedForReview("?")))
    settle(store.db, ending(by["again"], o.RetryAsked(HOUR)))
    submit(
        store.db,
        new("ready", handler="other", business_key="b-1", origin="direct"),
        new("later", delay_us=HOUR, origin="schedule:nightly:3"),
    )
    submit(store.db, new("cancelled", business_key="b-1", origin="task:t-1"), new("foreign", namespace="other"))


def test_every_filter_finds_exactly_what_matches(store: Opened, client: Callable[..., Tasks]) -> None:
    """By whatever index it is found, in pages of every size: the same as by looking at each task, newest first."""
    ended(store)
    cancelled = every(store.db)["cancelled"].id
    store.db.run(lambda tx: settling.cancel(tx, cancelled))
    rows = sorted((r for r in every(store.db).values() if r.namespace == "default"), key=lambda r: (r.created_us, r.id), reverse=True)
    middle = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=rows[4].created_us)
    filters = [
        TaskFilter(), *[TaskFilter(states=(s,)) for s in T], TaskFilter(states=(T.FAILED, T.UNKNOWN, T.CANCELLED)), TaskFilter(states=(T.RUNNING, T.DISPATCHED)),
        TaskFilter(states=(T.READY, T.FAILED)), TaskFilter(handler="other"), TaskFilter(queue="slow"), TaskFilter(business_key="b-1"),
        TaskFilter(business_key="b-1", states=(T.READY,)), TaskFilter(origin="schedule"), TaskFilter(origin="task:t-1"), TaskFilter(error_class="ValueError"),
        TaskFilter(created_from=middle), TaskFilter(created_until=middle), TaskFilter(settled_from=middle - dt.timedelta(hours=1)), TaskFilter(settled_until=middle),
        TaskFilter(error_class="ValueError", states=(T.FAILED,), created_until=middle + dt.timedelta(hours=1)), TaskFilter(handler="nobody"),
    ]  # fmt: skip
    for f in filters:
        match = matching(f)
        wanted = [r.key for r in rows if match(msgspec.structs.asdict(r))]
        for limit in (1, 2, 3, 50):
            assert [k for page in paged(client(), f, limit) for k in page] == wanted, (f, limit)
        assert keys(client().list(limit=100)) == [r.key for r in rows]
    assert [k for page in paged(client("other"), TaskFilter(), 10) for k in page] == ["foreign"]


def test_pages_do_not_change_with_what_comes_in_meanwhile(store: Opened, client: Callable[..., Tasks]) -> None:
    """Nothing twice, nothing of the first moment missed, nothing newer."""
    submit(store.db, *[new(f"k{i:02}") for i in range(20)])
    found: list[str] = []
    for serial, page in enumerate(paged(client(), TaskFilter(), 3)):
        found += page
        submit(store.db, *[new(f"new-{serial}-{i}") for i in range(4)])
    assert found == [f"k{i:02}" for i in reversed(range(20))]


def test_tasks_created_at_one_instant_are_told_apart(store: Opened, client: Callable[..., Tasks]) -> None:
    """A page may end between them."""
    submit(store.db, *[new(f"k{i:02}") for i in range(12)])
    t = store.db.tables.task
    store.db.run(lambda tx: tx.update(t, created_us=5))
    store.db.run(lambda tx: tx.update(t, t.c.key > "k05", amiss_us=5, state=T.FAILED, ready_lane=None))
    rows = [r.key for r in sorted(every(store.db).values(), key=lambda r: r.id, reverse=True)]
    assert [k for page in paged(client(), TaskFilter(), 5) for k in page] == rows
    assert [k for page in paged(client(), TaskFilter(states=(T.FAILED,)), 5) for k in page] == [k for k in rows if k > "k05"]


def test_a_cursor_is_for_its_question_alone(store: Opened, client: Callable[..., Tasks]) -> None:
    """Another filter, another namespace, a changed letter, another installation: refused."""
    submit(store.db, *[new(f"k{i}") for i in range(4)])
    text = client().find(limit=2).cursor
    assert keys(client().find(limit=10, cursor=text).tasks) == ["k1", "k0"]
    with pytest.raises(TokenRefused, match="other filters"):
        client().find(TaskFilter(handler="work"), cursor=text)
    with pytest.raises(TokenRefused, match="another namespace"):
        client("other").find(cursor=text)
    with pytest.raises(TokenRefused, match="changed on its way"):
        client().find(cursor=text[:-1] + ("A" if text[-1] != "A" else "B"))
    store.db.run(lambda tx: tx.update(tx.t.installation, secret="secret-2"))
    with pytest.raises(TokenRefused):
        client().find(cursor=text)
    for limit in (0, 1001):
        with pytest.raises(ConfigurationError, match="limit"):
            client().find(limit=limit)


def test_the_class_of_what_was_raised_is_kept(store: Opened) -> None:
    """Of the last exception; other ends keep none, a long name is cut."""
    row, other, long = taken(store.db, new("1"), new("2"), new("3"))
    settle(store.db, ending(row, o.Raised("KeyError", "x")), ending(other, o.GaveUp("no")), ending(long, o.Raised("E" * 300, "x")))
    assert [read(store.db, r.id).error_class for r in (row, other, long)] == ["KeyError", "", "E" * 200]
    store.db.run(lambda tx: claims.wake_due(tx, 10))
    session(store.db, "s2")
    (again,) = take(store.db, "s2", 1)
    settle(store.db, ending(again, o.Raised("ValueError", "y")))
    assert read(store.db, again.id).error_class == "ValueError"


def test_what_went_amiss_is_marked_and_unmarked(store: Opened) -> None:
    """The mark is what the index of such tasks is made of."""
    row, other = taken(store.db, new("1"), new("2", policy=ONCE))
    settle(store.db, ending(row, o.AskedForReview("?")), ending(other, o.Raised("E", "x")))
    review = read(store.db, row.id)
    assert review.amiss_us == review.created_us and read(store.db, other.id).amiss_us is not None
    store.db.run(lambda tx: settling.review(tx, row.id, review.rev, done=True, result="", reason="r", actor="a"))
    assert read(store.db, row.id).amiss_us is None


# -- large tables

LARGE = 20_000


@pytest.fixture(scope="module")
def large(opened: Opened) -> Opened:
    """20,000 finished tasks; every 2,000th failed, every 5,000th runs or is due later, a few of a business key."""
    opened.empty()
    submit(opened.db, new("template"))
    t = opened.db.tables.task
    numbers = sa.select(sa.literal(1).label("i")).cte("numbers", recursive=True)
    numbers = numbers.union_all(sa.select(numbers.c.i + 1).where(numbers.c.i < LARGE))

    def fill(tx: Transaction) -> None:
        if opened.kind == "mariadb":
            tx.execute(sa.text(f"SET SESSION max_recursive_iterations = {LARGE}"))
        at = sa.cast(numbers.c.i, sa.BigInteger) * sa.literal(SECOND, sa.BigInteger)
        name = sa.literal("t-") + sa.cast(numbers.c.i, sa.String(20))
        values: dict[str, Any] = {c.name: c for c in t.c} | {
            "id": name, "key": name, "state": sa.literal("SUCCEEDED"), "ready_lane": sa.null(), "created_us": at, "settled_us": at + 1,
            "business_key": sa.case((numbers.c.i % 4000 == 0, "b"), else_=""), "retry_of": sa.case((numbers.c.i % 4000 == 1, "t-1"), else_=""),
        }  # fmt: skip
        columns = [v.label(k) for k, v in values.items()]
        tx.execute(
            sa.insert(t).from_select(list(values), sa.select(*columns).select_from(t.join(numbers, sa.true())).where(t.c.key == "template"))
        )
        tx.execute(
            sa.update(t).where(t.c.created_us % (2000 * SECOND) == 0).values(state=T.FAILED, amiss_us=t.c.created_us, error_class="E")
        )
        tx.execute(sa.update(t).where(t.c.created_us % (5000 * SECOND) == 1000 * SECOND).values(state=T.RUNNING, session="s", settled_us=0))

    opened.db.run(fill)
    with opened.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"ANALYZE TABLE {t.name}" if opened.kind == "mariadb" else f"ANALYZE {t.name}")
    return opened


FILTERS = {
    "all": TaskFilter(),
    "failed": TaskFilter(states=(T.FAILED,)),
    "failed of a class": TaskFilter(states=(T.FAILED, T.UNKNOWN), error_class="E", handler="work"),
    "running": TaskFilter(states=(T.RUNNING,)),
    "business key": TaskFilter(business_key="b"),
    "handler": TaskFilter(handler="work"),
    "retries": TaskFilter(retry_of="t-1"),
    "range": TaskFilter(created_from=dt.datetime(1970, 1, 1, 1, tzinfo=dt.UTC), created_until=dt.datetime(1970, 1, 1, 2, tzinfo=dt.UTC)),
    "settled until": TaskFilter(settled_until=dt.datetime(1970, 1, 1, 2, tzinfo=dt.UTC)),
}


@pytest.mark.parametrize("name", sorted(FILTERS))
@pytest.mark.parametrize("after", [None, Place(10_000 * SECOND, "t-10000")], ids=["first page", "later page"])
def test_a_page_costs_what_it_gives(large: Opened, name: str, after: Place | None) -> None:
    """Of 20,000 tasks it looks at some hundreds at most: by an index in its order, never by a scan or a sort of all."""
    look = Looked(large)
    found = large.db.read(lambda tx: look.of(tx, lambda: finding.page(tx, "default", FILTERS[name], after, 20)))
    assert found < 600


def test_a_filter_that_lets_little_through_ends_a_page_early(large: Opened) -> None:
    """With a place to go on from; following it comes to the end."""
    f = TaskFilter(handler="nobody")
    original, finding.BUDGET = finding.BUDGET, 3_000
    try:
        pages, after = 0, None
        while True:
            found = large.db.read(lambda tx, a=after: finding.page(tx, "default", f, a, 20))  # type: ignore[misc]
            assert found.ids == []
            pages += 1
            after = found.place
            if after is None:
                break
    finally:
        finding.BUDGET = original
    assert pages > 2


class Looked:
    """How many rows of the task table statements look at: by the server's own counts; on SQLite by the plans of the statements executed."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def of(self, tx: Transaction, work: Callable[[], Any]) -> int:
        if self._opened.kind == "sqlite":
            return self._sqlite(tx, work)
        counts = {"postgres": self._postgres, "mariadb": self._mariadb}[self._opened.kind]
        before = counts(tx)
        work()
        return counts(tx) - before

    @staticmethod
    def _postgres(tx: Transaction) -> int:
        counts = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = :name"
        return int(tx.execute(sa.text(counts), {"name": tx.t.task.name}).scalar_one())

    @staticmethod
    def _mariadb(tx: Transaction) -> int:
        found: list[Any] = list(tx.execute(sa.text("SHOW SESSION STATUS LIKE 'Handler_read%'")))
        return sum(int(r[1]) for r in found)

    def _sqlite(self, tx: Transaction, work: Callable[[], Any]) -> int:
        executed: list[tuple[str, Any]] = []

        def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
            executed.append((statement, parameters))

        sa.event.listen(self._opened.db.engine, "before_cursor_execute", note)
        try:
            work()
        finally:
            sa.event.remove(self._opened.db.engine, "before_cursor_execute", note)
        plans: list[str] = []
        with self._opened.db.engine.connect() as connection:
            for statement, parameters in executed:
                plans += [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        bad = [p for p in plans if p.startswith(f"SCAN {tx.t.task.name}") or p.endswith("B-TREE FOR ORDER BY")]
        return LARGE * len(bad)
