"""Schedules in the store: versions, fires by competing firers, what overlaps, what was missed, by hand, held; with answers lost at every commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from tests.contract.store.schedule_rows import (
    advance,
    advance_all,
    back,
    come_again,
    consistent,
    definition,
    every_fire,
    now_us,
    overlapping,
    publish,
    release,
    schedule,
    set_task,
    shown,
    task_id,
    trigger,
)
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import every, new, submit

from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.canonical import fingerprint
from millstream_schema.durable.recurrence import SECOND, Cron, Interval, OneOff
from millstream_schema.durable.schedules import EXAMINED, FIRES, FireKind, FireState, Misfire, Overlap, ScheduleState
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import CommitUnknown, StoreError, StoreUnavailable, TaskConflict
from millstream_schema.ports import SystemClock, SystemIds
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Database, Transaction

F, S, T = FireState, ScheduleState, TaskState
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
OLD: dict[str, Any] = {"misfire": Misfire.CATCH_UP, "limit": 1000, "window_us": 366 * 86_400 * SECOND}


# -- versions


def test_the_same_content_again_is_the_same_version(store: Opened) -> None:
    """Another content is another one; each is kept as it was."""
    first = publish(store.db)
    assert (
        (first.version, first.changed) == (1, True)
        and first.next_us is not None
        and now_us(store.db) < first.next_us <= now_us(store.db) + MINUTE
    )
    assert (publish(store.db).version, publish(store.db).changed) == (1, False)
    second = publish(store.db, given=definition(Interval(every_us=HOUR)))
    assert (second.version, second.changed) == (2, True)
    assert publish(store.db, given=definition()).version == 3
    kept = store.db.read(lambda tx: schedules.versions(tx, "default", "s"))
    assert [(v.version, v.actor) for v in kept] == [(1, "tester"), (2, "tester"), (3, "tester")] and kept[0].definition == kept[
        2
    ].definition
    assert schedule(store.db).fired == 0


def test_schedules_of_two_namespaces_never_meet(store: Opened) -> None:
    """One name, two schedules; names compare byte by byte."""
    publish(store.db, "s")
    publish(store.db, "S")
    publish(store.db, "s", definition(namespace="other"))
    assert [r.name for r in store.db.read(lambda tx: schedules.every(tx, "default", 10))] == ["S", "s"]
    assert [r.name for r in store.db.read(lambda tx: schedules.every(tx, "other", 10))] == ["s"]
    store.db.run(lambda tx: schedules.delete(tx, "other", "s", "", ""))
    assert schedule(store.db).state is S.ACTIVE and schedule(store.db, "s", "other").state is S.DELETED


def test_a_published_version_never_makes_the_next_fire_go_back(store: Opened) -> None:
    """Also when everything behind lies in the future, as after the database's clock was set back; the database itself refuses it."""
    publish(store.db)
    t, far = store.db.tables.schedule, now_us(store.db) + HOUR
    store.db.run(lambda tx: tx.update(t, t.c.name == "s", last_us=far, next_us=far + 1, due_us=far + 1))
    published = publish(store.db, given=definition(Interval(every_us=SECOND)))
    assert published.next_us is not None and far < published.next_us <= far + SECOND
    with pytest.raises(StoreError):
        store.db.run(lambda tx: tx.update(t, t.c.name == "s", next_us=far))


def test_what_is_due_under_the_old_version_is_decided_before_the_new_one(store: Opened) -> None:
    """Publishing answers that something is due, unless that cannot be decided."""
    publish(store.db)
    back(store.db, ago_us=3 * MINUTE)
    d = definition(Interval(every_us=HOUR))
    given = (d, fingerprint(msgspec.to_builtins(d)), "tester")
    assert store.db.run(lambda tx: schedules.publish(tx, "s", *given)) is None
    advance_all(store.db)
    assert publish(store.db, given=d).version == 2
    assert sum(f.times for f in every_fire(store.db)) == 4
    come_again(store.db)
    forced = store.db.run(lambda tx: schedules.publish(tx, "s", *(definition(), "x", "tester"), force=True))
    assert forced is not None and every_fire(store.db)[-1].state is F.MISSED
    consistent(store.db)


# -- fires


def test_of_competing_firers_each_fire_has_one(store: Opened) -> None:
    """Eight at once, on several due instants: one row and one task an instant, and the following one is stored once."""
    publish(store.db, given=definition(**OLD))
    first = back(store.db, ago_us=5 * MINUTE)
    others = [store.open() for _ in range(8)]
    for _ in range(3):
        together(*[partial(advance, db) for db in others])
    advance_all(store.db)
    found = every_fire(store.db)
    assert [f.instant_us for f in found[:6]] == [first + i * MINUTE for i in range(6)] and {f.state for f in found} == {F.FIRED}
    tasks = every(store.db)
    assert sorted(tasks) == sorted(f"schedule/s/auto//{f.instant_us}" for f in found)
    assert {t.origin for t in tasks.values()} == {f"schedule:s:1:{f.instant_us}" for f in found}
    row = schedule(store.db)
    assert row.last_us == found[-1].instant_us and row.next_us == row.last_us + MINUTE and row.fired == len(found)
    consistent(store.db)


def test_nothing_fires_before_its_time(store: Opened) -> None:
    """Nor while it is paused, ended or deleted."""
    publish(store.db)
    assert advance(store.db) is None
    back(store.db, ago_us=0)
    store.db.run(lambda tx: schedules.pause(tx, "default", "s", "", "not now"))
    assert advance(store.db) is None and schedule(store.db).due_us is None
    store.db.run(lambda tx: schedules.delete(tx, "default", "s", "", ""))
    assert advance(store.db) is None
    assert every(store.db) == {}


def test_a_one_off_ends_its_schedule(store: Opened) -> None:
    """One fire; published again with another instant it is active again; one in the past never fires."""
    publish(store.db, given=definition(OneOff(at_us=now_us(store.db) + HOUR)))
    at, v = now_us(store.db) - SECOND, store.db.tables.schedule_version
    come = msgspec.json.encode(definition(OneOff(at_us=at))).decode()
    store.db.run(lambda tx: tx.update(v, v.c.name == "s", definition=come))
    back_to(store.db, at)
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1)] and (schedule(store.db).state, schedule(store.db).next_us) == (S.ENDED, None)
    assert publish(store.db, given=definition(OneOff(at_us=now_us(store.db) + 2 * HOUR))).next_us is not None
    assert schedule(store.db).state is S.ACTIVE
    assert publish(store.db, given=definition(OneOff(at_us=SECOND))).next_us is None
    assert schedule(store.db).state is S.ENDED and advance(store.db) is None
    consistent(store.db)


def test_jitter_puts_a_fire_off_and_changes_no_instant(store: Opened) -> None:
    """It is looked at later by what its identity decides; a version published meanwhile does not lose it."""
    publish(store.db, given=definition(jitter_us=50 * SECOND))
    row = schedule(store.db)
    assert row.next_us is not None and row.due_us is not None and 0 <= row.due_us - row.next_us <= 50 * SECOND and row.next_us % MINUTE == 0
    t, come = store.db.tables.schedule, now_us(store.db) - SECOND
    store.db.run(lambda tx: tx.update(t, t.c.name == "s", next_us=come, due_us=come + HOUR, last_us=0))
    assert advance(store.db) is None
    assert publish(store.db, given=definition(jitter_us=40 * SECOND)).next_us == come


# -- misfires


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"misfire": Misfire.SKIP}, [(F.MISSED, 9), (F.FIRED, 1)]),
        ({"misfire": Misfire.SKIP, "tolerance_us": SECOND}, [(F.MISSED, 10)]),
        ({"misfire": Misfire.ONCE, "tolerance_us": SECOND}, [(F.MISSED, 9), (F.FIRED, 1)]),
        ({"misfire": Misfire.ONCE}, [(F.MISSED, 9), (F.FIRED, 1)]),
        ({"misfire": Misfire.CATCH_UP, "limit": 3, "tolerance_us": SECOND}, [(F.MISSED, 7), *[(F.FIRED, 1)] * 3]),
        ({"misfire": Misfire.CATCH_UP, "window_us": 4 * HOUR, "tolerance_us": SECOND}, [(F.MISSED, 6), *[(F.FIRED, 1)] * 4]),
        ({"misfire": Misfire.CATCH_UP, "limit": 2, "tolerance_us": 6 * HOUR}, [(F.MISSED, 2), *[(F.FIRED, 1)] * 8]),
    ],
    ids=["skip", "skip-all", "once", "once-in-time", "limit", "window", "in-time"],
)
def test_late_fires_run_by_the_policy_and_the_rest_is_recorded(
    store: Opened, rules: dict[str, Any], expected: list[tuple[FireState, int]]
) -> None:
    """Ten hourly instants have come, the newest half a minute ago: those that are not run are one row with their number and range."""
    base = now_us(store.db) - 30 * SECOND
    publish(store.db, given=definition(Interval(every_us=HOUR, start_us=base % HOUR), **{"window_us": 366 * 86_400 * SECOND, **rules}))
    first = back_to(store.db, base - 9 * HOUR)
    advance_all(store.db)
    assert shown(store.db) == expected
    found = every_fire(store.db)
    assert found[0].instant_us == first and found[-1].until_us == base
    row = schedule(store.db)
    assert row.next_us == base + HOUR and row.missed == sum(f.times for f in found if f.state is F.MISSED)
    assert row.late == sum(f.late for f in found) and all(
        bool(f.late) == (f.recorded_us - f.instant_us > row.tolerance_us) for f in found if f.task
    )
    consistent(store.db)


def back_to(db: Database, at: int, name: str = "s") -> int:
    """Its next fire was to come at this instant."""
    t = db.tables.schedule
    db.run(lambda tx: tx.update(t, t.c.name == name, next_us=at, due_us=at, last_us=at - 1))
    return at


@pytest.mark.parametrize("misfire", list(Misfire))
def test_an_outage_of_hours_of_an_every_second_schedule_is_one_row_and_bounded_transactions(store: Opened, misfire: Misfire) -> None:
    """Twenty-five thousand instants: their number and range, nothing more; the newest run by the policy."""
    publish(store.db, given=definition(Interval(every_us=SECOND), misfire=misfire, limit=20, window_us=HOUR))
    first = back(store.db, ago_us=(2 * EXAMINED + 5_000) * SECOND)
    steps = 0
    while advance(store.db) is not None:
        steps += 1
    found = every_fire(store.db)
    assert 3 <= steps <= 12
    assert (found[0].state, found[0].instant_us) == (F.MISSED, first) and found[0].times == (
        found[0].until_us - found[0].instant_us
    ) // SECOND + 1
    assert {f.state for f in found[1:]} == {F.FIRED} and found[0].times > 2 * EXAMINED
    late = sum(f.late for f in found)
    assert late == {Misfire.SKIP: 0, Misfire.ONCE: 0, Misfire.CATCH_UP: 20}[misfire] or misfire is not Misfire.CATCH_UP
    assert sum(f.times for f in found) == (schedule(store.db).last_us - first) // SECOND + 1
    consistent(store.db)


def test_many_that_are_due_at_once_are_several_transactions(store: Opened) -> None:
    """None of them makes more than a hundred tasks."""
    publish(store.db, given=definition(Interval(every_us=SECOND), **OLD))
    back(store.db, ago_us=250 * SECOND)
    advance(store.db)
    assert len(every_fire(store.db)) == FIRES
    advance_all(store.db)
    assert [t for _, t in shown(store.db)] == [1] * schedule(store.db).fired and schedule(store.db).fired > 250
    consistent(store.db)


# -- overlap


@pytest.mark.parametrize("state", [T.READY, T.RUNNING, T.RETRY_WAIT, T.UNKNOWN])
def test_a_fire_is_skipped_while_a_run_is_not_over(store: Opened, state: TaskState) -> None:
    """A run in review is not over. Skipped ones in a row are one row; what ended is over."""
    if state is T.RETRY_WAIT:
        task = overlapping(store.db, Overlap.SKIP, T.RUNNING)
    else:
        task = overlapping(store.db, Overlap.SKIP, state)
    for _ in range(3):
        advance_all(store.db)
        come_again(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.SKIPPED, 3)] and task in every_fire(store.db)[1].reason
    set_task(store.db, task, T.FAILED)
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.SKIPPED, 3), (F.FIRED, 1)] and schedule(store.db).skipped == 3
    consistent(store.db)


def test_a_run_in_review_is_counted(store: Opened) -> None:
    """For the metric; a retry that took over a run counts for it."""
    task = overlapping(store.db, Overlap.SKIP, T.UNKNOWN)
    assert store.db.read(lambda tx: fires.in_review(tx, "default")) == {"s": 1}
    retry = new("retry", retry_of=task)
    submit(store.db, retry)
    set_task(store.db, task, T.FAILED)
    t = store.db.tables.task
    store.db.run(lambda tx: tx.update(t, t.c.id == task, superseded_by=retry.id))
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.SKIPPED, 1)] and retry.id in every_fire(store.db)[1].reason
    set_task(store.db, retry.id, T.SUCCEEDED)
    assert store.db.run(lambda tx: fires.running(tx, "default", "s")) == []


def test_one_fire_waits_for_the_end_of_a_run(store: Opened) -> None:
    """Further ones are skipped; it starts when the run is over, and the one after it waits in turn."""
    task = overlapping(store.db, Overlap.QUEUE_ONE)
    advance_all(store.db)
    come_again(store.db)
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.QUEUED, 1), (F.SKIPPED, 1)]
    assert release(store.db) == fires.Advanced() and schedule(store.db).waiting is not None
    assert store.db.read(lambda tx: schedules.with_waiting(tx, 10)) == [("default", "s")]
    set_task(store.db, task, T.SUCCEEDED)
    together(*[partial(release, store.open()) for _ in range(4)])
    assert shown(store.db) == [(F.FIRED, 1), (F.FIRED, 1), (F.SKIPPED, 1)] and len(every(store.db)) == 2
    assert schedule(store.db).waiting is None
    consistent(store.db)


def test_what_waits_goes_first_when_the_next_fire_comes(store: Opened) -> None:
    """The run is over and nobody has looked yet: the queued fire starts, the new one waits for it."""
    task = overlapping(store.db, Overlap.QUEUE_ONE)
    advance_all(store.db)
    set_task(store.db, task, T.SUCCEEDED)
    come_again(store.db)
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.FIRED, 1), (F.QUEUED, 1)]
    consistent(store.db)


def test_a_pause_holds_what_waits_and_a_deletion_skips_it(store: Opened) -> None:
    """Resumed it starts."""
    task = overlapping(store.db, Overlap.QUEUE_ONE)
    advance_all(store.db)
    set_task(store.db, task, T.SUCCEEDED)
    store.db.run(lambda tx: schedules.pause(tx, "default", "s", "", ""))
    assert release(store.db) is None and store.db.read(lambda tx: schedules.with_waiting(tx, 10)) == []
    store.db.run(lambda tx: schedules.resume(tx, "default", "s", ""))
    release(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.FIRED, 1)]
    come_again(store.db)
    advance_all(store.db)
    assert shown(store.db)[-1] == (F.QUEUED, 1)
    store.db.run(lambda tx: schedules.delete(tx, "default", "s", "", ""))
    assert shown(store.db)[-1] == (F.SKIPPED, 1) and release(store.db) is None


def test_the_end_of_an_earlier_run_is_asked_for(store: Opened) -> None:
    """What has not begun is cancelled at once and the fire starts; what runs is told and the fire waits, until a newer one takes its place."""
    task = overlapping(store.db, Overlap.CANCEL_PREVIOUS, T.READY)
    advance_all(store.db)
    first, second = every_fire(store.db)
    assert (first.state, second.state, every(store.db)[f"schedule/s/auto//{first.slot}"].state) == (F.FIRED, F.FIRED, T.CANCELLED)
    set_task(store.db, second.task, T.RUNNING)
    for _ in range(2):
        come_again(store.db)
        advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.FIRED, 1), (F.SKIPPED, 1), (F.QUEUED, 1)]
    row = store.db.read(lambda tx: tx.row(sa.select(tx.t.task.c.cancel).where(tx.t.task.c.id == second.task)))
    assert row == {"cancel": 1} and task == first.task
    set_task(store.db, second.task, T.CANCELLED)
    come_again(store.db)
    advance_all(store.db)
    assert shown(store.db)[2:] == [(F.SKIPPED, 1), (F.SKIPPED, 1), (F.FIRED, 1)]
    consistent(store.db)


def test_a_run_in_review_cannot_be_cancelled_so_the_next_one_waits(store: Opened) -> None:
    """Nobody knows whether its effect happened."""
    task = overlapping(store.db, Overlap.CANCEL_PREVIOUS, T.UNKNOWN)
    advance_all(store.db)
    assert shown(store.db) == [(F.FIRED, 1), (F.QUEUED, 1)]
    assert {t.state for t in every(store.db).values()} == {T.UNKNOWN} and task


def test_the_number_of_runs_that_are_over_does_not_matter(store: Opened) -> None:
    """A schedule that allowed overlaps has very many fires whose ends nobody has marked; then the rule changes."""
    publish(store.db, given=definition(Interval(every_us=SECOND), **OLD))
    back(store.db, ago_us=(fires.CHUNK + 150) * SECOND)
    advance_all(store.db)
    found = every_fire(store.db)
    assert len(found) > fires.CHUNK
    for f in found[:-1]:
        set_task(store.db, f.task, T.SUCCEEDED)
    running = store.db.run(lambda tx: fires.running(tx, "default", "s"))
    assert [r.task for r in running] == [found[-1].task]
    assert store.db.read(lambda tx: tx.rows(sa.select(tx.t.fire.c.task).where(tx.t.fire.c.unsettled == 1))) == [{"task": found[-1].task}]


# -- by hand


def test_a_request_is_one_fire_however_often_it_is_made(store: Opened) -> None:
    """Also at once, also while it is paused; another request is another fire; the schedule's own times are untouched."""
    publish(store.db)
    store.db.run(lambda tx: schedules.pause(tx, "default", "s", "", ""))
    before = schedule(store.db)
    found = together(*[partial(trigger, store.open(), request="r") for _ in range(6)])
    assert len({f.task for f in found if not isinstance(f, BaseException)}) == 1 and not [f for f in found if isinstance(f, BaseException)]
    assert trigger(store.db, request="r2").task != trigger(store.db, request="r").task
    after = schedule(store.db)
    assert (after.fired, after.next_us, after.last_us, after.state) == (2, before.next_us, before.last_us, S.PAUSED)
    assert store.db.run(lambda tx: fires.trigger(tx, "default", "nobody", "r", "", task_id)) is None
    consistent(store.db)


def test_a_request_whose_fire_was_forgotten_is_still_one_task(store: Opened) -> None:
    """Its task is there under its key."""
    publish(store.db)
    first = trigger(store.db)
    store.db.run(lambda tx: tx.delete(tx.t.fire))
    assert trigger(store.db).task == first.task and len(every(store.db)) == 1


def test_triggers_keep_to_the_overlap_rule(store: Opened) -> None:
    """They wait or are skipped as fires by the clock are."""
    overlapping(store.db, Overlap.SKIP)
    assert (trigger(store.db).state, trigger(store.db).kind) == (F.SKIPPED, FireKind.MANUAL)
    store.empty()
    overlapping(store.db, Overlap.QUEUE_ONE)
    assert trigger(store.db, request="r").state is F.QUEUED and trigger(store.db, request="r2").state is F.SKIPPED
    consistent(store.db)


def test_a_backfill_runs_each_instant_once_for_a_request(store: Opened) -> None:
    """Whatever runs; a repeat goes on with what is missing."""
    task = overlapping(store.db, Overlap.SKIP)
    asked = [10 * SECOND, 20 * SECOND, 30 * SECOND]

    def run(instants: list[int], request: str = "b") -> None:
        store.db.run(lambda tx: fires.backfill(tx, "default", "s", request, instants, "me", task_id))

    run(asked[:2])
    run(asked)
    run(asked[:1], "another")
    found = [f for f in every_fire(store.db) if f.kind is FireKind.BACKFILL]
    assert Counter((f.request, f.slot) for f in found) == Counter([*[("b", i) for i in asked], ("another", asked[0])])
    assert {f.state for f in found} == {F.FIRED} and len(every(store.db)) == 5 and task
    consistent(store.db)


def test_resuming_makes_up_for_nothing(store: Opened) -> None:
    """What lay in the pause does not fire and is no misfire; pausing and resuming again changes nothing."""
    publish(store.db)
    back(store.db, ago_us=HOUR)
    for _ in range(2):
        row = store.db.run(lambda tx: schedules.pause(tx, "default", "s", "me", "holidays"))
        assert row is not None and (row.state, row.reason, row.actor) == (S.PAUSED, "holidays", "me")
    for _ in range(2):
        row = store.db.run(lambda tx: schedules.resume(tx, "default", "s", "me"))
    assert row is not None and row.state is S.ACTIVE and row.next_us is not None and row.next_us > now_us(store.db)
    assert every_fire(store.db) == []


def test_a_paused_schedule_that_is_published_stays_paused(store: Opened) -> None:
    """Until it is resumed."""
    publish(store.db)
    store.db.run(lambda tx: schedules.pause(tx, "default", "s", "", "why"))
    publish(store.db, given=definition(Interval(every_us=HOUR)))
    assert (schedule(store.db).state, schedule(store.db).reason, schedule(store.db).due_us) == (S.PAUSED, "why", None)


def test_a_deleted_name_can_be_published_again(store: Opened) -> None:
    """Its versions count on: a task's origin names one version for ever."""
    publish(store.db)
    assert store.db.run(lambda tx: schedules.delete(tx, "default", "s", "", "")) and not store.db.run(
        lambda tx: schedules.delete(tx, "default", "s", "", "")
    )
    assert store.db.run(lambda tx: fires.trigger(tx, "default", "s", "r", "", task_id)) is None
    assert store.db.read(lambda tx: schedules.every(tx, "default", 10)) == []
    assert publish(store.db).version == 2 and schedule(store.db).state is S.ACTIVE


# -- trouble


def sweep(db: Database) -> ScheduleSweep:
    return ScheduleSweep(db, SystemClock(), SystemIds(), 1.0)


def test_a_schedule_that_cannot_be_followed_is_held_and_stops_no_other(store: Opened) -> None:
    """A definition that cannot be read, a zone that is gone, a key that somebody took: the reason is shown, the others fire."""
    for name in ("damaged", "zone", "key", "good"):
        publish(store.db, name)
        back(store.db, name, ago_us=0)
    v = store.db.tables.schedule_version
    zone = definition(Cron(expression="0 0 * * *", zone="Mars/Olympus"))
    store.db.run(lambda tx: tx.update(v, v.c.name == "damaged", definition="{"))
    store.db.run(lambda tx: tx.update(v, v.c.name == "zone", definition=msgspec.json.encode(zone).decode()))
    taken = schedule(store.db, "key").next_us
    submit(store.db, new(f"schedule/key/auto//{taken}", digest="1:other"))
    s = sweep(store.db)
    assert 0 < s.sweep() <= 1.0 and s.set_aside == 3
    states = {r.name: (r.state, r.reason.partition(":")[0], r.fired) for r in store.db.read(lambda tx: schedules.every(tx, "default", 9))}
    assert states == {
        "damaged": (S.HELD, "DecodeError", 0), "zone": (S.HELD, "ScheduleInvalid", 0), "key": (S.HELD, "TaskConflict", 0), "good": (S.ACTIVE, "", 1),
    }  # fmt: skip
    late = {b.name: b.state for b in store.db.read(schedules.late)}
    assert late == dict.fromkeys(["damaged", "zone", "key"], S.HELD)
    s.sweep()
    assert s.set_aside == 3, "held: not tried again at once"
    consistent(store.db)


def test_a_held_schedule_goes_on_by_itself_or_is_resumed_or_published_anew(store: Opened) -> None:
    """What was due meanwhile is not lost."""
    publish(store.db, given=definition(**OLD))
    first = back(store.db, ago_us=2 * MINUTE)
    store.db.run(lambda tx: schedules.hold(tx, "default", "s", "broken", HOUR))
    assert advance(store.db) is None and schedule(store.db).next_us == first
    row = store.db.run(lambda tx: schedules.resume(tx, "default", "s", ""))
    assert row is not None and (row.state, row.reason, row.next_us) == (S.ACTIVE, "", first)
    store.db.run(lambda tx: schedules.hold(tx, "default", "s", "broken", 0))
    advance_all(store.db)
    assert (schedule(store.db).state, schedule(store.db).reason) == (S.ACTIVE, "") and shown(store.db)[:3] == [(F.FIRED, 1)] * 3
    store.db.run(lambda tx: schedules.hold(tx, "default", "s", "broken", HOUR))
    assert publish(store.db, given=definition(Interval(every_us=HOUR))).version == 2 and schedule(store.db).state is S.ACTIVE


def test_a_key_taken_by_another_task_refuses_a_trigger(store: Opened) -> None:
    """Nothing is stored."""
    publish(store.db)
    submit(store.db, new("schedule/s/manual/r/0", digest="1:other"))
    with pytest.raises(TaskConflict, match="none of this schedule's"):
        trigger(store.db, request="r")
    assert every_fire(store.db) == [] and schedule(store.db).fired == 0


def test_schedules_that_nobody_fires_in_time_are_told(store: Opened) -> None:
    """The latest first; what is in time, paused or ended is not late."""
    for name, ago in (("in-time", 30 * SECOND), ("late", 2 * HOUR), ("later", 3 * HOUR), ("paused", HOUR)):
        publish(store.db, name)
        back_to(store.db, now_us(store.db) - ago, name)
    store.db.run(lambda tx: schedules.pause(tx, "default", "paused", "", ""))
    found = store.db.read(schedules.late)
    assert [b.name for b in found] == ["later", "late"] and 2 * HOUR <= found[1].late_us < 2 * HOUR + MINUTE


def test_old_fires_are_forgotten_when_their_tasks_are_over(store: Opened) -> None:
    """Not those that wait, nor those whose task is not over; what is over is marked in bulk, also when its task is gone."""
    task = overlapping(store.db, Overlap.QUEUE_ONE)
    advance_all(store.db)
    trigger(store.db, request="skipped")
    later = now_us(store.db) + SECOND
    assert store.db.run(fires.mark_settled) == 0
    assert store.db.run(lambda tx: fires.forget(tx, later)) == 1
    assert [f.state for f in every_fire(store.db)] == [F.FIRED, F.QUEUED]
    store.db.run(lambda tx: tx.delete(tx.t.task, tx.t.task.c.id == task))
    assert store.db.run(fires.mark_settled) == 1 and store.db.run(lambda tx: fires.forget(tx, now_us(store.db) - HOUR)) == 0
    assert store.db.run(lambda tx: fires.forget(tx, later)) == 1 and [f.state for f in every_fire(store.db)] == [F.QUEUED]


# -- answers that are lost


class Cut:
    """At the n-th commit the database goes away before it, or right after it, so that nobody knows."""

    def __init__(self, at: int, after: bool) -> None:
        self._left = at
        self._after = after
        self.cut = False

    def _now(self) -> bool:
        self._left -= 1
        self.cut = self.cut or self._left == 0
        return self._left == 0

    def before_commit(self) -> None:
        if not self._after and self._now():
            raise StoreUnavailable("cut")

    def after_commit(self) -> None:
        if self._after and self._now():
            raise CommitUnknown("cut")


def insist(work: Callable[[], Any]) -> Any:
    """As every caller does: what was not answered is done again as it was."""
    while True:
        try:
            return work()
        except (StoreUnavailable, CommitUnknown):
            continue


def story(db: Database, plain: Database) -> list[Any]:
    """Everything that can be done with a schedule; what its rows say at the end, without what differs between runs."""
    insist(lambda: publish(db, given=definition(overlap=Overlap.QUEUE_ONE, **OLD)))
    back(plain, ago_us=0)
    come_again(plain)
    sweep_ = sweep(db)
    insist(sweep_.sweep)
    insist(lambda: trigger(db, request="r"))  # waits
    first = every_fire(plain)[0]
    set_task(plain, first.task, T.SUCCEEDED)
    insist(lambda: release(db))
    insist(lambda: db.run(lambda tx: fires.backfill(tx, "default", "s", "b", [10, 20], "me", task_id)))
    insist(lambda: db.run(lambda tx: schedules.pause(tx, "default", "s", "me", "")))
    insist(lambda: db.run(lambda tx: schedules.resume(tx, "default", "s", "me")))
    insist(lambda: publish(db, given=definition(Interval(every_us=HOUR), overlap=Overlap.QUEUE_ONE, **OLD)))
    insist(lambda: db.run(fires.mark_settled))
    insist(lambda: db.run(lambda tx: fires.forget(tx, 0)))
    insist(lambda: db.run(lambda tx: schedules.hold(tx, "default", "s", "held", 0)))
    insist(lambda: db.run(lambda tx: schedules.delete(tx, "default", "s", "me", "")))
    consistent(plain)
    row = schedule(plain)
    rows = [(f.kind, f.request, f.state, f.times, bool(f.task), f.version) for f in every_fire(plain)]
    return [row.state, row.version, row.fired, row.skipped, row.missed, row.waiting, sorted(rows), len(every(plain))]


@pytest.mark.parametrize("after", [False, True], ids=["before", "unknown"])
def test_a_commit_that_is_cut_anywhere_changes_nothing_of_the_story(store: Opened, after: bool) -> None:
    """At every single commit: not done, and done without an answer; what is done again makes the same rows."""
    expected = story(store.open(), store.db)
    at = 1
    while True:
        store.empty()
        cut = Cut(at, after)
        assert story(store.open(faults=cut), store.db) == expected, at
        store.close_others()
        if not cut.cut:
            break
        at += 1
    assert at > 12


def test_transactions_are_guarded_by_what_was_decided_about(store: Opened) -> None:
    """A row that changed between the decision and its transaction is left to the next look; a wrong transition is refused."""
    publish(store.db)
    back(store.db, ago_us=0)
    db = store.open()
    read = db.read

    def slow(work: Callable[[Transaction], Any]) -> Any:
        found = read(work)
        store.db.run(lambda tx: schedules.pause(tx, "default", "s", "", ""))
        return found

    db.read = slow  # type: ignore[method-assign]
    assert advance(db) is None and every(store.db) == {} and schedule(store.db).state is S.PAUSED
    with pytest.raises(AssertionError, match="may not become"):
        store.db.run(lambda tx: schedules.write(tx, schedule(store.db), 1, state=S.HELD, due_us=1))
