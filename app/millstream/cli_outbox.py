"""``millstream outbox …``: make an outbox in a user's database, relay it, look at it, have parked entries sent again.

Commands of ``cli``. What must never happen here: a second way of doing what ``OutboxDesk`` and ``OutboxRelay`` do; a URL shown with its password.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millstream_schema.durable.outbox import EntryRow
from millstream_schema.errors import ConfigurationError
from millstream_schema.reasons import one_line
from millstream_tasks.logs import log_to_stderr

from . import formatting
from .cli_jobs import JsonFlag
from .lifetime import ended_with_signals
from .outbox import Outbox, OutboxDesk, OutboxRelay

outbox_app = typer.Typer(
    no_args_is_help=True, help="Outboxes in other databases: requests kept there until the installation has accepted them."
)

OutboxUrl = Annotated[
    str, typer.Option("--outbox-url", envvar="MILLSTREAM_OUTBOX_URL", help="SQLAlchemy URL of the database that holds the outbox.")
]
OutboxPrefix = Annotated[str, typer.Option("--outbox-prefix", help="Start of its table's name.")]
EntryId = Annotated[str, typer.Argument(help="Id of the entry.")]


@outbox_app.command("init")
def init(ctx: typer.Context, url: OutboxUrl, prefix: OutboxPrefix = "millstream", as_json: JsonFlag = False) -> None:
    """Make the table unless it is there, and show the target that `Outbox` needs."""
    with ctx.obj.tasks() as tasks:
        target = tasks.installation_id
    Outbox.create(url, prefix=prefix)
    if as_json:
        formatting.show_json({"table": f"{prefix}_outbox", "target": target})
    else:
        formatting.show(f"table {prefix}_outbox is ready; in the program: Outbox(handlers, target={target!r})")


@outbox_app.command("status")
def status(ctx: typer.Context, url: OutboxUrl, prefix: OutboxPrefix = "millstream", as_json: JsonFlag = False) -> None:
    """Entries by state and cause, and those that a person must look at."""
    with OutboxDesk(url, prefix=prefix) as desk:
        counts, parked = desk.counts(), desk.parked(50)
    if as_json:
        formatting.show_json({"counts": [{**c, "oldest_us": int(c["oldest_us"])} for c in counts], "parked": [_line(e) for e in parked]})
        return
    table = Table("state", "cause", "entries", "oldest", box=SIMPLE_HEAD)
    for c in counts:
        table.add_row(c["state"], c["cause"], str(c["entries"]), f"{int(c['oldest_us']) // 1_000_000} s")
    formatting.show(table if counts else "the outbox is empty")
    for entry in parked:
        formatting.show(f"{entry.id} {entry.handler} {entry.key!r} is parked ({entry.cause}): {one_line(entry.reason)}")


@outbox_app.command("show")
def show(ctx: typer.Context, entry: EntryId, url: OutboxUrl, prefix: OutboxPrefix = "millstream", as_json: JsonFlag = False) -> None:
    """All that is known of an entry but its arguments."""
    with OutboxDesk(url, prefix=prefix) as desk:
        found = _line(desk.get(entry))
    if as_json:
        formatting.show_json(found)
    else:
        formatting.show("\n".join(f"{k:12} {v}" for k, v in found.items() if v not in ("", None)))


@outbox_app.command("retry")
def retry(
    ctx: typer.Context,
    entry: EntryId,
    url: OutboxUrl,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the entry.")],
    prefix: OutboxPrefix = "millstream",
) -> None:
    """Have a parked entry sent again, under its own key."""
    with OutboxDesk(url, prefix=prefix) as desk:
        desk.retry(entry, reason)
    formatting.show(f"{entry} is sent again")


@outbox_app.command("relay")
def relay(
    ctx: typer.Context,
    url: OutboxUrl,
    prefix: OutboxPrefix = "millstream",
    once: Annotated[bool, typer.Option("--once", help="Send what is due, then end.")] = False,
    forever: Annotated[bool, typer.Option("--forever", help="Until SIGTERM or Ctrl-C.")] = False,
    log: Annotated[str, typer.Option("--log", envvar="MILLSTREAM_LOG", help="Level from which events are logged.")] = "info",
) -> None:
    """Bring entries to the installation. Any number may run at once."""
    if once is forever:
        raise ConfigurationError("say --once or --forever")
    log_to_stderr(log)
    runner = OutboxRelay(ctx.obj.installation(database_only=True), url, prefix=prefix)
    try:
        if once:
            formatting.show(f"{runner.once()} accepted")
        else:
            ended_with_signals(runner.stop)
            runner.run()
    finally:
        runner.close()


def _line(entry: EntryRow) -> dict[str, Any]:
    """An entry without its request: the keys are stable. Times in UTC µs."""
    return {k: v for k, v in msgspec.to_builtins(entry).items() if k not in ("request", "claim", "rev")}
