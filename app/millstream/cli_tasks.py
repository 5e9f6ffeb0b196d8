"""``millstream tasks …`` and ``millstream reviews …``: each command is one call of :class:`millstream.tasks.Tasks`, and what it gave, shown. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millstream_schema.durable.effects import IntentRow
from millstream_schema.durable.explaining import conflicts
from millstream_schema.durable.finding import TaskFilter
from millstream_schema.durable.progress import NoteRow, told
from millstream_schema.durable.records import AttemptRow, TaskRow
from millstream_schema.durable.requests import Options, decode_arguments, decode_result
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError
from millstream_schema.reasons import one_line

from . import formatting
from .cli_filters import filtered
from .cli_jobs import JsonFlag
from .task_search import Page
from .tasks import Tasks

tasks_app = typer.Typer(no_args_is_help=True, help="Find durable tasks, explain them, do them again, cancel them, forget them.")
reviews_app = typer.Typer(no_args_is_help=True, help="Tasks whose outcome nobody knows, and the decisions on them.")

TaskId = Annotated[str, typer.Argument(help="Id of the task.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the task.")]
HandlerName = Annotated[str, typer.Argument(help="Name of a handler that workers have registered.")]
Args = Annotated[str, typer.Option("--args", help="Its positional arguments, as a JSON array.")]
Kwargs = Annotated[str, typer.Option("--kwargs", help="Its arguments by name, as a JSON object.")]
Calls = Annotated[
    list[str] | None,
    typer.Option(
        "--called",
        help='A call that has been made, and its outcome, as JSON: {"name": "charge", "result": {"id": 7}}. "key" too, if it has one.',
    ),
]
Cursor = Annotated[str, typer.Option("--cursor", help="Go on where the page before ended, with the same filters.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show.")]


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    """One call that a person knows to have been made."""

    name: str
    key: str = ""
    result: Any = None


def line(task: TaskRow) -> dict[str, Any]:
    """A task in a list: the keys are stable. Times in UTC µs."""
    return {
        "id": task.id, "namespace": task.namespace, "handler": task.handler, "key": task.key, "queue": task.queue, "state": task.state.value,
        "cause": task.cause.value, "reason": one_line(task.reason), "starts": task.starts, "failures": task.failures, "created_us": task.created_us,
        "settled_us": task.settled_us, "business_key": task.business_key, "retry_of": task.retry_of, "superseded_by": task.superseded_by,
        "origin": task.origin, "error_class": task.error_class,
    }  # fmt: skip


def _table(rows: list[TaskRow]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in ("id", "handler", "key", "queue", "state", "starts", "created", "reason"):
        table.add_column(column, overflow="fold")
    for task in rows:
        created = formatting.moment(task.created_us)
        why = one_line(task.reason or task.cause)
        table.add_row(task.id, task.handler, task.key, task.queue, task.state.value, str(task.starts), created, why)
    return table


def _attempt(attempt: AttemptRow, task: TaskRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(attempt), "late": bool(attempt.late), "conflicts": conflicts(attempt, task)}


@tasks_app.command("list")
@filtered
def list_tasks(ctx: typer.Context, where: TaskFilter, limit: Limit = 50, cursor: Cursor = "", as_json: JsonFlag = False) -> None:
    """The newest tasks that match; ``find`` gives the next page's cursor in its JSON, too."""
    with ctx.obj.tasks() as tasks:
        page = tasks.find(where, limit=limit, cursor=cursor)
    if as_json:
        formatting.show_json([line(r) for r in page.tasks])
    else:
        _show(page)


@tasks_app.command("find")
@filtered
def find(ctx: typer.Context, where: TaskFilter, limit: Limit = 50, cursor: Cursor = "", as_json: JsonFlag = False) -> None:
    """A page of the tasks that match, newest first, and the cursor of the next one."""
    with ctx.obj.tasks() as tasks:
        page = tasks.find(where, limit=limit, cursor=cursor)
    if as_json:
        formatting.show_json({"tasks": [line(r) for r in page.tasks], "cursor": page.cursor})
    else:
        _show(page)


def _show(page: Page) -> None:
    formatting.show(_table(page.tasks))
    if page.cursor:
        formatting.show(f"there may be more: repeat it with --cursor {page.cursor}")


@reviews_app.command("show")
@tasks_app.command("show")
def show(ctx: typer.Context, task: TaskId, as_json: JsonFlag = False) -> None:
    """All that is known of a task, with its attempts and its calls by ctx.external."""
    with ctx.obj.tasks() as tasks:
        _show_one(tasks, task, as_json)


@tasks_app.command("of-key")
def of_key(
    ctx: typer.Context,
    handler: Annotated[str, typer.Argument(help="Name of its handler.")],
    key: Annotated[str, typer.Argument(help="The key it was submitted under; of a Celery message, its id.")],
    as_json: JsonFlag = False,
) -> None:
    """All that is known of the task that was accepted under a key."""
    with ctx.obj.tasks() as tasks:
        _show_one(tasks, tasks.of_key(handler, key).id, as_json)


def _show_one(tasks: Tasks, task: str, as_json: bool) -> None:
    row, attempts, why, progress, notes, calls = (
        tasks.get(task),
        tasks.attempts(task),
        tasks.why(task),
        tasks.progress(task),
        tasks.notes(task),
        tasks.intents(task),
    )
    args, kwargs = decode_arguments(row.args)
    found = {
        **line(row), "why": why, "args": repr(args), "kwargs": repr(kwargs), "result": repr(decode_result(row.result)) if row.result else None,
        "effects": row.effects.value, "fence": row.fence, "session": row.session, "attempts": [_attempt(a, row) for a in attempts],
        "progress": msgspec.to_builtins(progress), "notes": [_noted(n) for n in notes],
        "calls": [_call(i) for i in calls],
    }  # fmt: skip
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show(formatting.pairs(found, without=("attempts", "progress", "notes", "calls")))
        for a in attempts:
            formatting.show(_evidence(a, row))
        for p in progress:
            formatting.show(f"  attempt {p.fence}: {told(p)}, {formatting.moment(p.at_us)}")
        for n in notes:
            formatting.show(f"  attempt {n.fence}: {one_line(' '.join((n.text, n.fields)))}, {formatting.moment(n.at_us)}")
        for i in calls:
            formatting.show(_known(i))


def _noted(note: NoteRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(note), "fields": msgspec.json.decode(note.fields) if note.fields else {}}


def _call(i: IntentRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(i), "result": None if i.result is None else repr(decode_result(i.result))}


def _known(i: IntentRow) -> str:
    """What is known of one call in one line."""
    outcome = f" with {one_line(repr(decode_result(i.result)))}" if i.result is not None else ""
    said = f": {one_line(i.detail)}" if i.detail else ""
    by = f" by {i.closed_by}" if i.closed_by else ""
    begun = f"begun {formatting.moment(i.opened_us)} by attempt {i.fence} of {i.task}, {i.calls} times in all, idempotency key {i.idempotency_key}"
    return f"  call {i.id}: {i.state}{outcome}{by} ({begun}){said}"


def _evidence(a: AttemptRow, task: TaskRow) -> str:
    """One attempt in one line."""
    late = " (late, conflicts with the end that counts)" if conflicts(a, task) else " (late)" if a.late else ""
    said = f": {one_line(a.detail)}" if a.detail else ""
    return f"  attempt {a.fence}: {a.outcome}{late} at {a.session or 'nobody'}, {formatting.moment(a.ended_us)}{said}"


@tasks_app.command("why")
def why(ctx: typer.Context, task: TaskId) -> None:
    """One line: why it is not running."""
    with ctx.obj.tasks() as tasks:
        formatting.show(tasks.why(task))


def _json(option: str, text: str, shape: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=shape)
    except (msgspec.DecodeError, UnicodeEncodeError) as exc:
        raise ConfigurationError(f"{option} is no JSON as it must be: {exc}. Quote it as one word of the shell") from exc


@tasks_app.command("submit")
def submit(
    ctx: typer.Context,
    handler: HandlerName,
    args: Args = "[]",
    kwargs: Kwargs = "{}",
    key: Annotated[str, typer.Option("--key", help="Makes it one task however often it is submitted.")] = "",
    business_key: Annotated[str, typer.Option("--business-key", help="What it is about; tasks are found by it.")] = "",
    queue: Annotated[str, typer.Option("--queue", help="Another queue than the handler's.")] = "",
    delay: Annotated[float, typer.Option("--delay", help="Seconds until it is due.")] = 0.0,
    priority: Annotated[int, typer.Option("--priority", help="Each unit is worth a second of waiting.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Submit a task; its arguments are checked against what the handler's workers say it takes."""
    options = Options(queue=queue, business_key=business_key, delay_s=delay, priority=priority)
    given = _json("--args", args, list[Any]), _json("--kwargs", kwargs, dict[str, Any])
    with ctx.obj.tasks() as tasks:
        receipt = tasks.submit_with(handler, *given, key=key, options=options)
    if as_json:
        formatting.show_json({"id": receipt.task, "state": receipt.state.value, "replayed": receipt.replayed})
    else:
        formatting.show(f"{receipt.task} is {receipt.state.value}" + (" (submitted before)" if receipt.replayed else ""))


@reviews_app.command("list")
def list_reviews(ctx: typer.Context, limit: Limit = 50, as_json: JsonFlag = False) -> None:
    """Tasks in review."""
    with ctx.obj.tasks() as tasks:
        rows = tasks.list(state=TaskState.UNKNOWN, limit=limit)
    if as_json:
        formatting.show_json([{**line(r), "rev": r.rev} for r in rows])
    else:
        formatting.show(_table(rows))


@reviews_app.command("done")
def done(
    ctx: typer.Context,
    task: TaskId,
    reason: Reason,
    result: Annotated[str, typer.Option("--result", help="Its result, as JSON.")] = "null",
) -> None:
    """It has been done: the task succeeds, with this result."""
    value = _json("--result", result, Any)
    with ctx.obj.tasks() as tasks:
        tasks.review_done(tasks.get(task), result=value, reason=reason)
    formatting.show(f"{task} is SUCCEEDED by review")


@reviews_app.command("fail")
def fail(ctx: typer.Context, task: TaskId, reason: Reason) -> None:
    """It has not been done and will not be."""
    with ctx.obj.tasks() as tasks:
        tasks.review_failed(tasks.get(task), reason=reason)
    formatting.show(f"{task} is FAILED by review")


@reviews_app.command("retry")
def retry(ctx: typer.Context, task: TaskId, reason: Reason, done: Calls = None) -> None:
    """It has not been done: a new, linked task does it. Say why that is safe. Its open calls count as not made, but for those named by --called."""
    try:
        calls = {(c.name, c.key): c.result for c in (msgspec.json.decode(text, type=_Called) for text in done or [])}
    except msgspec.MsgspecError as exc:
        raise ConfigurationError(f'--called is no object like {{"name": "charge", "key": "", "result": 7}}: {exc}') from exc
    with ctx.obj.tasks() as tasks:
        receipt = tasks.review_retry(tasks.get(task), reason=reason, calls=calls)
    formatting.show(f"{task} is taken over by {receipt.task}")


@reviews_app.command("compensate")
def compensate(ctx: typer.Context, task: TaskId, handler: HandlerName, reason: Reason, args: Args = "[]", kwargs: Kwargs = "{}") -> None:
    """Whatever it did is made up for: it fails, and a task of another handler is submitted with the decision."""
    given = _json("--args", args, list[Any]), _json("--kwargs", kwargs, dict[str, Any])
    with ctx.obj.tasks() as tasks:
        receipt = tasks.review_compensate(tasks.get(task), handler, *given, reason=reason)
    formatting.show(f"{task} is made up for by {receipt.task}")
