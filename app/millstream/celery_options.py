"""What Celery's calling options mean for a durable task: each is honoured, or refused by name with what to use instead. Pure.

Called for ``.delay()`` and ``.apply_async()`` of handlers, and for plain Celery messages. What must never happen here: an option that is taken and not honoured.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from millstream_schema.durable.requests import Options
from millstream_schema.errors import TaskInvalid

_CONTINUE = "submit the next task in the handler (ctx.submit)"
_ROUTE = "a durable task is taken by queue=, no message of its own is routed"
REFUSED: Mapping[str, str] = {
    "link": _CONTINUE,
    "link_error": "a subscription to the ends of the task; attempts= of the handler; reviews",
    "chord": "a row of yours that the members count down in ctx.transaction(), or a subscription that counts their ends",
    "chain": f"a durable task ends a chain: {_CONTINUE}",
    "group_id": "submit_many",
    "exchange": _ROUTE,
    "exchange_type": _ROUTE,
    "routing_key": _ROUTE,
    "compression": "arguments are kept in a row; large data belongs elsewhere, its address in the arguments",
    "time_limit": "run= and grace= of the handler",
    "soft_time_limit": "run= of the handler",
    "shadow": "name= of the handler",
}
"""Celery's options that a durable task cannot honour → what to use instead."""
_REPEAT = "effects=: what repeating the function would do"
_NOTHING = "nothing: it is so"
DECLARED: Mapping[str, str] = {
    "bind": "a first parameter named ctx, which gets the attempt",
    "max_retries": "attempts= (the first one counts: max_retries=3 is attempts=4)",
    "autoretry_for": "retry_on= (every exception is tried again if none are named, of an external handler none)",
    "dont_autoretry_for": "no_retry_on=",
    "throws": "no_retry_on=",
    "retry_backoff": "delay=, doubled up to max_delay=",
    "retry_backoff_max": "max_delay=",
    "retry_jitter": "jitter=, the part of the delay that chance takes off (0 to 1)",
    "retry_kwargs": "attempts=, delay=",
    "default_retry_delay": "delay=",
    "acks_late": _REPEAT,
    "acks_on_failure_or_timeout": _REPEAT,
    "reject_on_worker_lost": _REPEAT,
    "time_limit": "run= and grace=",
    "soft_time_limit": "run=",
    "expires": "start_by=",
    "rate_limit": "a rate for all workers together: millstream queues rate",
    "priority": "priority= of the call",
    "ignore_result": "nothing: the result is kept in the task's row",
    "serializer": "nothing: arguments and results are JSON that keeps their types",
    "compression": "nothing: large data belongs elsewhere, its address in the arguments",
    "track_started": _NOTHING,
    "store_errors_even_if_ignored": _NOTHING,
    "pydantic": _NOTHING,
    "typing": _NOTHING,
    "base": "a plain function: no Task class runs outside Celery's pool",
    "on_failure": "a subscription to the task's end",
    "on_success": "a subscription to the task's end",
    "on_retry": "ctx.attempt",
}
"""Celery's options of ``@app.task`` → what to write in ``@handlers.task``."""
CALLS: Mapping[str, str] = {
    **dict.fromkeys(("s", "si", "signature", "subtask"), f"{_CONTINUE}; a chain of ordinary tasks ends with app.signature(its name)"),
    **dict.fromkeys(("map", "starmap", "chunks"), "tasks.submit_many(handler, [Item(args=…), …])"),
    "apply": "call the function itself, or run it by a TaskWorker",
    "AsyncResult": "tasks.result(id)",
    "retry": "raise Retry(after=…) in the handler",
    "request": "a first parameter named ctx: ctx.task_id, ctx.attempt",
    "update_state": "ctx.progress(done, of, message) in the handler",
    "replace": "ctx.submit in the handler",
}
"""What a task of Celery's has and a durable one has not → what to use instead."""
HARMLESS = frozenset(
    {
        "retry", "retry_policy", "producer", "connection", "publisher", "router", "add_to_parent", "ignore_result", "headers", "root_id", "parent_id", "reply_to",
        "delivery_mode", "mandatory", "immediate", "stamped_headers", "group_index", "replaced_task_nesting", "task_type", "mask", "result_cls",
    }
)  # fmt: skip
"""Options about publishing a message and about tracing it: an accepted row is all they could ask for."""


class Translated(msgspec.Struct, frozen=True):
    """``key``: Celery's task id, if the caller gave one."""

    key: str
    options: Options


def translated(given: Mapping[str, Any]) -> Translated:
    """Options of ``apply_async`` as options of a submission. Raises TaskInvalid naming all that cannot be honoured."""
    problems = [f"{name}: use instead: {REFUSED[name]}" for name, value in given.items() if name in REFUSED and value]
    known = {"countdown", "eta", "expires", "task_id", "queue", "priority", "serializer", "key", "business_key", "deadline", "permit"}
    problems += [f"{name} is not an option of a durable task" for name in given if name not in known | HARMLESS | set(REFUSED)]
    if given.get("serializer") not in (None, "json"):
        problems.append(f"serializer {given['serializer']!r}: arguments are kept with their exact types, without pickle or YAML")
    if given.get("task_id") and given.get("key"):
        problems.append("task_id and key exclude each other: both name the same request")
    if problems:
        raise TaskInvalid("; ".join(problems))
    delay = given.get("countdown") or 0.0
    expires = given.get("expires")
    at = expires if isinstance(expires, dt.datetime) else None
    if isinstance(expires, int | float) and isinstance(delay, int | float):
        if given.get("eta") is not None or expires < delay:
            raise TaskInvalid("expires in seconds counts from now: it cannot lie before the task is due; give an aware datetime beside eta")
        expires -= delay
    queue = given.get("queue")
    return Translated(
        given.get("task_id") or given.get("key") or "",
        Options(
            queue=str(getattr(queue, "name", queue) or ""), priority=given.get("priority") or 0, delay_s=delay, due_at=given.get("eta"),
            start_by_s=0.0 if at or expires is None else expires, expires_at=at, deadline_s=given.get("deadline") or 0.0,
            business_key=given.get("business_key") or "", permit=given.get("permit") or "",
        ),
    )  # fmt: skip


def undeclared(names: Iterable[str], known: Iterable[str]) -> str:
    """What is wrong with these options of ``@handlers.task``; empty if nothing is."""
    known = tuple(known)
    return "; ".join(
        f"{name}: use instead: {DECLARED[name]}"
        if name in DECLARED
        else f"{name} is not an option of a handler (they are {', '.join(known)})"
        for name in names
        if name not in known
    )
