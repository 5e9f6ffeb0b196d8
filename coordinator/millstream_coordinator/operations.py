"""What users do with jobs: submit, cancel, drain, suspend, resume, commit, savepoint; each one guarded transaction.

Called by the Python API and the CLI. Desired and observed state are different columns: an operation writes what is wanted, the coordinator makes it so. What must never happen
here: half an operation, a guarantee lowered silently, a job submitted twice by a repeat.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, JobConflict, JobInvalid, JobNotFound, RestoreRefused
from millstream_schema.manifest import EpochManifest, Renames, open_manifest
from millstream_schema.model import NAME, Guarantee, Override, StreamModel
from millstream_schema.pipeline import Pipeline, planned
from millstream_schema.plan import PartitionedPlan
from millstream_schema.settings import StreamSettings
from millstream_schema.states import Desired, JobState, may
from millstream_schema.store import epochs, jobs
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import JobRow

from .bounds import wide_numbers
from .compatibility import differences, orphaned_output, repeats_effects
from .status import describe, describe_nodes


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be started. ``job`` is its id, made by the caller: a repeat with the same id changes nothing."""

    job: str
    name: str
    factory: str
    config: dict[str, Json] = {}
    namespace: str = "default"
    parallelism: int | None = None
    overrides: dict[str, Override] = {}
    settings: StreamSettings = StreamSettings()
    savepoint: str = ""
    lenient: bool = False
    repeat_effects: bool = False
    renames: dict[str, str] = {}


def compiled(
    pipeline: Pipeline,
    parallelism: int | None,
    overrides: dict[str, Override],
    settings: StreamSettings,
    config: dict[str, Json],
) -> tuple[StreamModel, PartitionedPlan]:
    """Plan; raises JobInvalid with everything that is wrong: connectors, model and settings at once."""
    problems = [*pipeline.problems, *settings.problems(), *wide_numbers(config, overrides, pipeline.model)]
    if parallelism is not None and parallelism < 1:
        problems.append(f"parallelism must be at least 1, not {parallelism}")
    if settings.epoch_interval_ms == 0 and pipeline.model.guarantee is not Guarantee.BEST_EFFORT:
        problems.append(f"epoch_interval_ms is 0 (no epochs): {pipeline.model.guarantee} needs them; only BEST_EFFORT works without")
    try:
        model, plan = planned(pipeline, parallelism, overrides)
    except JobInvalid as exc:
        raise JobInvalid([*problems, *exc.problems]) from None
    except KeyError as exc:
        known = ", ".join(op.id for op in pipeline.model.operators)
        raise JobInvalid([*problems, f"override for operator {exc.args[0]!r}: there is no such operator; known: {known}"]) from None
    if problems:
        raise JobInvalid(problems)
    return model, plan


class Operations:
    """Operations on jobs of one database."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def submit(self, s: Submission, pipeline: Pipeline) -> JobRow:
        """Insert a new job, PENDING. Raises JobInvalid, JobConflict (a live job has the name), RestoreRefused, JobNotFound (savepoint)."""
        for what, given in (("job name", s.name), ("namespace", s.namespace)):
            if not NAME.match(given):
                raise ConfigurationError(f"{what} {given!r} must match {NAME.pattern}: use letters, digits, - and _, at most 63")
        model, plan = compiled(pipeline, s.parallelism, s.overrides, s.settings, s.config)

        def work(tx: Transaction) -> JobRow:
            existing = jobs.read_job(tx, s.job)
            if existing is not None:
                return existing
            other = jobs.live_job(tx, _live_name(s.namespace, s.name))
            if other is not None:
                raise JobConflict(f"job {s.name!r} is live already ({other}): choose another name, or cancel, drain or suspend it first")
            manifest = _checked_savepoint(tx, s, model) if s.savepoint else None
            values = _new_job(s, model, plan)
            if manifest is not None:
                values |= {"next_epoch": manifest.epoch + 1, "renames": _renames(manifest, s)}
            if not jobs.insert_job(tx, **values):  # somebody else's submit came between the look and the insert
                found = jobs.read_job(tx, s.job)
                if found is not None:
                    return found
                raise JobConflict(f"job {s.name!r} was submitted by somebody else just now: choose another name, or end that one first")
            jobs.add_history(tx, s.job, "submitted", f"plan {plan.fingerprint()}")
            row = jobs.read_job(tx, s.job)
            assert row is not None
            return row

        return self._db.run(work)

    def find(self, name: str, namespace: str = "default") -> JobRow:
        """The newest job of that name (or with that id). Raises JobNotFound."""
        row = self._db.read(lambda tx: jobs.find_job(tx, namespace, name) or jobs.read_job(tx, name))
        if row is None or row.namespace != namespace:
            raise JobNotFound(f"there is no job {name!r} in namespace {namespace!r}: see `millstream jobs list`")
        return row

    def stop(self, job: str, desired: Desired, savepoint: str = "") -> JobRow:
        """CANCEL, DRAIN or SUSPEND. CANCEL overrides the others; a repeat is harmless. Raises JobConflict when the job has ended otherwise."""

        def work(tx: Transaction) -> JobRow:
            row = _locked(tx, job)
            if row.state.ended:
                if row.desired is desired:
                    return row
                raise JobConflict(f"job {row.name!r} is {row.state} already; there is nothing to {desired.lower()}")
            if row.state is JobState.STOPPING and row.desired is not desired and desired is not Desired.CANCEL:
                raise JobConflict(f"job {row.name!r} is ending ({row.reason}): wait for it")
            if row.desired is not Desired.RUN and row.desired is not desired and desired is not Desired.CANCEL:
                raise JobConflict(f"job {row.name!r} is being ended by {row.desired}; only cancel can overtake it")
            if desired is not row.desired:
                if desired is Desired.SUSPEND:
                    _free_savepoint(tx, savepoint)
                wanted = savepoint if desired is Desired.SUSPEND else row.wanted_savepoint if desired is Desired.DRAIN else ""
                ending: dict[str, Any] = {}
                if desired is Desired.CANCEL and row.generation == 0:  # never deployed: there may be no node that would end it
                    ending = {"state": JobState.STOPPED, "reason": "cancelled", "ended": 1, "live_name": None}
                _write(tx, row, desired=desired, wanted_savepoint=wanted, **ending)
                jobs.add_history(tx, job, "asked", desired.lower())
                if row.wanted_savepoint and row.wanted_savepoint != wanted:
                    jobs.add_history(tx, job, "savepoint", f"{row.wanted_savepoint} was not taken: {desired.lower()} came first")
            return _locked(tx, job)

        return self._db.run(work)

    def savepoint(self, job: str, savepoint: str) -> JobRow:
        """EXPORT_SAVEPOINT: the job goes on. Raises JobConflict while another is being taken."""

        def work(tx: Transaction) -> JobRow:
            row = _locked(tx, job)
            if row.wanted_savepoint == savepoint:
                return row
            if (taken := epochs.read_savepoint(tx, savepoint)) is not None:
                if taken["job"] == job:
                    return row
                raise JobConflict(f"savepoint {savepoint!r} exists already (of job {taken['job']}): choose another id")
            if row.state.ended or row.desired is not Desired.RUN:
                raise JobConflict(f"job {row.name!r} is ending or has ended ({row.state}): resume it first")
            if row.wanted_savepoint:
                raise JobConflict(f"savepoint {row.wanted_savepoint} of job {row.name!r} is still being taken: wait for it")
            _free_savepoint(tx, savepoint)
            _write(tx, row, wanted_savepoint=savepoint)
            return _locked(tx, job)

        return self._db.run(work)

    def resume(self, job: str, pipeline: Pipeline, changes: Submission) -> JobRow:
        """Start an ended job again from its newest durable epoch, with what ``changes`` says of config, parallelism and settings. Pending commits come first."""
        model, plan = compiled(pipeline, changes.parallelism, changes.overrides, changes.settings, changes.config)

        def work(tx: Transaction) -> JobRow:
            row = _locked(tx, job)
            if not row.state.ended:
                if row.desired is Desired.RUN and row.state is not JobState.STOPPING:
                    return row
                raise JobConflict(f"job {row.name!r} is still ending ({row.desired}): wait for it")
            other = jobs.live_job(tx, _live_name(row.namespace, row.name))
            if other is not None:
                raise JobConflict(f"another job named {row.name!r} is live ({other})")
            manifest = epochs.restored_manifest(tx, row)
            if manifest is not None:
                committed = jobs.committed_epoch(tx, row, manifest.job)
                found = differences(manifest, msgspec.json.decode(row.model, type=StreamModel), model, changes.renames, committed)
                if found and not changes.lenient:
                    raise RestoreRefused(found)
                if lost := orphaned_output(manifest, model, changes.renames, committed):
                    raise RestoreRefused(lost)
                why = repeats_effects(manifest, jobs.committed_after_savepoints_of(tx, row.id), model.guarantee)
                if why is not None and not changes.repeat_effects:
                    raise RestoreRefused([why])
            values = _new_job(changes, model, plan)
            kept = {k: v for k, v in values.items() if k in _RESUMED}
            if manifest is not None:
                kept["renames"] = _renames(manifest, changes)
            _write(
                tx,
                row,
                state=JobState.PENDING,
                desired=Desired.RUN,
                ended=0,
                live_name=_live_name(row.namespace, row.name),
                pending_commits="[]",
                failures=0,
                stalls=0,
                aborts=0,
                recent_restarts="[]",
                due_us=0,
                reason="",
                in_flight=0,
                target="",
                wanted_savepoint="",
                **kept,
            )
            jobs.add_history(tx, job, "resumed", f"plan {plan.fingerprint()}")
            return _locked(tx, job)

        return self._db.run(work)

    def commit(self, job: str) -> JobRow:
        """Finish the pending commits of an ended job, nothing else. Raises JobConflict when it is live."""

        def work(tx: Transaction) -> JobRow:
            row = _locked(tx, job)
            if not row.state.ended:
                raise JobConflict(f"job {row.name!r} is {row.state}: its commits are carried out as it runs")
            if row.newest_committed >= row.newest_durable:
                return row
            now = tx.now_us()
            _write(
                tx,
                row,
                state=JobState.STOPPING,
                target=row.state,
                mode="finalize",
                ended=0,
                stopping_us=now,
                deployed_us=0,
                pending_commits="[]",
            )
            jobs.add_history(tx, job, "asked", "commit")
            return _locked(tx, job)

        return self._db.run(work)

    def status(self, job: str) -> dict[str, Any]:
        """What is known of a job, as JSON-able values."""
        return self._db.read(lambda tx: describe(tx, _found(tx, job)) | {"nodes": describe_nodes(tx)})


_RESUMED = ("factory", "config", "parallelism", "overrides", "settings", "plan", "model", "plan_fingerprint", "lenient")


def _live_name(namespace: str, name: str) -> str:
    """Unique among live jobs; the separator cannot be in a name."""
    return f"{namespace}/{name}"


def _locked(tx: Transaction, job: str) -> JobRow:
    row = jobs.lock_job(tx, job)
    if row is None:
        raise JobNotFound(f"there is no job {job!r}")
    return row


def _write(tx: Transaction, row: JobRow, **values: Any) -> None:
    """The guarded write of a job whose row is locked, from the state and revision that were read."""
    if not may(row.state, values.get("state", row.state)):
        raise AssertionError(f"job {row.id}: {row.state} may not become {values['state']}")
    if not jobs.update_job(tx, row, **values):
        raise AssertionError(f"job {row.id} changed under its lock")


def _found(tx: Transaction, job: str) -> JobRow:
    row = jobs.read_job(tx, job)
    if row is None:
        raise JobNotFound(f"there is no job {job!r}")
    return row


def _free_savepoint(tx: Transaction, savepoint: str) -> None:
    """Raises JobConflict when the id is taken, or wanted by a live job."""
    if (taken := epochs.read_savepoint(tx, savepoint)) is not None:
        raise JobConflict(f"savepoint {savepoint!r} exists already (of job {taken['job']}): choose another id")
    if (wanted := epochs.savepoint_wanted_by(tx, savepoint)) is not None:
        raise JobConflict(f"savepoint {savepoint!r} is being taken of job {wanted}: choose another id")


def _checked_savepoint(tx: Transaction, s: Submission, model: StreamModel) -> EpochManifest:
    row = epochs.read_savepoint(tx, s.savepoint)
    if row is None:
        raise JobNotFound(f"there is no savepoint {s.savepoint!r}: list those of a job with `millstream jobs savepoints JOB`")
    if row["state"] != "COMPLETE":
        raise JobConflict(f"savepoint {s.savepoint!r} is {row['state']}: {row['error'] or 'wait for it to be copied'}")
    manifest = open_manifest(row["body"], row["checksum"], f"savepoint {s.savepoint}")
    old = msgspec.json.decode(row["model"], type=StreamModel)
    taken_of = jobs.read_job(tx, row["job"])
    committed = taken_of.newest_committed if taken_of else 0
    found = differences(manifest, old, model, s.renames, committed)
    if found and not s.lenient:
        raise RestoreRefused(found)
    if lost := orphaned_output(manifest, model, s.renames, committed):
        raise RestoreRefused(lost)
    why = repeats_effects(manifest, max(committed, jobs.committed_from_savepoint(tx, s.savepoint)), model.guarantee)
    if why is not None and not s.repeat_effects:
        raise RestoreRefused([why])
    return manifest


def _renames(manifest: EpochManifest, s: Submission) -> str:
    return msgspec.json.encode(Renames(manifest.epoch, s.renames)).decode()


def text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _new_job(s: Submission, model: StreamModel, plan: PartitionedPlan) -> dict[str, Any]:
    return {
        "id": s.job,
        "namespace": s.namespace,
        "name": s.name,
        "factory": s.factory,
        "config": text(s.config),
        "parallelism": s.parallelism,
        "overrides": text(s.overrides),
        "settings": text(s.settings),
        "plan": text(plan),
        "model": text(model),
        "plan_fingerprint": plan.fingerprint(),
        "state": JobState.PENDING,
        "reason": "",
        "desired": Desired.RUN,
        "mode": "run",
        "generation": 0,
        "term": 0,
        "next_epoch": 1,
        "in_flight": 0,
        "newest_durable": 0,
        "newest_committed": 0,
        "restore_epoch": 0,
        "target": "",
        "restore_from": s.savepoint,
        "lenient": int(s.lenient),
        "renames": text(Renames()),
        "aborts": 0,
        "failures": 0,
        "stalls": 0,
        "restarts": 0,
        "causes": "{}",
        "recent_restarts": "[]",
        "wanted_savepoint": "",
        "wants_epoch": 0,
        "pending_commits": "[]",
        "splits_rev": 0,
        "deployed_us": 0,
        "due_us": 0,
        "epoch_us": 0,
        "restarted_us": 0,
        "stopping_us": 0,
        "ended": 0,
        "live_name": _live_name(s.namespace, s.name),
    }
