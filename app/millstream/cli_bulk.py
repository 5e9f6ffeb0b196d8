"""``millstream tasks retry|cancel|purge|operations`` and ``millstream retention …``: one task, or many by a dry run and its token. Mounted by ``cli``."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from millstream_schema.durable.bulk import Act, OperationRow
from millstream_schema.durable.finding import TaskFilter
from millstream_schema.durable.retention import RetentionRule
from millstream_schema.errors import ConfigurationError
from millstream_schema.reasons import one_line

from . import formatting
from .cli_filters import age_of, ago, filtered
from .cli_jobs import JsonFlag
from .cli_tasks import Limit, tasks_app
from .tasks import Tasks

retention_app = typer.Typer(no_args_is_help=True, help="How long settled tasks are kept.")

MaybeTask = Annotated[str, typer.Argument(help="Id of one task; without it, many by --dry-run and --token.", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count those that the filters choose, change nothing, and give the token that does it.")
]
Token = Annotated[str, typer.Option("--token", help="Of a dry run: carries it out. Interrupted, the same token goes on.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; a retry has to say why it is safe. Kept with the operation.")]
Queue = Annotated[str, typer.Option("--queue", help="Tasks of this queue.")]
HandlerName = Annotated[str, typer.Option("--handler", help="Tasks of this handler.")]
Everywhere = Annotated[bool, typer.Option("--everywhere", help="In every namespace that has no setting of its own.")]


def _operation(o: OperationRow) -> dict[str, Any]:
    """An operation as data: the keys are stable."""
    return {
        "id": o.id, "act": o.act.value, "task": o.task, "filter": msgspec.json.decode(o.filter) if o.filter else {}, "expected": o.expected, "seen": o.seen,
        "done": o.done, "over": bool(o.over), "reason": o.reason, "actor": o.actor, "created_us": o.created_us,
    }  # fmt: skip


def _many(tasks: Tasks, act: Act, where: TaskFilter, *, dry_run: bool, token: str, reason: str, as_json: bool) -> None:
    """A dry run, or what one's token says."""
    if dry_run == bool(token):
        raise ConfigurationError(
            f"give the id of a task, or --dry-run with filters, or --token of a dry run: {act} acts on many only after counting them"
        )
    if dry_run:
        plan = tasks.plan(act, where)
        if as_json:
            formatting.show_json({"act": act.value, "count": plan.count, "token": plan.token})
        else:
            formatting.show(
                f"{act} would reach {plan.count} tasks; to do it: millstream tasks {act} --token {plan.token}"
                + (" --reason …" if act is Act.RETRY else "")
            )
        return
    if where != TaskFilter():
        raise ConfigurationError("the token says which tasks are meant: leave the filters out")
    console = formatting.console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        line = bar.add_task(act.value, total=None)
        operation = tasks.carry_out(token, reason=reason, act=act, progress=lambda o: bar.update(line, total=o.expected, completed=o.seen))
    if as_json:
        formatting.show_json(_operation(operation))
    else:
        formatting.show(
            f"{operation.act}: {operation.done} of {operation.expected} counted tasks"
            + ("" if operation.done == operation.expected else "; the others had changed, or are still needed")
        )


def _one(task: str, dry_run: bool, token: str, where: TaskFilter) -> bool:
    """Whether the command is about one task. Raises ConfigurationError when it is about both."""
    if task and (dry_run or token or where != TaskFilter()):
        raise ConfigurationError("give the id of a task, or filters, not both")
    return bool(task)


@tasks_app.command("cancel")
@filtered
def cancel(
    ctx: typer.Context, where: TaskFilter, task: MaybeTask = "", dry_run: DryRun = False, token: Token = "", reason: Reason = "", as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Ask for the end of a task, or of many: at once before they run, else their handlers are told and the first end wins."""
    with ctx.obj.tasks() as tasks:
        if not _one(task, dry_run, token, where):
            _many(tasks, Act.CANCEL, where, dry_run=dry_run, token=token, reason=reason, as_json=as_json)
            return
        state = tasks.cancel(task)
    if as_json:
        formatting.show_json({"task": task, "state": state.value})
    else:
        formatting.show(f"{task} is {state}" + ("; its handler is told" if state.held else ""))


@tasks_app.command("retry")
@filtered
def retry(
    ctx: typer.Context, where: TaskFilter, task: MaybeTask = "", dry_run: DryRun = False, token: Token = "", reason: Reason = "", as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Do a task again that failed, was cancelled or expired, or many: by new tasks linked to them."""
    with ctx.obj.tasks() as tasks:
        if not _one(task, dry_run, token, where):
            _many(tasks, Act.RETRY, where, dry_run=dry_run, token=token, reason=reason, as_json=as_json)
            return
        receipt = tasks.retry(task, reason=reason)
    if as_json:
        formatting.show_json({"task": receipt.task, "retry_of": task, "state": receipt.state.value, "replayed": receipt.replayed})
    else:
        formatting.show(f"{task} is done again by {receipt.task}" + (", as was asked for before" if receipt.replayed else ""))


@tasks_app.command("purge")
@filtered
def purge(
    ctx: typer.Context,
    where: TaskFilter,
    older_than: Annotated[str, typer.Option("--older-than", help="Only those that ended before so long: 90s, 15m, 6h, 30d.")] = "",
    dry_run: DryRun = False,
    token: Token = "",
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Forget settled tasks with all that is kept of them, but none that something still refers to."""
    if older_than:
        if where.settled_until is not None:
            raise ConfigurationError("--older-than and --settled-until say the same: give one")
        where = msgspec.structs.replace(where, settled_until=ago(age_of(older_than, "--older-than")))
    with ctx.obj.tasks() as tasks:
        _many(tasks, Act.PURGE, where, dry_run=dry_run, token=token, reason=reason, as_json=as_json)


@tasks_app.command("operations")
def operations(ctx: typer.Context, limit: Limit = 50, as_json: JsonFlag = False) -> None:
    """Retries by hand and acts on many: who, why, how far."""
    with ctx.obj.tasks() as tasks:
        rows = tasks.operations(limit)
    if as_json:
        formatting.show_json([_operation(o) for o in rows])
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("created", "act", "what", "done", "by", "reason"):
        table.add_column(column, overflow="fold")
    for o in rows:
        done = f"{o.done} of {o.expected}" + ("" if o.over else " so far")
        table.add_row(formatting.moment(o.created_us), o.act.value, o.task or o.filter, done, o.actor, one_line(o.reason))
    formatting.show(table)


# -- retention


def _rule(rule: RetentionRule) -> dict[str, Any]:
    """A setting as data: the keys are stable. ``keep_us`` 0: for ever."""
    return {"namespace": rule.namespace, "scope": rule.scope.value, "name": rule.name, "keep_us": rule.keep_us}


@retention_app.command("list")
def list_rules(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """The settings of this namespace and those for all."""
    with ctx.obj.tasks() as tasks:
        rules = tasks.retention.rules()
    if as_json:
        formatting.show_json([_rule(r) for r in rules])
        return
    for r in rules:
        time = "for ever" if not r.keep_us else str(dt.timedelta(microseconds=r.keep_us))
        formatting.show(f"{r.namespace or 'every namespace'}: {f'{r.scope} {r.name}' if r.scope else 'all tasks'} {time}")
    if not rules:
        formatting.show("no settings: settled tasks are kept for 30 days")


@retention_app.command("set")
def set_rule(
    ctx: typer.Context,
    time: Annotated[str, typer.Argument(help="How long after its end: 6h, 30d, or forever.")],
    queue: Queue = "",
    handler: HandlerName = "",
    everywhere: Everywhere = False,
) -> None:
    """Keep the settled tasks of a queue, of a handler, or all of them for this long."""
    with ctx.obj.tasks() as tasks:
        tasks.retention.keep(None if time == "forever" else age_of(time, "the time"), queue=queue, handler=handler, everywhere=everywhere)
    formatting.show(
        f"settled tasks{f' of {queue or handler}' if queue or handler else ''} are kept {'' if time == 'forever' else 'for '}{time}"
    )


@retention_app.command("drop")
def drop_rule(ctx: typer.Context, queue: Queue = "", handler: HandlerName = "", everywhere: Everywhere = False) -> None:
    """Back to the wider setting."""
    with ctx.obj.tasks() as tasks:
        there = tasks.retention.drop(queue=queue, handler=handler, everywhere=everywhere)
    formatting.show("the wider setting counts again" if there else "there was no such setting")
