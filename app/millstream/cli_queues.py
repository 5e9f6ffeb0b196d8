"""``millstream queues …`` and ``millstream permits …``: each command is one call of :class:`millstream.Queues` or :class:`millstream.Permits`, shown. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millstream_schema.durable.explaining import instant
from millstream_schema.durable.gates import Gate, rate_text
from millstream_schema.durable.quotas import Quota
from millstream_schema.durable.records import PermitRow
from millstream_schema.reasons import one_line

from . import formatting
from .cli_jobs import JsonFlag
from .cli_tasks import Limit
from .queues import QueueView

queues_app = typer.Typer(no_args_is_help=True, help="Queues and handlers of durable tasks: pauses, weights, rates, quotas.")
permits_app = typer.Typer(no_args_is_help=True, help="Permits: who holds them, who waits, how many may.")

Queue = Annotated[str, typer.Argument(help="Name of the queue.")]
OptionalQueue = Annotated[str, typer.Argument(help="Name of the queue; or give --handler.")]
Handler = Annotated[str, typer.Option("--handler", help="A handler instead of a queue.")]
Key = Annotated[str, typer.Argument(help="Key of the permit.")]
Reason = Annotated[str, typer.Option("--reason", help="Why: whoever waits is told it.")]
Rate = Annotated[str, typer.Option("--rate", help="Starts in a time, e.g. 10/s, 100/m, 5/h; none: as many as come.")]
Burst = Annotated[int | None, typer.Option("--burst", min=1, help="So many at once; else the number of the rate.")]


def _gate(gate: Gate | None) -> dict[str, Any]:
    if gate is None:
        return {"paused": False, "rate": ""}
    pause = {"paused_by": gate.paused_by, "reason": one_line(gate.paused_why), "paused_us": gate.paused_us} if gate.paused else {}
    rate = {"burst": gate.burst, "changed_by": gate.changed_by, "changed_us": gate.changed_us} if gate.limits else {}
    return {"paused": bool(gate.paused), **pause, "rate": rate_text(gate), **rate}


def _quota(quota: Quota | None) -> dict[str, Any] | None:
    if quota is None:
        return None
    window = f"{quota.accept} in {quota.per_us / 1e6:g} s" if quota.accept else ""
    return {
        "accepting": bool(quota.accepting),
        "backlog": quota.backlog,
        "accept": window,
        "set_by": quota.changed_by,
        "set_us": quota.changed_us,
    }


def _view(v: QueueView) -> dict[str, Any]:
    """A queue: the keys are stable. Times in UTC µs."""
    s = v.standing
    return {
        "queue": v.queue, "weight": v.weight, "weighed_by": v.weighed_by, "weighed_us": v.weighed_us, **_gate(v.gate), "quota": _quota(v.quota),
        "held": s.held, "states": s.states, "blocked": s.blocked, "oldest_us": s.oldest_us, "looked_at": s.looked_at, "complete": s.complete,
    }  # fmt: skip


def _count(v: QueueView) -> str:
    return f"{v.standing.looked_at}{'' if v.standing.complete else '+'}"


@queues_app.command("list")
def list_queues(ctx: typer.Context, limit: Limit = 50, as_json: JsonFlag = False) -> None:
    """Queues with tasks that are not over, or of which something is set."""
    with ctx.obj.queues() as queues:
        views = queues.list(limit=limit)
    if as_json:
        formatting.show_json([_view(v) for v in views])
        return
    rows = [
        (
            v.queue,
            _count(v),
            str(v.standing.held),
            str(sum(v.standing.blocked.values())),
            str(v.weight),
            _said(v.gate),
            "yes" if v.quota else "",
        )
        for v in views
    ]
    formatting.show(formatting.table("", ("queue", "open", "held", "blocked", "weight", "gate", "quota"), rows))


def _said(gate: Gate | None) -> str:
    if gate is None:
        return ""
    return " ".join(x for x in ("paused" if gate.paused else "", rate_text(gate)) if x)


@queues_app.command("show")
def show(ctx: typer.Context, queue: Queue, as_json: JsonFlag = False) -> None:
    """What is set of a queue, and how it stands: tasks by state, the oldest, what blocks."""
    with ctx.obj.queues() as queues:
        found = _view(queues.show(queue))
    if as_json:
        formatting.show_json(found)
        return
    if found["oldest_us"] is not None:
        found["oldest"] = instant(found["oldest_us"])
    if found["paused"]:
        found["since"] = instant(found["paused_us"])
    dull = ("oldest_us", "paused_us", "changed_us", "weighed_us")
    formatting.show("\n".join(f"{k:12} {v}" for k, v in found.items() if k not in dull and v not in ("", None, {})))


@queues_app.command("pause")
def pause(ctx: typer.Context, reason: Reason, queue: OptionalQueue = "", handler: Handler = "") -> None:
    """Claim nothing of a queue or a handler until it is resumed. What runs goes on, and so do deadlines."""
    with ctx.obj.queues() as queues:
        gate = queues.pause(queue, handler=handler, reason=reason)
    formatting.show(
        f"{gate.kind.value} {gate.name} is paused by {gate.paused_by} since {instant(gate.paused_us)}: {one_line(gate.paused_why)}"
    )


@queues_app.command("resume")
def resume(ctx: typer.Context, queue: OptionalQueue = "", handler: Handler = "") -> None:
    """Go on, in the order of the line."""
    with ctx.obj.queues() as queues:
        was = queues.resume(queue, handler=handler)
    formatting.show(f"{queue or handler} goes on" if was else f"{queue or handler} was not paused")


@queues_app.command("set")
def set_weight(ctx: typer.Context, queue: Queue, weight: Annotated[int, typer.Option("--weight", help="Others weigh 1.")]) -> None:
    """Give a queue its weight beside other queues and namespaces."""
    with ctx.obj.queues() as queues:
        queues.set_weight(queue, weight)
    formatting.show(f"queue {queue} weighs {weight}")


@queues_app.command("rate")
def rate(ctx: typer.Context, rate: Rate, queue: OptionalQueue = "", handler: Handler = "", burst: Burst = None) -> None:
    """Limit the starts of a queue or a handler, over all workers."""
    with ctx.obj.queues() as queues:
        gate = queues.set_rate(queue, handler=handler, rate=None if rate == "none" else rate, burst=burst)
    formatting.show(f"{gate.kind.value} {gate.name}: {rate_text(gate) or 'no rate'}" + (f", {gate.burst} at once" if gate.limits else ""))


@queues_app.command("quota")
def quota(
    ctx: typer.Context,
    queue: Annotated[str, typer.Argument(help="Name of the queue; without one, the whole namespace.")] = "",
    backlog: Annotated[int, typer.Option("--backlog", min=0, help="Tasks that are not over; 0: no limit.")] = 0,
    accept: Annotated[str | None, typer.Option("--accept", help="Accepted in a window, e.g. 100/m.")] = None,
    closed: Annotated[bool, typer.Option("--closed", help="Accept nothing.")] = False,
) -> None:
    """Limit what may come in from outside; without an option: no limit any more."""
    with ctx.obj.queues() as queues:
        found = queues.set_quota(queue, backlog=backlog, accept=accept, accepting=not closed)
    formatting.show(f"{found.of}: " + (str(_quota(found)) if found.limits else "no quota"))


def _permit(p: PermitRow) -> dict[str, Any]:
    return {
        "key": p.key,
        "capacity": p.capacity,
        "held": p.held,
        "seq": p.seq,
        "paused": bool(p.paused),
        "set_by": p.changed_by,
        "set_us": p.changed_us,
    }


@permits_app.command("list")
def list_permits(
    ctx: typer.Context,
    after: Annotated[str, typer.Option("--after", help="Begin behind this key.")] = "",
    limit: Limit = 50,
    as_json: JsonFlag = False,
) -> None:
    """Permits by key."""
    with ctx.obj.permits() as permits:
        rows = [_permit(p) for p in permits.list(after=after, limit=limit)]
    if as_json:
        formatting.show_json(rows)
    else:
        columns = ("key", "capacity", "held", "seq", "paused", "set_by")
        formatting.show(formatting.table("", columns, [[str(r[c]) for c in columns] for r in rows]))


@permits_app.command("show")
def show_permit(ctx: typer.Context, key: Key, as_json: JsonFlag = False) -> None:
    """Who holds a permit, and who waits for it."""
    with ctx.obj.permits() as permits:
        v = permits.show(key)
    found = {**_permit(v.permit), **_gate(v.gate), "holders": v.line.holders, "waiting": v.line.waiting, "first": v.line.first}
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show("\n".join(f"{k:12} {x}" for k, x in found.items() if x not in ("", None)))


@permits_app.command("set")
def set_capacity(ctx: typer.Context, key: Key, capacity: Annotated[int, typer.Option("--capacity", help="Tasks at once.")]) -> None:
    """Change how many tasks may hold a permit at once."""
    with ctx.obj.permits() as permits:
        permits.set_capacity(key, capacity)
    formatting.show(f"permit {key}: {capacity} at once")


@permits_app.command("rate")
def rate_permit(ctx: typer.Context, key: Key, rate: Rate, burst: Burst = None) -> None:
    """Limit the starts of tasks that need a permit, over all workers."""
    with ctx.obj.permits() as permits:
        gate = permits.set_rate(key, rate=None if rate == "none" else rate, burst=burst)
    formatting.show(f"permit {key}: {rate_text(gate) or 'no rate'}" + (f", {gate.burst} at once" if gate.limits else ""))


@permits_app.command("pause")
def pause_permit(ctx: typer.Context, key: Key, reason: Reason) -> None:
    """Give a permit to nobody until it is resumed. Who holds it goes on."""
    with ctx.obj.permits() as permits:
        gate = permits.pause(key, reason=reason)
    formatting.show(f"permit {key} is paused by {gate.paused_by} since {instant(gate.paused_us)}: {one_line(gate.paused_why)}")


@permits_app.command("resume")
def resume_permit(ctx: typer.Context, key: Key) -> None:
    """Give it again."""
    with ctx.obj.permits() as permits:
        was = permits.resume(key)
    formatting.show(f"permit {key} goes on" if was else f"permit {key} was not paused")
