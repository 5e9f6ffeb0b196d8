"""``Schedules``: what users do with schedules from Python.

Called by user code, by the CLI and by workers that start, for what their code declares. Each operation is one guarded transaction, repeated as it was when the answer to its COMMIT
is lost. What must never happen here: half an operation; a schedule stored whose fires could not be submitted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Unpack

import msgspec

from millstream_schema import given
from millstream_schema.canonical import fingerprint
from millstream_schema.durable.recurrence import Cron, Spec, instants, local, zone_of
from millstream_schema.durable.requests import NAME, Options
from millstream_schema.durable.schedules import Declaration, Definition, FireRow, ScheduleRow, ScheduleState, VersionRow
from millstream_schema.errors import CommitUnknown, ScheduleInvalid, ScheduleNotFound, StoreUnavailable, TaskInvalid, UnknownHandler
from millstream_schema.ports import Clock, Ids, SystemIds
from millstream_schema.reasons import storable
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Database
from millstream_schema.store.schedules import Behind, Published
from millstream_tasks.durable.handlers import Handler, HandlerRegistry

from .catalogue import Catalogue
from .handlers import Handlers
from .installation import Installation
from .opened import OpenedNamespace
from .schedule_terms import Terms, When, declaration, instant

MOST_BACKFILLED = 1_000
"""Instants of one backfill."""
MOST_PREVIEWED = 1_000
_TOGETHER = 100
"""Backfilled fires of one transaction."""


class Backfilled(msgspec.Struct, frozen=True):
    """``request``: give it again to go on with the same backfill."""

    request: str
    fires: int


class Schedules(OpenedNamespace):
    """The schedules of one namespace of an installation. Also a context manager; :meth:`close` gives its connections back.

    ``handlers``: what they do not hold is scheduled by name, checked against what workers told of themselves. ``actor``: who acts, kept with what is done. ``wake``: told of the
    queue after each submission. Raises SchemaMismatch (run ``millstream up``), StoreUnavailable.
    """

    def __init__(
        self,
        installation: Installation,
        handlers: Handlers | HandlerRegistry | None = None,
        namespace: str = "default",
        *,
        actor: str = "",
        clock: Clock | None = None,
        ids: Ids | None = None,
        database: Database | None = None,
        wake: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(installation, namespace, clock=clock, database=database, actor=actor)
        self._registry = handlers.registry if isinstance(handlers, Handlers) else handlers or HandlerRegistry()
        self._ids = ids or SystemIds()
        self._wake = wake
        self._catalogue = Catalogue(self.database, self._clock, self._registry)

    def _new_id(self) -> str:
        return self._ids.new("task", 10)

    # -- publishing

    def publish(
        self,
        name: str,
        handler: str | Handler,
        when: When,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Options | None = None,
        **terms: Unpack[Terms],
    ) -> Published:
        """Create a schedule, or give it a new version; with the same content it stays as it is.

        ``when``: a cron expression, a timedelta, or an aware datetime. ``options``: of each submission, as in :meth:`Tasks.submit_with`. ``terms``: see
        :class:`~millstream.schedule_terms.Terms`. The next fire is later than now and than all before it. Raises ScheduleInvalid, TaskInvalid, UnknownHandler, StoreUnavailable.
        """
        known = handler.spec.name if isinstance(handler, Handler) else handler
        return self._publish(declaration(name, known, when, args, kwargs, options, terms), handler)

    @given.checked(declared=given.several(given.a(Declaration), optional=True))
    def sync(self, declared: Iterable[Declaration] | None = None) -> dict[str, Published]:
        """Publish what these handlers' code declares, where it has changed; by name. What is not declared any more stays. Errors name the schedule."""
        found = {}
        for d in self._registry.declared() if declared is None else declared:
            try:
                found[d.name] = self._publish(d, d.handler)
            except (TaskInvalid, UnknownHandler) as exc:
                raise type(exc)(f"schedule {d.name!r}: {exc}") from exc
        return found

    @given.checked(declared=given.a(Declaration))
    def check(self, declared: Declaration) -> None:
        """Raises what :meth:`sync` would: TaskInvalid, UnknownHandler."""
        self._definition(declared, declared.handler)

    def _definition(self, d: Declaration, handler: str | Handler) -> Definition:
        if d.options.queue:
            self._catalogue.require_queue(d.options.queue)
        form = self._catalogue.form(handler)
        request = form.request(
            self.namespace, "schedule", f"schedule/{d.name}", d.args, d.kwargs, d.options, actor=f"schedule:{d.name}", origin="schedule"
        )
        return Definition(spec=d.spec, rules=d.rules, request=request)

    def _publish(self, d: Declaration, handler: str | Handler) -> Published:
        definition = self._definition(d, handler)
        content = msgspec.to_builtins(definition)
        del content["request"]["args"]  # they are in its digest, whatever order a set has
        digest = fingerprint(content)
        while True:
            published = self._run(lambda tx: schedules.publish(tx, d.name, definition, digest, self._actor))
            if published is not None:
                return published
            try:  # what is due is due under the present version
                fires.advance(self.database, self.namespace, d.name, self._new_id, early=True)
            except (StoreUnavailable, CommitUnknown):
                raise
            except Exception:  # it is held for that: what is published now takes its place
                forced = self._run(lambda tx: schedules.publish(tx, d.name, definition, digest, self._actor, force=True))
                assert forced is not None
                return forced

    # -- looking

    @given.checked(limit=given.ROWS)
    def list(self, limit: int = 200) -> list[ScheduleRow]:
        """By name."""
        return self.database.read(lambda tx: schedules.every(tx, self.namespace, limit))

    @given.checked(name=given.text)
    def get(self, name: str) -> ScheduleRow:
        """Raises ScheduleNotFound."""
        row = self.database.read(lambda tx: schedules.read(tx, self.namespace, name))
        if row is None or row.state is ScheduleState.DELETED:
            raise self._missing(name)
        return row

    def definition(self, name: str) -> Definition:
        """What the present version says. Raises ScheduleNotFound."""
        row = self.get(name)
        return self.database.read(lambda tx: schedules.defined(tx, row))

    @given.checked(name=given.text)
    def versions(self, name: str) -> Sequence[VersionRow]:
        """Every version, the oldest first; also of one that is deleted."""
        found = self.database.read(lambda tx: schedules.versions(tx, self.namespace, name))
        if not found:
            raise self._missing(name)
        return found

    @given.checked(limit=given.ROWS)
    def fires(self, name: str, limit: int = 50) -> Sequence[FireRow]:
        """The newest fires, and what was not run; also of one that is deleted. Raises ScheduleNotFound."""
        self.versions(name)
        return self.database.read(lambda tx: fires.recent(tx, self.namespace, name, limit))

    def late(self) -> Sequence[Behind]:
        """Schedules that nobody fires in time, or that are held."""
        return [b for b in self.database.read(schedules.late) if b.namespace == self.namespace]

    def preview(self, name: str, count: int = 10) -> Sequence[dt.datetime]:
        """The next fires, jitter left out, in the schedule's zone. Raises ScheduleNotFound."""
        row, spec = self.get(name), self.definition(name).spec
        now = self.database.read(lambda tx: tx.now_us())
        after = max(now, row.last_us) if row.next_us is None or row.state is ScheduleState.PAUSED else row.next_us - 1
        return preview(spec, count, after)

    def _missing(self, name: str) -> ScheduleNotFound:
        return ScheduleNotFound(f"there is no schedule {name!r} in namespace {self.namespace!r}")

    # -- acting

    @given.checked(reason=given.words)
    def pause(self, name: str, reason: str = "") -> ScheduleRow:
        """Nothing fires by itself until :meth:`resume`. Raises ScheduleNotFound."""
        self.get(name)
        return self._there(name, self._run(lambda tx: schedules.pause(tx, self.namespace, name, self._actor, storable(reason))))

    @given.checked(name=given.text)
    def resume(self, name: str) -> ScheduleRow:
        """Fire again from now on; what lay in the pause is not made up for. Raises ScheduleNotFound."""
        self.get(name)
        return self._there(name, self._run(lambda tx: schedules.resume(tx, self.namespace, name, self._actor)))

    @given.checked(name=given.text)
    def trigger(self, name: str, request: str = "") -> FireRow:
        """Fire once, now. With the same ``request``: the same fire. It may wait or be skipped, by the overlap rule. Raises ScheduleNotFound."""
        asked = self._asked(request)
        fire = self._run(lambda tx: fires.trigger(tx, self.namespace, name, asked, self._actor, self._new_id))
        if fire is None:
            raise self._missing(name)
        if fire.task:
            self._tell([self.definition(name).request.queue])
        return fire

    @given.checked(name=given.text)
    def backfill(self, name: str, start: dt.datetime, end: dt.datetime, request: str = "") -> Backfilled:
        """Fire the instants of [start, end), which lie in the past, whether they fired or not, whatever runs. With the same ``request``: those that are still missing.

        Raises ScheduleInvalid for more than a thousand, ScheduleNotFound.
        """
        asked = self._asked(request)
        first, last = instant(start, "start"), instant(end, "end")
        if last <= first:
            raise ScheduleInvalid(f"a backfill ends after it begins: {end} is not later than {start}")
        if last > self.database.read(lambda tx: tx.now_us()):
            raise ScheduleInvalid("a backfill ends in the past: what is to come fires by itself")
        spec = self.definition(name).spec
        found = list(islice((i for i in _until(instants(spec, first - 1), last)), MOST_BACKFILLED + 1))
        if len(found) > MOST_BACKFILLED:
            raise ScheduleInvalid(f"more than {MOST_BACKFILLED} instants lie between {start} and {end}: backfill a shorter time")
        for at in range(0, len(found), _TOGETHER):
            part = found[at : at + _TOGETHER]
            queues = self._run(lambda tx, p=part: fires.backfill(tx, self.namespace, name, asked, p, self._actor, self._new_id))  # type: ignore[misc]
            if queues is None:
                raise self._missing(name)
            self._tell(queues)
        return Backfilled(asked, len(found))

    @given.checked(name=given.text, reason=given.words)
    def delete(self, name: str, reason: str = "") -> None:
        """It fires no more; what runs goes on. Versions and fires are kept. Raises ScheduleNotFound."""
        if not self._run(lambda tx: schedules.delete(tx, self.namespace, name, self._actor, storable(reason))):
            self.get(name)  # a repeat of a delete whose answer was lost finds nothing either

    def _asked(self, request: str) -> str:
        """Its name, a new one for empty text. Raises ScheduleInvalid."""
        given.require("request", request, given.named(NAME, optional=True), ScheduleInvalid)
        return request or self._ids.new("request", 10)

    def _there(self, name: str, row: ScheduleRow | None) -> ScheduleRow:
        if row is None:
            raise self._missing(name)
        return row

    def _tell(self, queues: Iterable[str]) -> None:
        if self._wake is not None:
            for queue in queues:
                self._wake(queue)


def preview(spec: Spec, count: int, after_us: int) -> Sequence[dt.datetime]:
    """The next instants, as the spec's zone shows them. Needs no database."""
    given.require("count", count, given.whole(1, MOST_PREVIEWED), ScheduleInvalid)
    zone = zone_of(spec.zone) if isinstance(spec, Cron) else dt.UTC
    return [local(i, zone) for i in islice(instants(spec, after_us), count)]


def _until(found: Iterable[int], end: int) -> Iterable[int]:
    for i in found:
        if i >= end:
            return
        yield i
