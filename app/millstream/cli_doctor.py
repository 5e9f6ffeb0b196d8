"""``millstream doctor``: what is wrong with this installation and, with ``--celery``, with an application's settings. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millstream_schema.errors import SchemaMismatch
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.health import health
from millstream_schema.store.migrate import check_schema

from . import formatting
from .arguments import celery_of
from .celery_facts import facts_of
from .celery_traps import celery_findings
from .cli_jobs import JsonFlag
from .diagnosis import Finding, Gravity, installation_findings
from .installation import Installation
from .opened import reachable, require_file
from .program import EXIT_FAILED


def installation_checked(installation: Installation) -> list[Finding]:
    """Look at the database. Raises StoreUnavailable when it is away."""
    clock = SystemClock()
    database = Database(installation.database, clock, prefix=installation.table_prefix)
    try:
        with reachable(database.url):
            require_file(database)
            try:
                check_schema(database)
            except SchemaMismatch as exc:
                return [
                    Finding(
                        about="schema",
                        gravity=Gravity.WRONG,
                        found=str(exc),
                        reason="nothing works on another schema",
                        cure="millstream up, or upgrade Millstream",
                    )
                ]
            before = clock.now_us()
            found = database.read(health)
            here = (before + clock.now_us()) // 2
    finally:
        database.close()
    fine = Finding(about="schema", gravity=Gravity.FINE, found="is this build's")
    return [fine, *installation_findings(found, database.dialect, here, installation.lease_ms * 1000)]


def doctor(
    ctx: typer.Context,
    celery: Annotated[
        str | None, typer.Option("--celery", help="module:attribute of a Celery application: its settings are looked at, too.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """What is wrong here, why, and what helps. Exit code 1 when something is wrong; what is only doubtful is shown."""
    found: list[Finding] = []
    if celery is not None:
        found += celery_findings(facts_of(celery_of(celery)))
    if celery is None or ctx.obj.names_a_database():
        found += installation_checked(ctx.obj.installation(database_only=True))
    if as_json:
        formatting.show_json([msgspec.to_builtins(f) for f in found])
    else:
        formatting.show(_table(found))
    if any(f.gravity is Gravity.WRONG for f in found):
        raise typer.Exit(EXIT_FAILED)


def _table(found: list[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in ("", "about", "found", "why it matters", "what helps"):
        table.add_column(column, overflow="fold")
    for f in sorted(found, key=lambda f: list(Gravity).index(f.gravity)):
        table.add_row(f.gravity.value, f.about, f.found, f.reason, f.cure)
    return table
