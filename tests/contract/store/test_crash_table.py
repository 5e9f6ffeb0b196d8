"""Every transaction on durable tasks ended before and after its COMMIT, then executed again by another process: the rows are as if it had been executed once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tests.contract.store.crash_table import OUTBOX_PREFIX, TABLE, Boundary, opened
from tests.contract.store.stores import Opened

from millstream_schema import store as store_package
from millstream_schema.store.outbox_table import outbox_table

OF_STREAMS = {
    "schema",
    "installation",
    "job",
    "assignment",
    "epoch",
    "ack",
    "manifest",
    "split",
    "source",
    "savepoint",
    "channel",
    "history",
}
"""Tables that no statement on durable tasks writes."""
Rows = dict[str, list[dict[str, Any]]]
Moment = Literal["before", "after", ""]


class Died(BaseException):
    """The process is gone."""


class Crash:
    """Ends its process at its first COMMIT, ``before`` or ``after`` it."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self.struck = False

    def before_commit(self) -> None:
        if self._moment == "before":
            self.struck = True
            raise Died

    def after_commit(self) -> None:
        if self._moment == "after":
            self.struck = True
            raise Died


class Scene:
    """One boundary on one emptied store."""

    def __init__(self, store: Opened, boundary: Boundary) -> None:
        self._store = store
        self._boundary = boundary
        store.empty()
        self._home = opened(store, boundary.on)
        self._ready = boundary.prepare(self._home)

    def act(self, moment: Moment = "", *, again: bool = False) -> Any:
        """As another process does it, which dies at that moment; its answer."""
        b, crash = self._boundary, Crash(moment)
        db = opened(self._store, b.on, crash)
        try:
            if b.through is not None:
                return b.through(db)
            work = b.act
            assert work is not None
            return db.run(lambda tx: work(tx, self._ready, again))
        finally:
            db.close()
            assert crash.struck == bool(moment)

    def rows(self) -> Rows:
        """Everything that is stored."""
        mine = self._home.tables
        tables = [t for t in mine.metadata.sorted_tables if t.name.removeprefix(mine.prefix) not in OF_STREAMS]
        if self._boundary.on == "outbox":
            tables = [outbox_table(OUTBOX_PREFIX)]
        found = self._home.read(lambda tx: {t.name.removeprefix(self._home.tables.prefix): tx.rows(t.select()) for t in tables})
        return {name: sorted(rows, key=repr) for name, rows in found.items()}

    def close(self) -> None:
        self._home.close()


WHEN = re.compile(r".*_us|rank|slot|tail_us")
MADE = re.compile(r"\d{13,}|(task|subscription)-\d+")
"""Instants within texts, and ids that are other ones in each run."""


def column(name: str, value: Any) -> Any:
    """What is stored without when it was, but for whether it was."""
    if WHEN.fullmatch(name):
        return bool(value)
    return MADE.sub("…", value) if isinstance(value, str) else value


def timeless(rows: Rows, touched: frozenset[str]) -> Rows:
    """Likewise all rows, in an order of its own; without how often a row was written where a repeat may write it."""

    def one(table: str, row: dict[str, Any]) -> dict[str, Any]:
        return {k: column(k, v) for k, v in row.items() if not (k == "rev" and table in touched)}

    return {table: sorted((one(table, r) for r in found), key=repr) for table, found in rows.items()}


def timeless_answer(answer: Any) -> Any:
    """Likewise what was answered."""
    plain = msgspec.to_builtins(answer)
    return {k: column(k, v) for k, v in plain.items()} if isinstance(plain, dict) else plain


def without(rows: Rows, touched: frozenset[str]) -> Rows:
    return {table: found for table, found in rows.items() if table not in touched}


IDLE = {"submit of a known key", "submit of a key with other content", "outbox table"}
"""These find everything done. All others write: else their crash would prove nothing."""


@pytest.mark.parametrize("name", list(TABLE))
def test_a_crash_before_or_after_any_commit_changes_nothing(store: Opened, name: str) -> None:
    """Before: nothing was done, and doing it again is doing it. After: doing it again writes nothing, and answers as it would have."""
    boundary = TABLE[name]
    whole = Scene(store, boundary)
    before = whole.rows()
    answer, reference = whole.act(), whole.rows()
    assert (reference == before) == (name in IDLE)
    whole.close()
    for moment in ("before", "after"):
        scene = Scene(store, boundary)
        untouched = scene.rows()
        assert timeless(untouched, boundary.touched) == timeless(before, boundary.touched), "the scene is another one each time"
        with pytest.raises(Died):
            scene.act(moment)
        left = scene.rows()
        assert moment == "after" or left == untouched, "something was done"
        told = scene.act(again=True)
        now = scene.rows()
        assert timeless(now, boundary.touched) == timeless(reference, boundary.touched), moment
        if moment == "after":
            assert without(now, boundary.touched) == without(left, boundary.touched), "it was done twice"
        if moment == "before" or boundary.answer:
            assert timeless_answer(told) == timeless_answer(answer), moment
        scene.close()


# -- the table is complete

STREAMS = {"epochs", "jobs", "truth", "rows", "tables", "stream_tables"}
"""Modules of stream jobs' statements: their tests are test_epochs, test_jobs, test_commits."""
PIPES = {"database", "drivers", "callers", "commits", "migrate", "columns"}
"""Modules that carry statements and have none."""
PARTS = {
    "tasks.apply": "part of settle, cancel, take-back, wake-up, review: a decision written under a lock",
    "tasks.keep_attempt": "part of settle, take-back, review",
    "settling.cancel_locked": "part of cancel, and of an act on many",
    "single_rows.lock_single": "part of a lease and of what is counted, and harmless alone: insert or nothing",
    "permits.ensure": "part of a claim, and harmless alone: insert or nothing",
    "permits.take": "part of a claim",
    "permits.release": "part of every end of a holder",
    "gates.write": "part of pause, rate, claim",
    "gates.fill_up": "part of a claim",
    "gates.wake": "part of relief",
    "gates.put_back": "part of settle, cancel, take-back",
    "blockers.park": "part of a claim",
    "blockers.park_line": "part of a claim",
    "blockers.move_up": "part of relief and of every end of a permit's holder",
    "blockers.call_up": "part of a claim",
    "selection.select": "part of a claim",
    "lanes.ensure": "part of weight and pause, and harmless alone: insert or nothing",
    "events.record": "part of every end",
    "schedules.write": "part of every change of a schedule",
    "fires.running": "part of fire and release",
    "subscriptions.lock_gate": "part of what it locks; makes its row, or nothing",
    "fires.turn": "locks alone",
}
ELSEWHERE = {
    "settling.settle_success": "commits with the handler's own statements: test_attempt_transactions, at each COMMIT of it",
    "inboxes.accept": "commits with the consumer's own statements, by the consumer: test_inbox",
    "inboxes.forget": "deletes markers nobody can ask for; a repeat finds none: test_inbox",
    "settling.mark": "NOT TRIED at each COMMIT yet; zombies and every ending: test_markers",
    "markers.raise_fence": "NOT TRIED at each COMMIT yet; zombies and every ending: test_markers",
    "markers.seal": "NOT TRIED at each COMMIT yet: commits with the handler's statements in a user's database; test_markers",
    "registry.take_lease": "the coordinator's lease, of streams too: test_registry",
    "registry.release_lease": "likewise",
    "registry.mark_tick": "likewise",
    "registry.drain_node": "a node of streams",
    "registry.leave_node": "a node of streams",
    "registry.forget_nodes": "retention of streams",
    "registry.assign": "streams",
    "registry.lock_capacity": "streams",
    "registry.start_assignment": "streams",
    "registry.ready_assignment": "streams",
    "registry.end_assignment": "streams",
    "registry.committed_assignment": "streams",
    "registry.note_commit": "streams",
    "registry.exhausted_assignment": "streams",
    "registry.progress_assignment": "streams",
    "registry.delete_assignments": "streams",
}
WRITES = {"update", "insert", "insert_many", "insert_or_nothing", "insert_those_new", "insert_new", "delete", "changed", "create_table"}


def called(tree: ast.AST) -> set[str]:
    """Names that are called: ``f`` and ``.f`` or ``module.f``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            found |= {f"{owner}.{node.func.attr}", f".{node.func.attr}"}
    return found


def writing() -> set[str]:
    """Public functions of the store that take a transaction or a database and write, themselves or by what they call."""
    package = Path(inspect.getfile(store_package)).parent
    bodies: dict[str, set[str]] = {}
    public: set[str] = set()
    for file in sorted(package.glob("*.py")):
        module = file.stem
        if module.startswith("__") or module in STREAMS | PIPES:
            continue
        tree = ast.parse(file.read_text())
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
            for alias in node.names
        }
        defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for name, node in defined.items():
            methods = {f".{n.name}" for n in ast.walk(node) if isinstance(n, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else set()
            calls = called(node) - methods
            bodies[f"{module}.{name}"] = {imported.get(c) or (f"{module}.{c}" if c in defined else c) for c in calls}
            takes = {
                ast.unparse(a.annotation) for a in node.args.args[:1] if a.annotation is not None
            } if isinstance(node, ast.FunctionDef) else set()  # fmt: skip
            if not name.startswith("_") and takes & {"Transaction", "Database"}:
                public.add(f"{module}.{name}")
    found = {f for f, calls in bodies.items() if any((c.startswith("tx.") and c[3:] in WRITES) or c == "self._tx.update" for c in calls)}
    found |= {f for f, calls in bodies.items() if any(c in {f".{w}" for w in ("insert_or_nothing", "changed")} for c in calls)}
    while True:
        more = {f for f, calls in bodies.items() if calls & found} - found
        if not more:
            return found & public
        found |= more


def test_every_statement_that_writes_is_in_the_table_or_says_why_not() -> None:
    """Whoever adds one decides what a lost answer does to it."""

    def name(function: Callable[..., Any]) -> str:
        return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    covered = {name(function) for boundary in TABLE.values() for function in boundary.covers}
    found = writing()
    assert found - covered - set(PARTS) - set(ELSEWHERE) == set(), "put them into the crash table, or say here why not"
    assert {"tasks.submit", "claims.claim", "settling.settle", "fires.advance", "deliveries.lease", "outboxes.claim"} <= found
    assert (set(PARTS) | set(ELSEWHERE)) - found == set(), "these write nothing or are gone"
