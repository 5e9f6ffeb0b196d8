"""``millstream subscriptions …`` and ``millstream deliveries …``: each command is one call of :class:`millstream.Subscriptions`, and what it gave, shown. Mounted by ``cli``."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import typer

from millstream_schema.durable.deliveries import DeliveryRow, DeliveryState, SubscriptionRow, SubscriptionState
from millstream_schema.errors import ConfigurationError, DeliveryNotFound
from millstream_schema.reasons import one_line

from . import formatting
from .cli_jobs import JsonFlag
from .cli_tasks import Limit
from .subscriptions import Delivery

subscriptions_app = typer.Typer(no_args_is_help=True, help="Who wants to know how tasks ended.")
deliveries_app = typer.Typer(no_args_is_help=True, help="What subscriptions have been told, and what not.")

Name = Annotated[str, typer.Argument(help="Name of the subscription.")]
Ids = Annotated[list[str], typer.Argument(help="Ids of the tasks.")]


def line(s: SubscriptionRow) -> dict[str, Any]:
    """A subscription in a list: the keys are stable. Times in UTC µs."""
    return {
        "id": s.id, "namespace": s.namespace, "name": s.name, "state": s.state.value, "mode": s.mode.value, "publish_to": s.target, "celery_task": s.celery_task,
        "handler": s.handler, "queue": s.queue, "business_key": s.business_key, "states": [x for x in s.states.split(",") if x], "attempts": s.attempts,
        "delay": s.delay_ms / 1000, "max_delay": s.max_delay_ms / 1000, "lease": s.lease_ms / 1000, "since_us": s.since_us, "catch_up": s.catch_up.value,
        "created_us": s.created_us,
    }  # fmt: skip


def _row(d: DeliveryRow) -> dict[str, Any]:
    return {
        "event": d.event, "state": d.state.value, "attempts": d.attempts, "due_us": d.due_us, "lease": d.lease, "reason": one_line(d.reason),
        "created_us": d.created_us, "changed_us": d.changed_us, "actor": d.actor,
    }  # fmt: skip


def _shown(d: Delivery) -> dict[str, Any]:
    return {
        "event": d.event, "lease": d.lease, "attempt": d.attempt, "handler": d.handler, "key": d.key, "queue": d.queue, "business_key": d.business_key,
        "state": d.state.value, "cause": d.cause, "reason": one_line(d.reason), "result": repr(d.result) if d.value else None, "settled_us": d.settled_us,
    }  # fmt: skip


def _instant(text: str) -> dt.datetime | None:
    if not text:
        return None
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"--since must be an instant with its offset, e.g. 2026-11-30T08:00:00+00:00, not {text!r}") from None


@subscriptions_app.command("create")
def create(
    ctx: typer.Context,
    name: Name,
    handler: Annotated[str, typer.Option("--handler", help="Only tasks of this handler.")] = "",
    queue: Annotated[str, typer.Option("--queue", help="Only tasks of this queue.")] = "",
    business_key: Annotated[str, typer.Option("--business-key", help="Only tasks with this business key.")] = "",
    state: Annotated[list[str] | None, typer.Option("--state", help="Only this end; may be given more than once.")] = None,
    publish_to: Annotated[str, typer.Option("--publish-to", help="Queue of the Celery broker to publish to; else consumers pull.")] = "",
    celery_task: Annotated[str, typer.Option("--celery-task", help="Call this Celery task there instead of a plain message.")] = "",
    attempts: Annotated[int, typer.Option("--attempts", help="How often one is handed out before it is parked.")] = 20,
    delay: Annotated[float, typer.Option("--delay", help="Seconds before the second attempt, doubled with each.")] = 1.0,
    max_delay: Annotated[float, typer.Option("--max-delay", help="Longest pause in seconds.")] = 3600.0,
    lease: Annotated[float, typer.Option("--lease", help="Seconds a consumer has.")] = 60.0,
    since: Annotated[str, typer.Option("--since", help="Also what ended from this instant on (ISO 8601 with offset).")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Subscribe to every end of a task that is committed after this."""
    with ctx.obj.subscriptions() as subscriptions:
        row = subscriptions.create(
            name, handler=handler, queue=queue, business_key=business_key, states=[s.upper() for s in state or ()], publish_to=publish_to,
            celery_task=celery_task, attempts=attempts, delay=delay, max_delay=max_delay, lease=lease, since=_instant(since),
        )  # fmt: skip
    if as_json:
        formatting.show_json(line(row))
    else:
        formatting.show(f"subscription {row.name} is {row.state}")


@subscriptions_app.command("list")
def list_subscriptions(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """All of the namespace."""
    with ctx.obj.subscriptions() as subscriptions:
        rows = [line(s) for s in subscriptions.list()]
    if as_json:
        formatting.show_json(rows)
    else:
        columns = ("name", "state", "mode", "handler", "queue", "states", "catch_up")
        formatting.show(formatting.table("", columns, [[", ".join(r[c]) if c == "states" else r[c] for c in columns] for r in rows]))


@subscriptions_app.command("show")
def show(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """All that is known of one, and how many deliveries are in each state."""
    with ctx.obj.subscriptions() as subscriptions:
        row, counts = subscriptions.get(name), subscriptions.counts(name)
    found = {**line(row), "deliveries": counts}
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show(formatting.pairs(found))


@subscriptions_app.command("pause")
def pause(ctx: typer.Context, name: Name) -> None:
    """Hand out nothing until it is resumed; deliveries are made and kept meanwhile."""
    with ctx.obj.subscriptions() as subscriptions:
        formatting.show(f"subscription {name} is {subscriptions.pause(name).state}")


@subscriptions_app.command("resume")
def resume(ctx: typer.Context, name: Name) -> None:
    """Hand out again."""
    with ctx.obj.subscriptions() as subscriptions:
        formatting.show(f"subscription {name} is {subscriptions.resume(name).state}")


@subscriptions_app.command("delete")
def delete(ctx: typer.Context, name: Name) -> None:
    """Subscribe no more; its deliveries go, acknowledged or not."""
    with ctx.obj.subscriptions() as subscriptions:
        subscriptions.delete(name)
    formatting.show(f"subscription {name} is deleted")


@deliveries_app.command("list")
def list_deliveries(
    ctx: typer.Context,
    name: Name,
    state: Annotated[str, typer.Option("--state", help="Only those in this state.")] = "",
    limit: Limit = 50,
    as_json: JsonFlag = False,
) -> None:
    """Those that changed last."""
    _list(ctx, name, _state(state), limit, as_json)


@deliveries_app.command("parked")
def parked(ctx: typer.Context, name: Name, limit: Limit = 50, as_json: JsonFlag = False) -> None:
    """Those whose attempts are used up: look why, then redeliver them."""
    _list(ctx, name, DeliveryState.PARKED, limit, as_json)


def _state(text: str) -> DeliveryState | None:
    known = [s for s in DeliveryState if s is not DeliveryState.PASSED]
    if text and text.upper() not in known:
        raise ConfigurationError(f"--state must be one of {', '.join(known)}, not {text!r}")
    return DeliveryState(text.upper()) if text else None


def _list(ctx: typer.Context, name: str, state: DeliveryState | None, limit: int, as_json: bool) -> None:
    with ctx.obj.subscriptions() as subscriptions:
        rows = [_row(d) for d in subscriptions.deliveries(name, state=state, limit=limit)]
    if as_json:
        formatting.show_json(rows)
    else:
        lines = [(r["event"], r["state"], r["attempts"], formatting.moment(r["changed_us"]), r["reason"]) for r in rows]
        formatting.show(formatting.table("", ("event", "state", "attempts", "changed", "reason"), lines))


@deliveries_app.command("pull")
def pull(
    ctx: typer.Context,
    name: Name,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to take.")] = 10,
    lease: Annotated[float | None, typer.Option("--lease", help="Seconds they are yours; the subscription's if not given.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Take deliveries that are due; acknowledge them, or they come again."""
    with ctx.obj.subscriptions() as subscriptions:
        found = [_shown(d) for d in subscriptions.pull(name, limit, lease=lease)]
        paused = not found and subscriptions.get(name).state is SubscriptionState.PAUSED
    if paused and not as_json:
        formatting.notice(f"subscription {name} is paused and hands out nothing: millstream subscriptions resume {name}")
    if as_json:
        formatting.show_json(found)
    else:
        columns = ("event", "lease", "attempt", "handler", "key", "state", "result")
        formatting.show(formatting.table("", columns, [[d[c] for c in columns] for d in found]))


@deliveries_app.command("ack")
def acknowledge(ctx: typer.Context, name: Name, ids: Ids) -> None:
    """They are done, whatever lease they came under."""
    with ctx.obj.subscriptions() as subscriptions:
        subscriptions.acknowledge_by_id(name, *ids)
    formatting.show(f"{len(set(ids))} acknowledged")


@deliveries_app.command("nack")
def refuse(
    ctx: typer.Context,
    name: Name,
    event: Annotated[str, typer.Argument(help="Id of the task.")],
    lease: Annotated[str, typer.Option("--lease", help="What it was handed out under.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the delivery.")] = "",
    after: Annotated[float | None, typer.Option("--after", help="Seconds until it comes again; the back-off if not given.")] = None,
) -> None:
    """It could not be done: again later, or parked when no attempt is left."""
    with ctx.obj.subscriptions() as subscriptions:
        row = subscriptions.refuse_by_id(name, event, lease, reason, after=after)
    if row is None:
        raise DeliveryNotFound(f"the end of task {event} is not handed out under lease {lease!r} (any more)")
    formatting.show(f"{event} is {row.state}")


@deliveries_app.command("redeliver")
def redeliver(
    ctx: typer.Context,
    name: Name,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of the tasks.")] = None,
    all_parked: Annotated[bool, typer.Option("--parked", help="Those whose attempts are used up, up to a thousand.")] = False,
) -> None:
    """Deliver them again, whatever became of that before; what they bring is what it was."""
    if bool(ids) == all_parked:
        raise ConfigurationError("give the ids of the tasks, or --parked")
    with ctx.obj.subscriptions() as subscriptions:
        wanted = ids or [d.event for d in subscriptions.deliveries(name, state=DeliveryState.PARKED, limit=1000)]
        formatting.show(f"{subscriptions.redeliver(name, *wanted)} are delivered again")
