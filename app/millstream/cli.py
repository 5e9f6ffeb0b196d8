"""The command line: ``millstream up | jobs … | tasks … | queues … | schedules … | node | dev …``. One Typer app; every command is a thin call of the Python API.

Called by people and by programs (``--json``, exit codes); see ``program`` for how errors leave it.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer

from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.tables import SCHEMA_VERSION
from millstream_tasks.logs import log_of_a_command, log_to_stderr

from . import formatting
from .arguments import celery_of, config_of, pipelines_of, settings_of
from .cli_bulk import retention_app
from .cli_doctor import doctor
from .cli_jobs import ConfigOption, JsonFlag, ParallelismOption, PipelinesOption, SettingOption, ended_or_asked, jobs_app
from .cli_markers import markers_app
from .cli_outbox import outbox_app
from .cli_queues import permits_app, queues_app
from .cli_schedules import schedules_app
from .cli_subscriptions import deliveries_app, subscriptions_app
from .cli_tasks import reviews_app, tasks_app, why
from .dev import DevCluster
from .lifetime import ended_with_signals, ended_with_stdin
from .node_process import NodeProcess, celery_messages, celery_publications, prove
from .opened import reachable
from .program import EPILOG, Commands, Given

main = typer.Typer(
    cls=Commands, no_args_is_help=True, epilog=EPILOG, pretty_exceptions_enable=False, help="Exactly-once stream jobs and durable tasks."
)
main.add_typer(jobs_app, name="jobs")
main.add_typer(tasks_app, name="tasks")
main.add_typer(markers_app, name="markers")
main.add_typer(reviews_app, name="reviews")
main.add_typer(outbox_app, name="outbox")
main.command("why")(why)
main.command("doctor")(doctor)
main.add_typer(retention_app, name="retention")
main.add_typer(queues_app, name="queues")
main.add_typer(permits_app, name="permits")
main.add_typer(subscriptions_app, name="subscriptions")
main.add_typer(deliveries_app, name="deliveries")
main.add_typer(schedules_app, name="schedules")


def _show_version(wanted: bool) -> None:
    if wanted:
        formatting.show(importlib.metadata.version("millstream"))
        raise typer.Exit


@main.callback()
def _program(
    ctx: typer.Context,
    database: Annotated[str | None, typer.Option(help="SQLAlchemy URL; else MILLSTREAM_DATABASE.")] = None,
    transport: Annotated[str | None, typer.Option(help="unix:///dir, redis://… or amqp://…; else MILLSTREAM_TRANSPORT.")] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="file:///shared (or /shared) or a database URL; else MILLSTREAM_CHECKPOINTS.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Start of every name in database and broker; else MILLSTREAM_PREFIX.")] = None,
    local: Annotated[Path | None, typer.Option(help="All of it below this directory, as `millstream dev --directory` lays it out.")] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of jobs and tasks.")] = "default",
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")] = False,
) -> None:
    log_of_a_command(os.environ)
    ctx.obj = Given({"database": database, "transport": transport, "checkpoints": checkpoints, "prefix": prefix}, local, namespace)


@main.command("up")
def up(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Create the database's schema, or bring it to this version. Harmless when it is there."""
    installation = ctx.obj.installation(database_only=True)
    if ctx.obj.local is not None:
        ctx.obj.local.mkdir(parents=True, exist_ok=True)
    database = Database(installation.database, SystemClock(), prefix=installation.table_prefix)
    try:
        with reachable(database.url):
            create_schema(database)
            database.check_durability()
    finally:
        database.close()
    where = database.url.render_as_string(hide_password=True)
    if as_json:
        formatting.show_json({"database": where, "schema": SCHEMA_VERSION, "prefix": installation.prefix})
    else:
        formatting.show(f"schema {SCHEMA_VERSION} is ready in {where}")


@main.command("node")
def node(
    ctx: typer.Context,
    pipelines: PipelinesOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Shown as the node's name; the host's by default.")] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Subtasks at once.")] = 4,
    spares: Annotated[int, typer.Option("--spares", min=0, help="Subtask processes started ahead of need.")] = 1,
    no_coordinator: Annotated[bool, typer.Option("--no-coordinator", help="Run subtasks only.")] = False,
    celery: Annotated[
        str | None, typer.Option("--celery", help="module:attribute of the Celery application whose broker carries hints.")
    ] = None,
    log: Annotated[str, typer.Option("--log", envvar="MILLSTREAM_LOG", help="Level from which events are logged.")] = "info",
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End when standard input ends.")] = False,
) -> None:
    """Run a node: subtask processes, and a coordinator that works while it holds the lease."""
    installation = ctx.obj.installation()
    pipelines_of(pipelines)
    prove(installation)
    log_to_stderr(log)
    shown = name or os.uname().nodename
    app = celery_of(celery) if celery else None
    with reachable(sa.make_url(installation.database)):
        process = NodeProcess(
            installation,
            pipelines or "",
            name=shown,
            slots=slots,
            spares=spares,
            coordinate=not no_coordinator,
            messages=celery_messages(app, installation.prefix, shown) if app else None,
            publications=celery_publications(app, installation.prefix) if app else None,
        )
    ended_with_signals(process.stop)
    if with_parent:
        ended_with_stdin(process.stop)
    process.run()


@main.command("dev")
def dev(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(help="module:attribute of the Pipelines object.")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Node processes.")] = 2,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Subtasks at once per node.")] = 8,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Keeps database, checkpoints and logs; a temporary one by default.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Submit this pipeline, wait for it, end.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job.")] = None,
    config: ConfigOption = None,
    parallelism: ParallelismOption = None,
    setting: SettingOption = None,
) -> None:
    """Nodes on this machine: SQLite, AF_UNIX channels, no broker. Until Ctrl-C, or until the pipeline of --run has ended."""
    values, settings = config_of(config), settings_of(setting or ())
    pipelines_of(target)
    given = {f: v for f, v in ctx.obj.values.items() if v is not None and f in ("transport", "database")}
    log_to_stderr("info")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the nodes and removes the temporary directory, as Ctrl-C does
    kept = directory or ctx.obj.local
    with DevCluster(target, directory=kept, nodes=0, slots=slots, namespace=ctx.obj.namespace, **given) as cluster:
        row = None
        if run is not None:  # a job that is refused costs no node
            row = cluster.jobs.submit(run, name=name, config=values, parallelism=parallelism, settings=settings)
        cluster.start_nodes(nodes)
        formatting.show(
            f"{nodes} node{'' if nodes == 1 else 's'} below {cluster.directory}; look with: millstream jobs list --local {cluster.directory}"
        )
        if row is None:
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return
        else:
            ended_or_asked(cluster.jobs, row, "", wait=True, timeout=None, as_json=False)


__all__ = ["main"]
