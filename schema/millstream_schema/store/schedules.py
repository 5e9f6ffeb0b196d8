"""Statements on schedules and their versions: publish, pause, resume, delete, read; which are due, which are late.

Whoever changes a schedule locks its row first. Versions are never changed. What must never happen here: a next fire that goes back; a decision.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.schedules import (
    SCHEDULE_TRANSITIONS,
    Definition,
    FireKind,
    FireState,
    ScheduleRow,
    ScheduleState,
    VersionRow,
    due_us,
    first_next,
)
from .database import Query, Transaction
from .rows import to
from .tables import Tables

TEXT_KEPT = 20_000
SWEPT = (ScheduleState.ACTIVE, ScheduleState.HELD)


class Published(msgspec.Struct, frozen=True):
    """``changed``: whether this made a new version; the same content again does not."""

    version: int
    changed: bool
    next_us: int | None


class Behind(msgspec.Struct, frozen=True):
    """A schedule that should have been looked at: ``late_us`` after it was due."""

    namespace: str
    name: str
    state: ScheduleState
    reason: str
    late_us: int


def _one(t: Tables) -> sa.Select[Any]:
    return sa.select(t.schedule).where(t.schedule.c.namespace == sa.bindparam("namespace"), t.schedule.c.name == sa.bindparam("name"))


_SCHEDULE = Query(_one)
_LOCKED = Query(lambda t: _one(t).with_for_update())


def read(tx: Transaction, namespace: str, name: str) -> ScheduleRow | None:
    row = tx.row(_SCHEDULE, namespace=namespace, name=name)
    return None if row is None else to(ScheduleRow, row)


def lock(tx: Transaction, namespace: str, name: str) -> ScheduleRow | None:
    """Lock its row: every decision about a schedule and its runs begins so."""
    row = tx.row(_LOCKED, namespace=namespace, name=name)
    return None if row is None else to(ScheduleRow, row)


def every(tx: Transaction, namespace: str, limit: int) -> list[ScheduleRow]:
    """Those of a namespace that are not deleted, by name."""
    t = tx.t.schedule
    where = (t.c.namespace == namespace, t.c.state != ScheduleState.DELETED)
    return [to(ScheduleRow, r) for r in tx.rows(sa.select(t).where(*where).order_by(t.c.name).limit(limit))]


def version(tx: Transaction, namespace: str, name: str, number: int) -> VersionRow | None:
    t = tx.t.schedule_version
    row = tx.row(sa.select(t).where(t.c.namespace == namespace, t.c.name == name, t.c.version == number))
    return None if row is None else to(VersionRow, row)


def versions(tx: Transaction, namespace: str, name: str) -> list[VersionRow]:
    """All, the oldest first."""
    t = tx.t.schedule_version
    return [to(VersionRow, r) for r in tx.rows(sa.select(t).where(t.c.namespace == namespace, t.c.name == name).order_by(t.c.version))]


def defined(tx: Transaction, row: ScheduleRow) -> Definition:
    """What its present version says. Raises msgspec.DecodeError, AssertionError for one that cannot be read."""
    found = version(tx, row.namespace, row.name, row.version)
    assert found is not None, f"schedule {row.name!r} has no version {row.version}"
    return msgspec.json.decode(found.definition, type=Definition)


def write(tx: Transaction, row: ScheduleRow, now: int, **values: Any) -> None:
    """Change a schedule whose row is locked, as it was read."""
    t = tx.t.schedule
    after = ScheduleState(values.get("state", row.state))
    if after is not row.state and after not in SCHEDULE_TRANSITIONS[row.state]:
        raise AssertionError(f"schedule {row.name!r}: {row.state} may not become {after}")
    where = (t.c.namespace == row.namespace, t.c.name == row.name, t.c.rev == row.rev, t.c.last_us == row.last_us)
    if tx.update(t, *where, changed_us=now, **values) != 1:
        raise AssertionError(f"schedule {row.name!r} changed under its lock")


def publish(tx: Transaction, name: str, definition: Definition, digest: str, actor: str, *, force: bool = False) -> Published | None:
    """A new version, unless the present one has this content. None: a fire is due under the present one and has to be decided first, unless ``force``: that failed."""
    now = tx.now_us()
    namespace, spec, rules = definition.request.namespace, definition.spec, definition.rules
    t = tx.t.schedule
    nothing = {
        "namespace": namespace, "name": name, "state": ScheduleState.DELETED, "reason": "", "version": 0, "digest": "", "next_us": None, "due_us": None,
        "last_us": 0, "tolerance_us": 0, "waiting": None, "tail_us": 0, "tail_state": "", "fired": 0, "skipped": 0, "missed": 0, "late": 0, "actor": actor,
        "created_us": now, "changed_us": now, "rev": 0,
    }  # fmt: skip
    tx.insert_or_nothing(t, **nothing)
    row = lock(tx, namespace, name)
    assert row is not None
    if row.digest == digest and row.state is not ScheduleState.DELETED:
        return Published(row.version, False, row.next_us)
    last, given_up, following = row.last_us, 0, first_next(spec, row.last_us, now)
    if row.state in SWEPT and row.next_us is not None and row.next_us <= now:
        if row.state is ScheduleState.ACTIVE and (row.due_us or 0) > now:
            following = row.next_us  # its time has come, jitter puts it off
        elif force:
            last, given_up = now, _given_up(tx, row, row.next_us, now)
        else:
            return None
    number = row.version + 1
    tx.insert(
        tx.t.schedule_version, namespace=namespace, name=name, version=number, definition=msgspec.json.encode(definition).decode(), digest=digest,
        actor=actor, created_us=now,
    )  # fmt: skip
    paused = row.state is ScheduleState.PAUSED and following is not None
    state = ScheduleState.ENDED if following is None else ScheduleState.PAUSED if paused else ScheduleState.ACTIVE
    due = due_us(namespace, name, following, rules) if state is ScheduleState.ACTIVE else None
    write(
        tx, row, now, state=state, reason=row.reason if paused else "", version=number, digest=digest, next_us=following, due_us=due,
        last_us=last, missed=row.missed + given_up, tolerance_us=rules.tolerance_us, actor=actor,
    )  # fmt: skip
    return Published(number, True, following)


def _given_up(tx: Transaction, row: ScheduleRow, instant: int, now: int) -> int:
    """Record that the fires of a version that cannot be followed are missed, from this one on; nobody can say how many: it counts as one."""
    inserted = tx.insert_or_nothing(
        tx.t.fire, namespace=row.namespace, schedule=row.name, kind=FireKind.AUTO, request="", slot=instant, instant_us=instant, until_us=now, times=1,
        version=row.version, state=FireState.MISSED, reason=f"this and all others until it was published anew; {row.reason}"[:TEXT_KEPT], task="",
        unsettled=0, late=0, actor="", recorded_us=now, rev=0,
    )  # fmt: skip
    return int(inserted)


def pause(tx: Transaction, namespace: str, name: str, actor: str, reason: str) -> ScheduleRow | None:
    """Nothing fires by itself until :func:`resume`. The schedule as it is then; None: there is none."""
    row = lock(tx, namespace, name)
    if row is not None and row.state in SWEPT:
        write(tx, row, tx.now_us(), state=ScheduleState.PAUSED, reason=reason[:TEXT_KEPT], due_us=None, actor=actor)
    return read(tx, namespace, name)


def resume(tx: Transaction, namespace: str, name: str, actor: str) -> ScheduleRow | None:
    """From now on it fires again: what lay in the pause does not, what was held does."""
    row = lock(tx, namespace, name)
    if row is not None and row.state in (ScheduleState.PAUSED, ScheduleState.HELD):
        now, definition = tx.now_us(), defined(tx, row)
        held = row.state is ScheduleState.HELD
        following = row.next_us if held else first_next(definition.spec, row.last_us, now)
        state = ScheduleState.ENDED if following is None else ScheduleState.ACTIVE
        due = due_us(namespace, name, following, definition.rules)
        write(tx, row, now, state=state, reason="", next_us=following, due_us=due, actor=actor)
    return read(tx, namespace, name)


def delete(tx: Transaction, namespace: str, name: str, actor: str, reason: str) -> bool:
    """It fires no more, nor does what is queued. Versions and fires are kept. Whether there was one."""
    row = lock(tx, namespace, name)
    if row is None or row.state is ScheduleState.DELETED:
        return False
    now, f = tx.now_us(), tx.t.fire
    if row.waiting is not None:
        queued = (f.c.namespace == namespace, f.c.schedule == name, f.c.state == FireState.QUEUED)
        tx.update(f, *queued, state=FireState.SKIPPED, reason="the schedule was deleted", recorded_us=now)
    write(
        tx,
        row,
        now,
        state=ScheduleState.DELETED,
        reason=reason[:TEXT_KEPT],
        next_us=None,
        due_us=None,
        waiting=None,
        tail_us=0,
        actor=actor,
    )
    return True


def hold(tx: Transaction, namespace: str, name: str, reason: str, again_us: int) -> None:
    """The sweep failed on it: show why, look again ``again_us`` later. Its next fire stays."""
    row = lock(tx, namespace, name)
    if row is not None and row.state in SWEPT:
        now = tx.now_us()
        write(tx, row, now, state=ScheduleState.HELD, reason=reason[:TEXT_KEPT], due_us=now + again_us)


def upcoming(tx: Transaction, limit: int) -> tuple[int, list[tuple[str, str, int]]]:
    """The database's time, and (namespace, name, due) of those the sweep has to look at first: what is due, and what will be."""
    t = tx.t.schedule
    found = tx.rows(sa.select(t.c.namespace, t.c.name, t.c.due_us).where(t.c.due_us.is_not(None)).order_by(t.c.due_us).limit(limit))
    return tx.now_us(), [(r["namespace"], r["name"], int(r["due_us"])) for r in found]


def with_waiting(tx: Transaction, limit: int) -> list[tuple[str, str]]:
    """Those with a queued fire; a pause holds it back."""
    t = tx.t.schedule
    where = (t.c.waiting.is_not(None), t.c.state.in_((ScheduleState.ACTIVE, ScheduleState.HELD, ScheduleState.ENDED)))
    return [(r["namespace"], r["name"]) for r in tx.rows(sa.select(t.c.namespace, t.c.name).where(*where).limit(limit))]


def late(tx: Transaction, limit: int = 100) -> list[Behind]:
    """Schedules that nobody has looked at for longer than their tolerance, or that are held: the latest first. Of all namespaces: it tells of the installation."""
    t = tx.t.schedule
    now = tx.now_us()
    where = (t.c.due_us.is_not(None), sa.or_(t.c.state == ScheduleState.HELD, t.c.due_us + t.c.tolerance_us < now))
    columns = (t.c.namespace, t.c.name, t.c.state, t.c.reason, t.c.next_us)
    found = tx.rows(sa.select(*columns).where(*where).order_by(t.c.due_us).limit(limit))
    return [
        Behind(r["namespace"], r["name"], ScheduleState(r["state"]), r["reason"], max(0, now - int(r["next_us"] or now))) for r in found
    ]
