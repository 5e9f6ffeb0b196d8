"""``millstream tasks …`` and ``millstream reviews …``: each command is one call of :class:`millstream.tasks.Tasks`, and what it gave, shown. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millstream_schema.durable.records import AttemptRow, TaskRow
from millstream_schema.durable.requests import decode_arguments, decode_result
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError
from millstream_schema.reasons import one_line

from . import formatting
from .cli_jobs import JsonFlag

tasks_app = typer.Typer(no_args_is_help=True, help="Look at durable tasks, cancel them.")
reviews_app = typer.Typer(no_args_is_help=True, help="Tasks whose outcome nobody knows, and the decisions on them.")

TaskId = Annotated[str, typer.Argument(help="Id of the task.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the task.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show.")]


def line(task: TaskRow) -> dict[str, Any]:
    """A task in a list: the keys are stable. Times in UTC µs."""
    return {
        "id": task.id, "namespace": task.namespace, "handler": task.handler, "key": task.key, "queue": task.queue, "state": task.state.value,
        "cause": task.cause.value, "reason": one_line(task.reason), "starts": task.starts, "failures": task.failures, "created_us": task.created_us,
        "settled_us": task.settled_us, "business_key": task.business_key, "retry_of": task.retry_of, "superseded_by": task.superseded_by,
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


def _attempt(attempt: AttemptRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(attempt), "late": bool(attempt.late)}


def _state(text: str) -> TaskState | None:
    if not text:
        return None
    try:
        return TaskState(text.upper())
    except ValueError:
        raise ConfigurationError(f"--state must be one of {', '.join(TaskState)}, not {text!r}") from None


@tasks_app.command("list")
def list_tasks(
    ctx: typer.Context,
    state: Annotated[str, typer.Option("--state", help="Only those in this state.")] = "",
    handler: Annotated[str, typer.Option("--handler", help="Only those of this handler.")] = "",
    queue: Annotated[str, typer.Option("--queue", help="Only those of this queue.")] = "",
    business_key: Annotated[str, typer.Option("--business-key", help="Only those with this business key.")] = "",
    limit: Limit = 50,
    as_json: JsonFlag = False,
) -> None:
    """The newest tasks."""
    with ctx.obj.tasks() as tasks:
        rows = tasks.list(state=_state(state), handler=handler, queue=queue, business_key=business_key, limit=limit)
    if as_json:
        formatting.show_json([line(r) for r in rows])
    else:
        formatting.show(_table(rows))


@tasks_app.command("show")
def show(ctx: typer.Context, task: TaskId, as_json: JsonFlag = False) -> None:
    """All that is known of a task, with its attempts."""
    with ctx.obj.tasks() as tasks:
        row, attempts, why = tasks.get(task), tasks.attempts(task), tasks.why(task)
    args, kwargs = decode_arguments(row.args)
    found = {
        **line(row), "why": why, "args": repr(args), "kwargs": repr(kwargs), "result": repr(decode_result(row.result)) if row.result else None,
        "effects": row.effects.value, "fence": row.fence, "session": row.session, "attempts": [_attempt(a) for a in attempts],
    }  # fmt: skip
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show("\n".join(f"{k:14} {v}" for k, v in found.items() if k != "attempts" and v not in ("", None)))
        for a in attempts:
            formatting.show(
                f"  attempt {a.fence}: {a.outcome}" + (" (late)" if a.late else "") + (f": {one_line(a.detail)}" if a.detail else "")
            )


@tasks_app.command("why")
def why(ctx: typer.Context, task: TaskId) -> None:
    """One line: why it is not running."""
    with ctx.obj.tasks() as tasks:
        formatting.show(tasks.why(task))


@tasks_app.command("cancel")
def cancel(ctx: typer.Context, task: TaskId) -> None:
    """Ask for its end: at once before it runs, else its handler is told and its first end wins."""
    with ctx.obj.tasks() as tasks:
        state = tasks.cancel(task)
    formatting.show(f"{task} is {state}" + ("; its handler is told" if state.held else ""))


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
    try:
        value = msgspec.json.decode(result)
    except msgspec.DecodeError as exc:
        raise ConfigurationError(f"--result is no JSON: {exc}") from exc
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
def retry(ctx: typer.Context, task: TaskId, reason: Reason) -> None:
    """It has not been done: a new, linked task does it. Say why that is safe."""
    with ctx.obj.tasks() as tasks:
        receipt = tasks.review_retry(tasks.get(task), reason=reason)
    formatting.show(f"{task} is taken over by {receipt.task}")
