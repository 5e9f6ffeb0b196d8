"""``millstream jobs …``: each command is one call of :class:`millstream.client.Jobs`, and what it gave, shown. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from millstream_schema.errors import JobFailed
from millstream_schema.model import Override
from millstream_schema.reasons import one_line
from millstream_schema.settings import StreamSettings
from millstream_schema.store.rows import JobRow

from . import formatting
from .arguments import config_of, overrides_of, pairs, settings_of
from .client import Jobs

jobs_app = typer.Typer(no_args_is_help=True, help="Submit jobs, look at them, end them.")

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, with stable keys.")]
WaitFlag = Annotated[bool, typer.Option("--wait", help="Wait until it has ended; exit 1 when it failed.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds to wait at most.")]
Name = Annotated[str, typer.Argument(help="Name of the job, or its id.")]
PipelinesOption = Annotated[
    str | None, typer.Option("--pipelines", envvar="MILLSTREAM_PIPELINES", help="module:attribute of the Pipelines object.")
]
ConfigOption = Annotated[str | None, typer.Option("--config", help="The pipeline's config as a JSON object, or @file.")]
ParallelismOption = Annotated[int | None, typer.Option("--parallelism", min=1, help="Instead of the pipeline's own.")]
SettingOption = Annotated[
    list[str] | None, typer.Option("--setting", help="key=value of StreamSettings, e.g. epoch_interval_ms=500. Repeatable.")
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--override", help="operator.parallelism=3, or operator.capacity=16 for the edges to it. Repeatable.")
]
LenientFlag = Annotated[bool, typer.Option("--lenient", help="Drop state that does not match instead of refusing.")]
RepeatFlag = Annotated[bool, typer.Option("--repeat-effects", help="Restore although later effects are committed.")]
RenameOption = Annotated[list[str] | None, typer.Option("--rename", help="old=new operator id. Repeatable.")]


@jobs_app.command("submit")
def submit(
    ctx: typer.Context,
    pipeline: Annotated[str, typer.Argument(help="Name of a registered pipeline.")],
    pipelines: PipelinesOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; the pipeline's by default.")] = None,
    config: ConfigOption = None,
    parallelism: ParallelismOption = None,
    setting: SettingOption = None,
    override: OverrideOption = None,
    savepoint: Annotated[str, typer.Option("--savepoint", help="Restore this savepoint.")] = "",
    lenient: LenientFlag = False,
    repeat_effects: RepeatFlag = False,
    rename: RenameOption = None,
    wait: WaitFlag = False,
    timeout: Timeout = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a job."""
    values, settings, overrides = config_of(config), settings_of(setting or ()), overrides_of(override or ())
    renames = pairs("--rename", rename or ())
    with ctx.obj.jobs(pipelines, build=True) as jobs:
        row = jobs.submit(
            pipeline, name=name, config=values, parallelism=parallelism, settings=settings, overrides=overrides, savepoint=savepoint, lenient=lenient,
            repeat_effects=repeat_effects, renames=renames,
        )  # fmt: skip
        ended_or_asked(jobs, row, f"submitted {row.name} as {row.id}", wait, timeout, as_json)


@jobs_app.command("resume")
def resume(
    ctx: typer.Context,
    name: Name,
    pipelines: PipelinesOption = None,
    config: ConfigOption = None,
    parallelism: ParallelismOption = None,
    setting: SettingOption = None,
    override: OverrideOption = None,
    lenient: LenientFlag = False,
    repeat_effects: RepeatFlag = False,
    rename: RenameOption = None,
    wait: WaitFlag = False,
    timeout: Timeout = None,
    as_json: JsonFlag = False,
) -> None:
    """Go on with an ended job from its newest durable epoch. What is left out stays as it was."""
    values, renames = config_of(config), pairs("--rename", rename or ())
    settings: StreamSettings | None = settings_of(setting) if setting else None
    overrides: dict[str, Override] | None = overrides_of(override) if override else None
    with ctx.obj.jobs(pipelines, build=True) as jobs:
        row = jobs.resume(
            name, config=values, parallelism=parallelism, settings=settings, overrides=overrides, lenient=lenient, repeat_effects=repeat_effects,
            renames=renames,
        )  # fmt: skip
        ended_or_asked(jobs, row, f"{row.name} goes on from epoch {row.newest_durable}", wait, timeout, as_json)


@jobs_app.command("list")
def list_jobs(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Ended jobs too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """The jobs that are live."""
    with ctx.obj.jobs() as jobs:
        rows = [r for r in jobs.list() if everything or not r.ended]
    if as_json:
        formatting.show_json([formatting.job_line(r) for r in rows])
    else:
        formatting.show(formatting.jobs_table(rows))


@jobs_app.command("status")
def status(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """All that is known of a job."""
    with ctx.obj.jobs() as jobs:
        found = jobs.status(name)
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show(*formatting.status_parts(found))


@jobs_app.command("epochs")
def epochs(
    ctx: typer.Context,
    name: Name,
    epoch: Annotated[int | None, typer.Argument(help="One durable epoch, with its offsets, segments and committables.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many to show.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """The newest epochs of a job, or one of them in full."""
    with ctx.obj.jobs() as jobs:
        found = jobs.epochs(name, epoch, limit)
    if as_json:
        formatting.show_json(found)
    elif isinstance(found, dict):
        formatting.show(*formatting.epoch_parts(found))
    else:
        formatting.show(formatting.epochs_table(found))


@jobs_app.command("cancel")
def cancel(ctx: typer.Context, name: Name, wait: WaitFlag = False, timeout: Timeout = None, as_json: JsonFlag = False) -> None:
    """Stop now; what is durable is committed, the rest rolled back."""
    with ctx.obj.jobs() as jobs:
        row = jobs.cancel(name)
        ended_or_asked(jobs, row, f"{row.name} is asked to stop", wait, timeout, as_json)


@jobs_app.command("drain")
def drain(ctx: typer.Context, name: Name, wait: WaitFlag = False, timeout: Timeout = None, as_json: JsonFlag = False) -> None:
    """End the sources where they are, process what was taken, commit, finish."""
    with ctx.obj.jobs() as jobs:
        row = jobs.drain(name)
        ended_or_asked(jobs, row, f"{row.name} is asked to drain", wait, timeout, as_json)


@jobs_app.command("suspend")
def suspend(
    ctx: typer.Context,
    name: Name,
    savepoint: Annotated[str | None, typer.Option("--savepoint", help="Id of the savepoint; a new one by default.")] = None,
    wait: WaitFlag = False,
    timeout: Timeout = None,
    as_json: JsonFlag = False,
) -> None:
    """Stop with a savepoint; nothing is fired."""
    with ctx.obj.jobs() as jobs:
        chosen = jobs.suspend(name, savepoint)
        row = jobs.find(name)
        ended_or_asked(jobs, row, f"{row.name} is asked to suspend with savepoint {chosen}", wait, timeout, as_json, savepoint=chosen)


@jobs_app.command("commit")
def commit(ctx: typer.Context, name: Name, wait: WaitFlag = False, timeout: Timeout = None, as_json: JsonFlag = False) -> None:
    """Carry out the pending commits of an ended job."""
    with ctx.obj.jobs() as jobs:
        row = jobs.commit(name)
        ended_or_asked(jobs, row, f"the pending commits of {row.name} are carried out", wait, timeout, as_json)


@jobs_app.command("savepoint")
def savepoint(
    ctx: typer.Context,
    name: Name,
    chosen: Annotated[str | None, typer.Option("--id", help="Id of the savepoint; a new one by default.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is complete.")] = False,
    timeout: Timeout = None,
    as_json: JsonFlag = False,
) -> None:
    """Have a savepoint taken while the job goes on."""
    with ctx.obj.jobs() as jobs:
        taken = jobs.savepoint(name, chosen)
        found: dict[str, Any] = (
            jobs.wait_savepoint(name, taken, timeout, told=formatting.notice) if wait else {"id": taken, "state": "REQUESTED"}
        )
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show(f"savepoint {taken} is {found['state'].lower()}")


@jobs_app.command("savepoints")
def savepoints(ctx: typer.Context, name: Name, as_json: JsonFlag = False) -> None:
    """The savepoints of a job."""
    with ctx.obj.jobs() as jobs:
        found = jobs.savepoints(name)
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show(formatting.savepoints_table(found))


@jobs_app.command("metrics")
def metrics(ctx: typer.Context) -> None:
    """What is watched of live jobs, as Prometheus text: for a node exporter's textfile collector, or to look at."""
    with ctx.obj.jobs() as jobs:
        typer.echo(jobs.metrics(), nl=False)


def ended_or_asked(jobs: Jobs, row: JobRow, said: str, wait: bool, timeout: float | None, as_json: bool, **more: str) -> None:
    """Show the job as it is, or with ``wait`` as it ended. Also for ``millstream dev --run``. Raises JobFailed, also when commits are left pending."""
    failed: JobFailed | None = None
    if wait:
        try:
            row = jobs.wait(row.id, timeout=timeout, told=formatting.notice)
        except JobFailed as exc:
            failed, row = exc, jobs.find(row.id)
    if row.state.ended:
        said = f"{row.name} is {row.state}" + (f": {one_line(row.reason)}" if row.reason else "")
    if as_json:
        formatting.show_json(formatting.job_line(row) | more)
    elif failed is None:
        formatting.show(said)
    if failed is not None:
        raise failed
