"""Every public method of the clients of durable tasks, with every kind of wrong value in every place: refused at once by an error of ours that is short, and nothing is changed.

The table is held against the classes: a method, or a parameter of one, that it does not name fails.
"""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import ending, new, read, settle, submit, taken

from millstream.handlers import Handlers
from millstream.inbox import Inbox
from millstream.installation import Installation
from millstream.keeping import Keeping
from millstream.outbox import Outbox
from millstream.queues import Permits, Queues
from millstream.results import TaskResult
from millstream.schedules import Schedules
from millstream.subscriptions import Subscriptions
from millstream.tasks import Item, Request, Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.records import Policy
from millstream_schema.errors import ConfigurationError, MillstreamError, ScheduleInvalid, TaskInvalid, UnknownHandler
from millstream_schema.store import outboxes
from millstream_schema.store.outbox_table import outbox_table

HUGE, NAN, INF = "x" * 1_000_000, float("nan"), float("inf")
UTC = dt.UTC
PAST = dt.datetime(2020, 1, 1, tzinfo=UTC)
TORN: list[Any] = ["a\0b", "\ud800", HUGE]
NO_TEXT: list[Any] = [None, 5, True, 1.5, b"x", [], {}, object()]
NAME: list[Any] = [*NO_TEXT, *TORN, "", "a b", "x" * 201]
ID: list[Any] = [*NO_TEXT, *TORN, "", "nobody", "a b", "' OR 1=1 --", "foreign"]
TEXT: list[Any] = [*NO_TEXT, *TORN]
OPTIONAL_NAME: list[Any] = [*TEXT, "a b", "x" * 201]
REASON: list[Any] = [*NO_TEXT, "", " \n"]
LIMIT: list[Any] = [None, "5", True, 0, -1, 1.5, NAN, INF, 10**30, []]
SECONDS: list[Any] = ["1", True, -1, NAN, INF, 1e300, 10**30, [], dt.timedelta(seconds=1)]
NEEDED_SECONDS: list[Any] = [None, *SECONDS]
INSTANT: list[Any] = [5, "2030-01-01", True, dt.date(2030, 1, 1), dt.datetime(2030, 1, 1), dt.datetime.min.replace(tzinfo=UTC),
           dt.datetime.max.replace(tzinfo=UTC), dt.datetime.max.replace(tzinfo=dt.timezone(-dt.timedelta(hours=12)))]  # fmt: skip
TOKEN: list[Any] = [*NO_TEXT, *TORN, "abc", "ä", "A" * 5_000, "A" * 64]
SESSION: list[Any] = [5, True, "x", [], object()]
OPTIONS: list[Any] = [5, "x", {}, [], True]
ARGUMENTS: list[Any] = [5, None, "ab", b"ab", {}, [object()], ["\ud800"], [1, HUGE], ["no number"], [1, 2, 3]]
NAMED: list[Any] = [5, "x", [1], {1: 2}, {"a": object()}, {"nobody": 1}, {"\ud800": 1}, {"a": "x"}]
ACT: list[Any] = [None, 5, True, [], {}, "", "explode", HUGE]
FILTER: list[Any] = [5, "x", {}, [], True]
CALL: list[Any] = [5, "x", []]
FLAG: list[Any] = [None, 5, "x", []]
RATE: list[Any] = [5, True, 1.5, b"1/s", [], *TORN, "", "0/s", "-1/s", "1", "1/d", "nan/s", "9" * 50 + "/s"]
SPAN: list[Any] = [5, "1d", True, [], dt.timedelta(0), dt.timedelta(seconds=-1), dt.timedelta.max]
WHEN: list[Any] = [None, 5, True, 1.5, b"x", [], *TORN, "", "never", "* * * *", "99 * * * *", dt.timedelta(0), dt.timedelta(seconds=-1), dt.timedelta.max,
        dt.date(2030, 1, 1), dt.datetime(2030, 1, 1)]  # fmt: skip
IDS: list[Any] = [*NO_TEXT, *TORN, "", "nobody", "foreign"]
Where = Mapping[str, list[Any]]
OPTIONS_OF_ONE: Where = {
    "key": TEXT, "business_key": TEXT, "delay": NEEDED_SECONDS, "due_at": INSTANT, "start_by": NEEDED_SECONDS, "deadline": NEEDED_SECONDS, "permit": TEXT,
    "priority": [None, "1", True, 1.5, NAN, INF, 10**30, -(10**30), []], "queue": [*TEXT, "a b", "nobody"],
}  # fmt: skip
TERMS: Where = {
    "zone": [*NO_TEXT, *TORN, "", "Mars/Olympus", "../../etc/passwd"], "gap": NAME, "fold": NAME, "misfire": NAME, "overlap": NAME,
    "jitter": NEEDED_SECONDS, "tolerance": NEEDED_SECONDS, "nobody": [1],
}  # fmt: skip


class Case:
    """One method: how it is called rightly, and what is wrong in which place. ``call``: where a parameter can only be given by position."""

    def __init__(self, right: Mapping[str, Any], wrong: Where, call: Callable[..., Any] | None = None) -> None:
        self.right, self.wrong, self.call = right, wrong, call


NOTHING = Case({}, {})
"""Takes nothing."""


def positional(method: str, *names: str, **more: Any) -> Callable[..., Any]:
    """A call that gives these by position."""
    return lambda client, **given: getattr(client, method)(*[given.pop(n) for n in names], **{**more, **given})


def starred(method: str, first: str, rest: str) -> Callable[..., Any]:
    return lambda client, **given: getattr(client, method)(given[first], given[rest])


TASKS = {
    "submit": Case({"handler": "work", "a": 1}, {"handler": ID, "a": ["x", None, [], 1.5, object()], "session": SESSION, **OPTIONS_OF_ONE},
                   positional("submit", "handler")),
    "submit_with": Case({"handler": "work", "args": (1,)}, {"handler": ID, "args": ARGUMENTS, "kwargs": NAMED, "key": TEXT, "options": OPTIONS, "session": SESSION}),
    "submit_many": Case({"handler": "work", "items": [Item(args=(1,))]}, {"handler": ID, "items": [5, None, "x", [5], [None], {}], "session": SESSION}),
    "accept": Case({"requests": [Request(handler="work", args=(1,))]}, {"requests": [5, None, "x", [5], [None], {}], "session": SESSION}),
    "forward": Case({}, {"new": [None, 5, "x", {}, []]}),
    "list": Case({}, {"state": [5, "nobody", [], {}], "handler": TEXT, "queue": TEXT, "business_key": TEXT, "limit": LIMIT}),
    "find": Case({}, {"where": FILTER, "limit": [*LIMIT, 1001], "cursor": TOKEN}),
    "get": Case({}, {"task": ID}),
    "of_key": Case({"handler": "work", "key": "k"}, {"handler": ID, "key": ID}),
    "attempts": Case({}, {"task": ID}),
    "progress": Case({}, {"task": ID}),
    "notes": Case({}, {"task": ID}),
    "intents": Case({}, {"task": ID}),
    "why": Case({}, {"task": ID}),
    "cancel": Case({}, {"task": ID}),
    "result": Case({}, {"task": NO_TEXT}),
    "wait": Case({"task": "ended", "timeout": 0.0}, {"task": ID, "timeout": SECONDS, "follow": []}),
    "retry": Case({"task": "ended", "reason": "r"}, {"task": ID, "reason": REASON}),
    "plan": Case({"act": "cancel"}, {"act": ACT, "where": FILTER}),
    "carry_out": Case({"token": "token", "reason": "r"}, {"token": [*TOKEN, ""], "reason": REASON[:-2], "act": ACT[1:], "progress": [None, *CALL]}),
    "operations": Case({}, {"limit": LIMIT}),
    "review_done": Case({"task": "row", "reason": "r"}, {"task": [None, 5, "x", {}], "reason": REASON, "result": [object(), HUGE]}),
    "review_failed": Case({"task": "row", "reason": "r"}, {"task": [None, 5, "x", {}], "reason": REASON}),
    "review_retry": Case({"task": "row", "reason": "r"}, {"task": [None, 5, "x", {}], "reason": REASON,
                         "calls": [5, "x", [], {5: 1}, {"nobody": 1}, {("a", "b", "c"): 1}, {("a", 5): 1}, {"a": object()}, {"a": HUGE}, {HUGE: 1}]}),
    "review_compensate": Case({"task": "row", "handler": "work", "args": (1,), "reason": "r"},
                              {"task": [None, 5, "x", {}], "handler": ID, "args": ARGUMENTS, "kwargs": NAMED, "reason": REASON, "options": OPTIONS}),
    "close": NOTHING,
}  # fmt: skip
KEEPING = {
    "rules": NOTHING,
    "keep": Case({"time": dt.timedelta(days=1)}, {"time": SPAN, "queue": OPTIONAL_NAME, "handler": OPTIONAL_NAME, "everywhere": FLAG}),
    "drop": Case({}, {"queue": OPTIONAL_NAME, "handler": OPTIONAL_NAME, "everywhere": FLAG}),
}
SCHEDULES = {
    "publish": Case({"name": "n", "handler": "work", "when": "0 0 * * *", "args": (1,)},
                    {"name": NAME, "handler": ID, "when": WHEN, "args": ARGUMENTS, "kwargs": NAMED, "options": OPTIONS, "terms": [], **TERMS}),
    "sync": Case({}, {"declared": [5, "x", [5], [None]]}),
    "check": Case({}, {"declared": [None, 5, "x", []]}),
    "list": Case({}, {"limit": LIMIT}),
    "get": Case({}, {"name": ID}),
    "definition": Case({}, {"name": ID}),
    "versions": Case({}, {"name": ID}),
    "fires": Case({"name": "s"}, {"name": ID, "limit": LIMIT}),
    "late": NOTHING,
    "preview": Case({"name": "s"}, {"name": ID, "count": LIMIT}),
    "pause": Case({"name": "s"}, {"name": ID, "reason": NO_TEXT}),
    "resume": Case({}, {"name": ID}),
    "trigger": Case({"name": "s"}, {"name": ID, "request": OPTIONAL_NAME}),
    "backfill": Case({"name": "s", "start": PAST, "end": PAST + dt.timedelta(days=1)},
                     {"name": ID, "start": INSTANT, "end": [None, *INSTANT, dt.datetime(2100, 1, 1, tzinfo=UTC)], "request": OPTIONAL_NAME}),
    "delete": Case({"name": "s"}, {"name": ID, "reason": NO_TEXT}),
    "close": NOTHING,
}  # fmt: skip
BURST: list[Any] = ["1", True, 0, -1, 1.5, NAN, INF, 10**30, []]
GATED: Where = {"queue": NAME, "handler": [n for n in NAME if n]}
QUEUES = {
    "pause": Case({"queue": "q", "reason": "r"}, {**GATED, "reason": REASON}),
    "resume": Case({"queue": "q"}, GATED),
    "set_rate": Case({"queue": "q", "rate": "1/s"}, {**GATED, "rate": RATE, "burst": BURST}),
    "set_weight": Case({"queue": "q", "weight": 2}, {"queue": NAME, "weight": LIMIT}),
    "set_quota": Case(
        {}, {"queue": OPTIONAL_NAME, "backlog": [None, "1", True, -1, 1.5, NAN, INF, 10**30, []], "accept": RATE, "accepting": FLAG}
    ),
    "list": Case({}, {"limit": LIMIT}),
    "show": Case({}, {"queue": NAME}),
    "quota": NOTHING,
    "handlers": Case({}, {"limit": LIMIT}),
    "close": NOTHING,
}
PERMITS = {
    "set_capacity": Case({"key": "p", "capacity": 2}, {"key": [*NO_TEXT, *TORN, ""], "capacity": LIMIT}),
    "pause": Case({"key": "p", "reason": "r"}, {"key": [*NO_TEXT, *TORN, ""], "reason": REASON}),
    "resume": Case({}, {"key": [*NO_TEXT, *TORN, ""]}),
    "set_rate": Case({"key": "p", "rate": "1/s"}, {"key": [*NO_TEXT, *TORN, ""], "rate": RATE, "burst": BURST}),
    "list": Case({}, {"after": TEXT, "limit": LIMIT}),
    "show": Case({}, {"key": ID}),
    "close": NOTHING,
}
SUBSCRIPTIONS = {
    "create": Case({"name": "n", "publish_to": "q"}, {
        "name": NAME, "handler": OPTIONAL_NAME, "queue": OPTIONAL_NAME, "business_key": TEXT, "states": [None, 5, True, "x", [5], ["RUNNING"], ["\ud800"], "FAILED"],
        "publish_to": TEXT, "celery_task": TEXT, "attempts": LIMIT, "delay": NEEDED_SECONDS, "max_delay": NEEDED_SECONDS, "lease": [0, *NEEDED_SECONDS],
        "since": INSTANT}),
    "list": NOTHING,
    "get": Case({}, {"name": ID}),
    "counts": Case({}, {"name": ID}),
    "pause": Case({}, {"name": ID}),
    "resume": Case({}, {"name": ID}),
    "delete": Case({}, {"name": ID}),
    "pull": Case({"name": "s"}, {"name": ID, "limit": LIMIT, "lease": [0, *SECONDS], "wait": NEEDED_SECONDS}),
    "received": Case({}, {"body": [None, 5, "x", [], {}, {"subscription": 5}, *({"namespace": "default", "subscription": "s", "event": e} for e in [*TORN, "nobody"]),
                                   *({"namespace": "default", "subscription": s, "event": "e"} for s in TORN), {"namespace": "other", "subscription": "s", "event": "e"}]}),
    "acknowledge": Case({}, {"done": [None, 5, "x", {}, []]}, positional("acknowledge", "done")),
    "acknowledge_by_id": Case({"name": "s", "ids": "ended"}, {"name": ID, "ids": IDS}, starred("acknowledge_by_id", "name", "ids")),
    "refuse": Case({"delivery": "delivery"}, {"delivery": [None, 5, "x", {}], "reason": NO_TEXT, "after": SECONDS}),
    "refuse_by_id": Case({"name": "s", "event": "ended", "lease": "l"}, {"name": ID, "event": TEXT, "lease": TEXT, "reason": NO_TEXT, "after": SECONDS}),
    "deliveries": Case({"name": "s"}, {"name": ID, "state": [5, "nobody", [], {}], "limit": LIMIT}),
    "redeliver": Case({"name": "s", "ids": "ended"}, {"name": ID, "ids": IDS}, starred("redeliver", "name", "ids")),
    "existing": Case({}, {"pairs": [None, 5, "x", [5], [("a",)], [("a", 5)], [(None, "b")], [("\ud800", "b")]]}),
    "close": NOTHING,
}  # fmt: skip
OUTBOX = {
    "create": Case({"url": "url"}, {"url": [None, 5, "", "x", "nobody://", HUGE], "prefix": NAME}),
    "submit": Case({"session": "session", "handler": "work", "a": 1}, {"session": [None, *SESSION], "handler": ID, "a": ["x", None, []], **OPTIONS_OF_ONE, "queue": [*TEXT, "a b"]},
                   positional("submit", "session", "handler")),
    "submit_with": Case({"session": "session", "handler": "work", "args": (1,)},
                        {"session": [None, *SESSION], "handler": ID, "args": ARGUMENTS, "kwargs": NAMED, "key": TEXT, "options": OPTIONS}),
}  # fmt: skip
INBOX = {
    "create": Case({}, {"session": [None, *SESSION]}),
    "accept": Case({"session": "session", "delivery": "delivery"}, {"session": [None, *SESSION], "delivery": [None, 5, "x", {}]}),
    "purge": Case({"session": "session", "subscriptions": "subscriptions"},
                  {"session": [None, *SESSION], "subscriptions": [None, 5, "x"], "older_than": [None, *SPAN[:-1]], "limit": LIMIT}),
}  # fmt: skip
WAITED: Where = {"timeout": SECONDS, "interval": [0, *SECONDS], "propagate": [], "callback": [1], "nobody": [1]}
RESULT = {
    "get": Case({"timeout": 0.0}, {**WAITED, "follow": [], "disable_sync_subtasks": []}),
    "wait": Case({"timeout": 0.0}, WAITED),
    "ready": NOTHING, "exists": NOTHING, "successful": NOTHING, "failed": NOTHING,
    "maybe_throw": Case({}, {"propagate": []}), "maybe_reraise": Case({}, {"propagate": []}),
    "revoke": Case({}, {"connection": [5], "terminate": [True, "x"], "signal": ["KILL", 9], "wait": [], "timeout": []}),
}  # fmt: skip
REFUSALS = (ConfigurationError, TaskInvalid, UnknownHandler, ScheduleInvalid)
"""Of what is wrong in a call, whatever is stored."""
TABLE: dict[type, dict[str, Case]] = {
    Tasks: TASKS, Keeping: KEEPING, Schedules: SCHEDULES, Queues: QUEUES, Permits: PERMITS, Subscriptions: SUBSCRIPTIONS, Outbox: OUTBOX, Inbox: INBOX,
    TaskResult: RESULT,
}  # fmt: skip


class Scene:
    """One of everything, in two namespaces, and the clients of one of them."""

    def __init__(self, store: Opened, path: Path) -> None:
        self.db = db = store.db
        db.run(lambda tx: tx.insert_or_nothing(tx.t.installation, id=1, uid="installation-1", secret="secret-1"))
        db.run(outboxes.create)
        handlers, installation = Handlers(), Installation.local(path)

        @handlers.task(name="work", effects="idempotent")
        def work(a: int, text: str = "") -> None: ...

        for namespace in ("default", "other"):
            with Subscriptions(installation, namespace, database=db) as s:
                s.create("s" if namespace == "default" else "foreign")
            with Schedules(installation, handlers, namespace, database=db) as schedules:
                schedules.publish("s" if namespace == "default" else "foreign", "work", dt.timedelta(days=1), (1,))
        ended, unknown = taken(db, new("a", policy=Policy(attempts=1)), new("b"))
        settle(db, ending(ended, o.Raised("ValueError", "no")), ending(unknown, o.AskedForReview("look")))
        submit(db, new("c"), new("d", namespace="other", id="foreign"))
        subscriptions = Subscriptions(installation, database=db)
        (delivery,) = subscriptions.pull("s")
        tasks = Tasks(installation, handlers, database=db)
        self.connection = db.engine.connect()
        inbox = Inbox("bad_inbox")
        inbox.create(self.connection)
        self.connection.commit()
        self.clients: dict[type, Any] = {
            Tasks: tasks, Keeping: tasks.retention, Schedules: Schedules(installation, handlers, database=db), Queues: Queues(installation, database=db),
            Permits: Permits(installation, database=db), Subscriptions: subscriptions, Outbox: Outbox(handlers, target="installation-1"), Inbox: inbox,
            TaskResult: tasks.result(ended.id),
        }  # fmt: skip
        self.stands_for: dict[str, Any] = {
            "ended": ended.id, "row": read(db, unknown.id), "delivery": delivery, "session": self.connection, "subscriptions": subscriptions,
            "token": tasks.plan("cancel").token, "url": f"sqlite:///{path / 'other.db'}",
        }  # fmt: skip

    def right(self, case: Case) -> dict[str, Any]:
        return {name: self.stands_for.get(v, v) if isinstance(v, str) else v for name, v in case.right.items()}

    def rows(self) -> dict[str, list[Any]]:
        """Everything that is stored."""
        outbox = [outbox_table(self.db.tables.prefix)]
        return self.db.read(lambda tx: {t.name: tx.rows(t.select()) for t in [*self.db.tables.metadata.sorted_tables, *outbox]})

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def scene(store: Opened, tmp_path: Path) -> Iterator[Scene]:
    found = Scene(store, tmp_path)
    yield found
    found.close()


def methods(client: type) -> dict[str, Any]:
    return {n: m for n, m in inspect.getmembers(client, callable) if not n.startswith("_") and not inspect.isclass(m)}


@pytest.mark.parametrize("client", TABLE, ids=lambda c: c.__name__)
def test_the_table_names_every_method_and_parameter(client: type) -> None:
    """So that what is new is tried too."""
    assert set(TABLE[client]) == set(methods(client))
    for name, method in methods(client).items():
        takes = {p.name for p in inspect.signature(method).parameters.values()} - {"self", "args", "kwargs", "options"}
        assert takes <= {*TABLE[client][name].wrong, "due_at"}, name


@contextmanager
def _rolled_back(scene: Scene) -> Iterator[None]:
    """What a refused call has left in the caller's transaction goes; the caller would not commit it either."""
    yield
    scene.connection.rollback()


def accepted(scene: Scene, client: type, name: str) -> Iterator[str]:
    """Calls that were not refused as they have to be."""
    case, target = TABLE[client][name], scene.clients[client]
    for place, values in case.wrong.items():
        for value in values:
            what = f"{name}({place}={value!r:.40})"
            with _rolled_back(scene):
                try:
                    call = case.call or (lambda t, n=name, **given: getattr(t, n)(**given))
                    answer = call(target, **{**scene.right(case), place: value})
                except MillstreamError as exc:
                    text = str(exc)
                    if not 10 < len(text) < 1_500 or "\0" in text or not text.isprintable():
                        yield f"{what}: {len(text)} characters: {text!r:.200}"
                except Exception as exc:
                    yield f"{what}: {type(exc).__name__}: {str(exc)[:150]}"
                else:
                    yield f"{what}: gave {answer!r:.80}"


def test_what_is_wrong_is_refused_and_changes_nothing(scene: Scene) -> None:
    """One value at a time, all others right."""
    before = scene.rows()
    found = [f"{client.__name__}.{line}" for client, cases in TABLE.items() for name in cases for line in accepted(scene, client, name)]
    assert not found, "\n".join(found)
    assert scene.rows() == before
    for client, cases in TABLE.items():
        for name, case in cases.items():
            if case.right:
                done_or_too_late(scene, client, name)


def done_or_too_late(scene: Scene, client: type, name: str) -> None:
    """The control: with nothing wrong in it a call is not refused for its values."""
    case = TABLE[client][name]
    call = case.call or (lambda t, **given: getattr(t, name)(**given))
    try:
        call(scene.clients[client], **scene.right(case))
    except REFUSALS:
        raise
    except MillstreamError as exc:  # the task has failed, is decided already
        assert str(exc)


CLIENTS: Where = {"namespace": NAME, "actor": NO_TEXT}
CONSTRUCTORS: dict[type, Where] = {
    Tasks: CLIENTS, Schedules: CLIENTS, Queues: CLIENTS, Permits: CLIENTS, Subscriptions: CLIENTS,
    Outbox: {"target": [*TEXT, ""], "namespace": NAME, "prefix": NAME, "actor": NO_TEXT, "wait": NEEDED_SECONDS},
    Inbox: {"table": NAME, "wait": NEEDED_SECONDS},
}  # fmt: skip


@pytest.mark.parametrize("client", CONSTRUCTORS, ids=lambda c: c.__name__)
def test_no_client_is_made_of_what_is_wrong(client: type, tmp_path: Path) -> None:
    """Before it opens anything."""
    first = {Outbox: (Handlers(),), Inbox: ()}.get(client, (Installation.local(tmp_path),))
    more = {"target": "t"} if client is Outbox else {}
    for place, values in CONSTRUCTORS[client].items():
        for value in values:
            with pytest.raises(MillstreamError) as raised:
                client(*first, **{**more, place: value})
            assert 10 < len(str(raised.value)) < 1_500 and str(raised.value).isprintable(), (place, value)
    assert not list(tmp_path.iterdir())


def test_a_reason_is_kept_whatever_a_person_writes(scene: Scene) -> None:
    """NUL, half characters, a megabyte: shortened, written out, never an error of a database."""
    words = "why\0\ud800" + HUGE
    c = scene.clients
    c[Tasks].review_failed(scene.stands_for["row"], reason=words)
    c[Tasks].retry(scene.stands_for["ended"], reason=words)
    c[Tasks].carry_out(scene.stands_for["token"], reason=words)
    c[Schedules].pause("s", words)
    c[Schedules].delete("s", words)
    c[Subscriptions].refuse(scene.stands_for["delivery"], words)
    c[Queues].pause("q", reason=words)
    c[Permits].pause("p", reason=words)
    (refused,) = c[Subscriptions].deliveries("s")
    assert refused.reason.startswith("why\\x00\\ud800")
    assert c[Queues].show("q").gate.paused_why.startswith("why\\x00\\ud800")
