"""``millstream schedules …``: each command is one call of :class:`millstream.schedules.Schedules`, and what it gave, shown. Mounted by ``cli``."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millstream_schema.durable.recurrence import Spec, describe
from millstream_schema.durable.requests import Options, decode_arguments
from millstream_schema.durable.schedules import FireRow, ScheduleRow, ScheduleState
from millstream_schema.errors import ConfigurationError, MillstreamError, ScheduleInvalid
from millstream_schema.ports import SystemClock
from millstream_schema.reasons import one_line
from millstream_schema.store.schedules import Published

from . import formatting
from .arguments import celery_of
from .cli_jobs import JsonFlag
from .schedule_terms import Terms, When, declaration
from .schedules import preview

schedules_app = typer.Typer(no_args_is_help=True, help="Durable tasks that are submitted by the clock.")

ScheduleName = Annotated[str, typer.Argument(help="Name of the schedule.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the schedule.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show.")]
CronOption = Annotated[str | None, typer.Option("--cron", help="Cron expression: five fields, or six with seconds in front.")]
EveryOption = Annotated[float | None, typer.Option("--every", min=1, help="Seconds between two fires.")]
AtOption = Annotated[str | None, typer.Option("--at", help="Once, at this instant: ISO 8601 with its offset.")]
ZoneOption = Annotated[str | None, typer.Option("--zone", help="IANA time zone of the cron expression; UTC.")]
GapOption = Annotated[str | None, typer.Option("--gap", help="A wall time that does not exist: run_after or skip.")]
FoldOption = Annotated[str | None, typer.Option("--fold", help="A wall time that exists twice: first, second or both.")]
HandlersOption = Annotated[
    str | None,
    typer.Option("--handlers", help="module:attribute of the Handlers object; else handlers are looked for among the workers' by name."),
]


def line(row: ScheduleRow) -> dict[str, Any]:
    """A schedule in a list: the keys are stable. Times in UTC µs."""
    return {
        "name": row.name, "namespace": row.namespace, "state": row.state.value, "reason": one_line(row.reason), "version": row.version,
        "next_us": row.next_us, "due_us": row.due_us, "last_us": row.last_us, "fired": row.fired, "skipped": row.skipped, "missed": row.missed,
        "late": row.late, "waiting": row.waiting, "actor": row.actor, "created_us": row.created_us, "changed_us": row.changed_us,
    }  # fmt: skip


def _fire(fire: FireRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(fire), "unsettled": bool(fire.unsettled), "late": bool(fire.late), "reason": one_line(fire.reason)}


def _moment(text: str, what: str) -> dt.datetime:
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{what} must be like 2030-01-31T08:00:00+01:00, not {text!r}") from None
    if found.tzinfo is None:
        raise ConfigurationError(f"{what} {text!r} has no offset: write e.g. {text}+00:00")
    return found


def _when(cron: str | None, every: float | None, at: str | None) -> When:
    """Exactly one of them."""
    if [cron, every, at].count(None) != 2:
        raise ConfigurationError("give one of --cron, --every and --at")
    if cron is not None:
        return cron
    return dt.timedelta(seconds=every) if every is not None else _moment(at or "", "--at")


def _terms(**given: Any) -> Terms:
    return cast(Terms, {name: value for name, value in given.items() if value is not None})


def _said(published: dict[str, Published], as_json: bool) -> None:
    if as_json:
        formatting.show_json({name: msgspec.to_builtins(p) for name, p in published.items()})
        return
    if not published:
        formatting.show("there is nothing to publish")
    for name, p in published.items():
        when = "never" if p.next_us is None else formatting.moment(p.next_us)
        formatting.show(f"{name}: version {p.version}" + (" published" if p.changed else " as before") + f", next fire {when}")


@schedules_app.command("list")
def list_schedules(ctx: typer.Context, limit: Limit = 200, as_json: JsonFlag = False) -> None:
    """All that are not deleted, by name."""
    with ctx.obj.schedules() as schedules:
        rows, late = schedules.list(limit), {b.name for b in schedules.late()}
    if as_json:
        formatting.show_json([{**line(r), "behind": r.name in late} for r in rows])
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("name", "state", "version", "next", "fired", "skipped", "missed", "reason"):
        table.add_column(column, overflow="fold")
    for r in rows:
        following = "" if r.next_us is None or r.state is ScheduleState.PAUSED else formatting.moment(r.next_us)
        why = one_line(r.reason) or ("nobody fires it in time: does a worker run?" if r.name in late else "")
        table.add_row(r.name, r.state.value, str(r.version), following, str(r.fired), str(r.skipped), str(r.missed), why)
    formatting.show(table)


@schedules_app.command("show")
def show(ctx: typer.Context, name: ScheduleName, as_json: JsonFlag = False) -> None:
    """All that is known of a schedule, with its versions."""
    with ctx.obj.schedules() as schedules:
        row, definition, versions = schedules.get(name), schedules.definition(name), schedules.versions(name)
    request, rules = definition.request, definition.rules
    args, kwargs = decode_arguments(request.args)
    found = {
        **line(row), "when": describe(definition.spec), "handler": request.handler, "queue": request.queue, "args": repr(args), "kwargs": repr(kwargs),
        "misfire": rules.misfire.value, "overlap": rules.overlap.value, "jitter_s": rules.jitter_us / 1e6, "tolerance_s": rules.tolerance_us / 1e6,
        "versions": [{"version": v.version, "actor": v.actor, "created_us": v.created_us} for v in versions],
    }  # fmt: skip
    if as_json:
        formatting.show_json(found)
        return
    formatting.show(formatting.pairs(found, without=("versions",)))
    for v in versions:
        formatting.show(f"  version {v.version} of {formatting.moment(v.created_us)}" + (f" by {v.actor}" if v.actor else ""))


@schedules_app.command("publish")
def publish(
    ctx: typer.Context,
    name: ScheduleName,
    handler: Annotated[str, typer.Argument(help="Name of the handler.")],
    cron: CronOption = None,
    every: EveryOption = None,
    at: AtOption = None,
    zone: ZoneOption = None,
    gap: GapOption = None,
    fold: FoldOption = None,
    args: Annotated[str, typer.Option("--args", help="Arguments, as a JSON array.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", help="Named arguments, as a JSON object.")] = "{}",
    queue: Annotated[str, typer.Option("--queue", help="Instead of the handler's own.")] = "",
    priority: Annotated[int, typer.Option("--priority", help="Each unit is worth a second of waiting.")] = 0,
    start_by: Annotated[float, typer.Option("--start-by", min=0, help="Seconds after its fire within which a task must start.")] = 0.0,
    misfire: Annotated[str | None, typer.Option("--misfire", help="once, skip or catch_up.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Of catch_up: so many at most.")] = None,
    window: Annotated[float | None, typer.Option("--window", help="Of catch_up: seconds back at most.")] = None,
    overlap: Annotated[str | None, typer.Option("--overlap", help="allow, skip, queue_one or cancel_previous.")] = None,
    jitter: Annotated[float | None, typer.Option("--jitter", help="Seconds by which a fire is put off at most.")] = None,
    tolerance: Annotated[float | None, typer.Option("--tolerance", help="Seconds a fire may be late and still be in time.")] = None,
    handlers: HandlersOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a schedule, or a new version of it."""
    terms = _terms(
        zone=zone, gap=gap, fold=fold, misfire=misfire, limit=limit, window=window, overlap=overlap, jitter=jitter, tolerance=tolerance
    )
    options = Options(queue=queue, priority=priority, start_by_s=start_by)
    given = _json("--args", args, list), _json("--kwargs", kwargs, dict)
    declared = declaration(name, handler, _when(cron, every, at), *given, options, terms)
    with ctx.obj.schedules(handlers) as schedules:
        _said(schedules.sync([declared]), as_json)


def _json(what: str, text: str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as exc:
        raise ConfigurationError(f"{what} is no JSON {'array' if kind is list else 'object'}: {exc}") from exc


@schedules_app.command("pause")
def pause(ctx: typer.Context, name: ScheduleName, reason: Reason = "") -> None:
    """Nothing fires by itself until it is resumed."""
    with ctx.obj.schedules() as schedules:
        formatting.show(f"{name} is {schedules.pause(name, reason).state}")


@schedules_app.command("resume")
def resume(ctx: typer.Context, name: ScheduleName) -> None:
    """Fire again from now on. What lay in the pause is not made up for: see backfill."""
    with ctx.obj.schedules() as schedules:
        row = schedules.resume(name)
    formatting.show(f"{name} is {row.state}" + (f", next fire {formatting.moment(row.next_us)}" if row.next_us is not None else ""))


@schedules_app.command("trigger")
def trigger(
    ctx: typer.Context,
    name: ScheduleName,
    request: Annotated[str, typer.Option("--request", help="The same request again is the same fire.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Fire once, now."""
    with ctx.obj.schedules() as schedules:
        fire = schedules.trigger(name, request)
    if as_json:
        formatting.show_json(_fire(fire))
    else:
        formatting.show(
            f"{name} is {fire.state} by request {fire.request}" + (f" as {fire.task}" if fire.task else f": {one_line(fire.reason)}")
        )


@schedules_app.command("backfill")
def backfill(
    ctx: typer.Context,
    name: ScheduleName,
    start: Annotated[str, typer.Option("--from", help="The first instant: ISO 8601 with its offset.")],
    end: Annotated[str, typer.Option("--to", help="The end, which is not fired; it lies in the past.")],
    request: Annotated[str, typer.Option("--request", help="The same request again goes on with what is missing.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Fire past instants, whether they fired or not."""
    with ctx.obj.schedules() as schedules:
        done = schedules.backfill(name, _moment(start, "--from"), _moment(end, "--to"), request)
    if as_json:
        formatting.show_json(msgspec.to_builtins(done))
    else:
        formatting.show(f"{name}: {done.fires} fires by request {done.request}")


@schedules_app.command("preview")
def preview_fires(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a schedule; without one, of what --cron or --every says.")] = "",
    cron: CronOption = None,
    every: EveryOption = None,
    zone: ZoneOption = None,
    gap: GapOption = None,
    fold: FoldOption = None,
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="How many.")] = 10,
    as_json: JsonFlag = False,
) -> None:
    """The next fires. With --cron or --every nothing is stored, and no database is needed."""
    if not name:
        spec: Spec = declaration("preview", "preview", _when(cron, every, None), (), None, None, _terms(zone=zone, gap=gap, fold=fold)).spec
        found = preview(spec, count, SystemClock().now_us())
    elif cron is not None or every is not None:
        raise ConfigurationError("give the name of a schedule, or --cron or --every: not both")
    else:
        with ctx.obj.schedules() as schedules:
            found = schedules.preview(name, count)
    if as_json:
        formatting.show_json([i.isoformat() for i in found])
    else:
        for i in found:
            formatting.show(i.strftime("%a %Y-%m-%d %H:%M:%S %z"))


@schedules_app.command("fires")
def show_fires(ctx: typer.Context, name: ScheduleName, limit: Limit = 50, as_json: JsonFlag = False) -> None:
    """The newest fires, and what was not run."""
    with ctx.obj.schedules() as schedules:
        found = schedules.fires(name, limit)
    if as_json:
        formatting.show_json([_fire(f) for f in found])
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("instant", "until", "times", "kind", "state", "task", "reason"):
        table.add_column(column, overflow="fold")
    for f in found:
        until = formatting.moment(f.until_us) if f.times > 1 else ""
        late = "late" if f.late else ""
        table.add_row(formatting.moment(f.instant_us), until, str(f.times), f.kind.value, f.state.value, f.task, one_line(f.reason) or late)
    formatting.show(table)


@schedules_app.command("sync")
def sync(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(help="module:attribute of the Handlers object.")],
    as_json: JsonFlag = False,
) -> None:
    """Publish what code declares, where it has changed. Workers do so when they start."""
    with ctx.obj.schedules(target) as schedules:
        _said(schedules.sync(), as_json)


@schedules_app.command("import")
def import_beat(
    ctx: typer.Context,
    celery: Annotated[str, typer.Option("--celery", help="module:attribute of the Celery application.")],
    handlers: HandlersOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be published.")] = False,
    partly: Annotated[bool, typer.Option("--partly", help="Publish what can be, although other entries are refused.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Celery's beat_schedule as schedules. Entries that cannot be honoured are named; nothing is published then, unless --partly."""
    from .schedule_imports import beat_declarations  # imports Celery: no other command needs it

    declared, refused = beat_declarations(celery_of(celery))
    with ctx.obj.schedules(handlers) as schedules:
        good = []
        for d in declared:
            try:
                schedules.check(d)
                good.append(d)
            except MillstreamError as exc:
                refused[d.name] = str(exc)
        for entry, why in refused.items():
            formatting.notice(f"{entry}: refused: {why}")
        if refused and not partly and not dry_run:
            raise ScheduleInvalid(
                f"{len(refused)} of {len(declared) + len(refused) - _both(declared, refused)} entries are refused, nothing was published"
            )
        if dry_run:
            for d in good:
                formatting.show(f"{d.name}: {describe(d.spec)}, handler {d.handler}")
            if not good:
                formatting.show("there is nothing to publish")
        else:
            _said(schedules.sync(good), as_json)


def _both(declared: list[Any], refused: dict[str, str]) -> int:
    """Entries that are in both."""
    return sum(d.name in refused for d in declared)


@schedules_app.command("delete")
def delete(ctx: typer.Context, name: ScheduleName, reason: Reason = "") -> None:
    """It fires no more; what runs goes on. Its versions and fires are kept."""
    with ctx.obj.schedules() as schedules:
        schedules.delete(name, reason)
    formatting.show(f"{name} is DELETED")
