"""``Jobs``: what users do with stream jobs from Python; the same operations as ``millstream jobs``.

Called by user code and by the CLI. Each operation is one guarded transaction, then a hint to the coordinator, which may be lost. What must never happen here: half an
operation, or a hint sent before the commit it speaks of.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import msgspec

from millstream_coordinator.operations import Operations, Submission
from millstream_coordinator.status import describe_epoch, epoch_lines
from millstream_schema.connectors import Committable, Json
from millstream_schema.errors import (
    ConfigurationError,
    JobFailed,
    JobInvalid,
    JobNotFound,
    MillstreamError,
)
from millstream_schema.hints import Hints, JobHint, NoHints
from millstream_schema.model import NAME, Override
from millstream_schema.pipeline import FactoryRegistry, Pipeline
from millstream_schema.plan import PartitionedPlan
from millstream_schema.ports import Clock, Ids, SystemIds
from millstream_schema.reasons import one_line
from millstream_schema.settings import StreamSettings
from millstream_schema.states import Desired, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import JobRow

from .installation import Installation
from .metrics import render
from .obstacles import obstacle
from .opened import OpenedNamespace, reachable
from .pipelines import Pipelines

T = TypeVar("T")
Lines = list[dict[str, Any]]
Rows = list[JobRow]
_SAVEPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}\Z")
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0
_NAMED = 5
"""Pending commits that a message names."""


class Jobs(OpenedNamespace):
    """The jobs of one namespace of an installation. Also a context manager; :meth:`close` gives its connections back.

    ``pipelines``: the object jobs are built from, needed by :meth:`submit` and :meth:`resume` only. ``hints``: tells the coordinator at once; without it the coordinator finds
    the row within ``poll_ms``. ``database``: one that is open already, and stays its owner's to close. ``changed``: set by who knows that a job moved; waiting then looks at once.
    Raises SchemaMismatch (run ``millstream up``), StoreUnavailable.
    """

    _NAMESPACES = NAME

    def __init__(
        self,
        installation: Installation,
        pipelines: Pipelines | FactoryRegistry | None = None,
        namespace: str = "default",
        *,
        hints: Hints | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        database: Database | None = None,
        changed: threading.Event | None = None,
    ) -> None:
        super().__init__(installation, namespace, clock=clock, database=database)
        self._registry = pipelines.registry if isinstance(pipelines, Pipelines) else pipelines
        self._hints = hints or NoHints()
        self._ids = ids or SystemIds()
        self._operations = Operations(self.database)
        self._changed = changed or threading.Event()

    # -- starting

    def submit(
        self,
        pipeline: str,
        *,
        name: str | None = None,
        config: dict[str, Json] | None = None,
        parallelism: int | None = None,
        settings: StreamSettings | None = None,
        overrides: dict[str, Override] | None = None,
        savepoint: str = "",
        lenient: bool = False,
        repeat_effects: bool = False,
        renames: dict[str, str] | None = None,
    ) -> JobRow:
        """Start a job of a registered pipeline; ``name`` is the pipeline's by default.

        ``savepoint``: restore that savepoint; ``lenient``: drop what does not match; ``renames``: old operator id → new one; ``repeat_effects``: restore it although later
        effects are committed.

        Raises UnknownFactory, JobInvalid, JobConflict (a live job has the name), JobNotFound (savepoint), RestoreRefused, ConfigurationError, StoreUnavailable.
        """
        submission = Submission(
            job=self._ids.new("job"), name=pipeline if name is None else name, factory=pipeline, config=config or {}, namespace=self.namespace,
            parallelism=parallelism, overrides=overrides or {}, settings=settings or StreamSettings(), savepoint=savepoint, lenient=lenient,
            repeat_effects=repeat_effects, renames=renames or {},
        )  # fmt: skip
        return self._hinted(lambda: self._operations.submit(submission, self._build(pipeline, config or {})))

    def resume(
        self,
        name: str,
        *,
        config: dict[str, Json] | None = None,
        parallelism: int | None = None,
        settings: StreamSettings | None = None,
        overrides: dict[str, Override] | None = None,
        lenient: bool = False,
        repeat_effects: bool = False,
        renames: dict[str, str] | None = None,
    ) -> JobRow:
        """Go on with an ended job from its newest durable epoch. What is left out stays as it was submitted; pending commits come first.

        ``lenient``, ``renames``, ``repeat_effects``: as in :meth:`submit`; a job that went on from a savepoint of this one may have committed later effects.

        Raises JobNotFound, JobConflict, RestoreRefused, JobInvalid, UnknownFactory.
        """
        row = self.find(name)
        kept = config if config is not None else msgspec.json.decode(row.config, type=dict[str, Any])
        changes = Submission(
            job=row.id, name=row.name, factory=row.factory, config=kept, namespace=row.namespace, parallelism=row.parallelism if parallelism is None else parallelism,
            overrides=overrides if overrides is not None else msgspec.json.decode(row.overrides, type=dict[str, Override]),
            settings=settings or msgspec.json.decode(row.settings, type=StreamSettings), lenient=lenient,
            repeat_effects=repeat_effects, renames=renames or {},
        )  # fmt: skip
        return self._hinted(lambda: self._operations.resume(row.id, self._build(row.factory, kept), changes))

    def _build(self, pipeline: str, config: dict[str, Json]) -> Pipeline:
        if self._registry is None:
            raise ConfigurationError(
                "a pipeline has to be built here: give Jobs the Pipelines object (on the command line --pipelines module:attribute)"
            )
        try:
            return self._registry.build(pipeline, config)
        except MillstreamError:
            raise
        except Exception as exc:  # the user's own function
            raise JobInvalid([_unbuilt(pipeline, config, exc)]) from exc

    # -- ending

    def cancel(self, name: str) -> JobRow:
        """Stop now: the commits of the newest durable epoch are carried out, what is above is rolled back. Raises JobNotFound, JobConflict."""
        return self._stop(name, Desired.CANCEL)

    def drain(self, name: str) -> JobRow:
        """End the sources where they are, process what was taken, fire windows, commit, finish. Raises JobNotFound, JobConflict."""
        return self._stop(name, Desired.DRAIN)

    def suspend(self, name: str, savepoint: str | None = None) -> str:
        """Stop with a savepoint, nothing fired; its id, which for a repeat is the first one's. Raises JobNotFound, JobConflict."""
        chosen = self._savepoint_id(savepoint)
        row = self._stop(name, Desired.SUSPEND, chosen)
        taken = self._read(lambda tx: epochs.savepoints(tx, row.id))
        return row.wanted_savepoint or (str(taken[-1]["id"]) if taken else chosen)

    def _stop(self, name: str, desired: Desired, savepoint: str = "") -> JobRow:
        row = self.find(name)
        return self._hinted(lambda: self._operations.stop(row.id, desired, savepoint))

    def commit(self, name: str) -> JobRow:
        """Carry out the pending commits of an ended job, nothing else. Raises JobNotFound, JobConflict when it is live."""
        row = self.find(name)
        return self._hinted(lambda: self._operations.commit(row.id))

    # -- savepoints

    def savepoint(self, name: str, savepoint: str | None = None) -> str:
        """Have a savepoint taken while the job goes on; its id. Raises JobNotFound, JobConflict while another is being taken."""
        chosen = self._savepoint_id(savepoint)
        row = self.find(name)
        self._hinted(lambda: self._operations.savepoint(row.id, chosen))
        return chosen

    def metrics(self) -> str:
        """Prometheus text of the namespace's live jobs."""
        with reachable(self.database.url):
            return render(self.database, self.namespace).decode()

    def savepoints(self, name: str) -> Lines:
        """Savepoints of a job, oldest first: ``id``, ``epoch``, ``state`` (COPYING, COMPLETE), ``error``, ``created_us``."""
        row = self.find(name)
        return self._read(lambda tx: epochs.savepoints(tx, row.id))

    def wait_savepoint(
        self, name: str, savepoint: str, timeout: float | None = None, *, told: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Until the savepoint is COMPLETE. ``told``: as in :meth:`wait`. Raises TimeoutError; JobFailed when the job ended without taking it."""
        watch = _Watch(self.obstacle, told, self._clock)
        for last in self._polled(timeout):
            found = [s for s in self.savepoints(name) if s["id"] == savepoint]
            if found and found[0]["state"] == "COMPLETE":
                return found[0]
            row = self.find(name)
            if not found and row.state.ended:
                raise JobFailed(
                    f"job {row.name!r} is {row.state} and savepoint {savepoint!r} was not taken: {one_line(row.reason) or 'no reason was recorded'}"
                )
            if last:
                said = (found[0]["error"] if found else "") or self.obstacle(row.id)
                raise TimeoutError(
                    f"savepoint {savepoint!r} of job {row.name!r} is not complete after {timeout} s{': ' + said if said else ''}"
                )
            watch.look(row)
        raise AssertionError("unreachable")

    def _savepoint_id(self, given: str | None) -> str:
        if given is None:
            return self._ids.new("savepoint")
        if not _SAVEPOINT.match(given) or ".." in given:
            raise ConfigurationError(
                f"savepoint id {given!r} must match {_SAVEPOINT.pattern}, without '..': it becomes part of storage keys"
            )
        return given

    # -- looking

    def list(self) -> Rows:
        """All jobs of the namespace, oldest first."""
        return self._read(lambda tx: jobs.list_jobs(tx, self.namespace))

    def find(self, name: str) -> JobRow:
        """The newest job of that name, or the one with that id. Raises JobNotFound."""
        with reachable(self.database.url):
            return self._operations.find(name, self.namespace)

    def status(self, name: str) -> dict[str, Any]:
        """What is known of a job, as JSON-able values; ``obstacle`` says what it waits for and what to do, or is empty. Raises JobNotFound."""
        row = self.find(name)
        with reachable(self.database.url):
            found = self._operations.status(row.id)
        return found | {"obstacle": self.obstacle(row.id)}

    def obstacle(self, name: str) -> str:
        """What keeps a live job from going on, with the next step: no node, too few slots; empty when nothing does. Raises JobNotFound."""
        row = self.find(name)

        def look(tx: Transaction) -> str:
            lease = registry.read_lease(tx)
            coordinated = lease is not None and lease["expires_us"] > tx.now_us()
            wanted = len(msgspec.json.decode(row.plan, type=PartitionedPlan).subtasks())
            return obstacle(row, wanted, registry.active_nodes(tx), registry.used_slots(tx), coordinated)

        return self._read(look)

    def epochs(self, name: str, epoch: int | None = None, limit: int = 20) -> Lines | dict[str, Any]:
        """The newest epochs of a job; or one durable epoch with its offsets, segments and committables. Raises JobNotFound, SnapshotMissing."""
        row = self.find(name)
        if epoch is None:
            return self._read(lambda tx: epoch_lines(tx, row, limit))
        known = self._read(lambda tx: epochs.manifest_epochs(tx, row.id))
        if epoch not in known:
            kept = ", ".join(map(str, known)) or "none yet"
            raise JobNotFound(f"job {row.name!r} keeps no durable epoch {epoch}; it keeps: {kept}")
        return self._read(lambda tx: describe_epoch(tx, row, epoch))

    def wait(
        self, name: str, states: Collection[JobState] = (), timeout: float | None = None, *, told: Callable[[str], None] | None = None
    ) -> JobRow:
        """Until the job is in one of ``states`` or has ended. ``timeout`` in seconds. ``told`` is called with what keeps the job from going on (no node, too few slots), when
        it has been so for two seconds and each time it changes. Raises JobFailed with the causes (unless FAILED was waited for), also for a job that has ended with commits
        pending (unless its state was waited for); TimeoutError."""
        job = self.find(name).id
        watch = _Watch(self.obstacle, told, self._clock)
        for last in self._polled(timeout):
            row = self.find(job)
            if row.state in states:
                return row
            if row.state is JobState.FAILED:
                raise JobFailed(f"job {row.name!r} failed: {one_line(row.reason) or 'no reason was recorded'}")
            if row.state.ended:
                if row.pending_commits != "[]":
                    raise JobFailed(_uncommitted(row))
                return row
            if last:
                why = "; ".join(filter(None, (one_line(row.reason), self.obstacle(job))))
                raise TimeoutError(f"job {row.name!r} is {row.state} after {timeout} s{': ' + why if why else ''}; it is left as it is")
            watch.look(row)
        raise AssertionError("unreachable")

    def _polled(self, timeout: float | None) -> Iterator[bool]:
        """False for each look but the last."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            self._changed.clear()  # before the look: what happens during it ends the wait below
            last = deadline is not None and self._clock.monotonic() >= deadline
            yield last
            self._changed.wait(_POLL_SECONDS)

    def _read(self, work: Callable[[Transaction], T]) -> T:
        with reachable(self.database.url):
            return self.database.read(work)

    def _hinted(self, work: Callable[[], JobRow]) -> JobRow:
        with reachable(self.database.url):
            row = work()
        self._hints.to_coordinator(JobHint(row.id))
        return row


class _Watch:
    """Tells who waits for a job what keeps it from going on: not what passes by itself, and no text twice in a row."""

    def __init__(self, obstacle_of: Callable[[str], str], told: Callable[[str], None] | None, clock: Clock) -> None:
        self._obstacle_of = obstacle_of
        self._told = told
        self._clock = clock
        self._due = clock.monotonic() + _PATIENCE_SECONDS
        self._said = ""

    def look(self, row: JobRow) -> None:
        if self._told is None or self._clock.monotonic() < self._due:
            return
        self._due = self._clock.monotonic() + _PATIENCE_SECONDS
        text = self._obstacle_of(row.id)
        if text and text != self._said:
            self._told(f"job {row.name!r} is {row.state}: {text}")
        self._said = text


def _uncommitted(row: JobRow) -> str:
    """The output of a job that has ended is not all visible: which, why, and what to do."""
    found = msgspec.json.decode(row.pending_commits, type=list[Committable])
    named = ", ".join(f"{c.operator} of epoch {c.epoch} ({c.rows} rows)" for c in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"job {row.name!r} is {row.state}, but commits are pending: {named}{more}; nothing of it is lost. "
        f"See `millstream jobs status {row.name}`, then `millstream jobs commit {row.name}`"
    )


def _unbuilt(pipeline: str, config: dict[str, Json], exc: Exception) -> str:
    """The user's own function failed; a key that its config lacks is the usual reason."""
    held = f"config {sorted(config)}" if config else "an empty config"
    lacks = exc.args[0] if isinstance(exc, KeyError) and exc.args and exc.args[0] not in config else None
    said = f"pipeline {pipeline!r} cannot be built from {held}: {type(exc).__name__}: {exc}"
    return said if lacks is None else f"{said}; give {lacks!r} in config= (on the command line --config)"
