"""What all commands share: the program's own options, exit codes, and the one place that turns an error into a text on stderr.

Used by ``cli``, ``cli_jobs``, ``cli_schedules`` and ``cli_tasks``. What must never happen here: a traceback without ``--debug``, a password shown, or a failure that exits 0.
"""

from __future__ import annotations

import getpass
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import typer
from typer.core import TyperGroup

from millstream_schema.errors import (
    ChannelError,
    CommitUnknown,
    ConfigurationError,
    DeliveryNotFound,
    FingerprintMismatch,
    JobConflict,
    JobInvalid,
    JobNotFound,
    MillstreamError,
    PermitNotFound,
    QuotaExceeded,
    RestoreRefused,
    ReviewConflict,
    ScheduleInvalid,
    ScheduleNotFound,
    SchemaMismatch,
    SnapshotMissing,
    SourceUnavailable,
    StorageUnavailable,
    StoreUnavailable,
    SubscriptionConflict,
    SubscriptionNotFound,
    TaskConflict,
    TaskInvalid,
    TaskNotFound,
    TokenRefused,
    UnknownFactory,
    UnknownHandler,
    UnknownQueue,
)

from . import formatting
from .arguments import handlers_of, pipelines_of
from .client import Jobs
from .installation import VARIABLES, Installation
from .queues import Permits, Queues
from .schedules import Schedules
from .subscriptions import Subscriptions
from .tasks import Tasks

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2, 3, 4, 5
_EXITS: tuple[tuple[type[Exception], int], ...] = (
    (ConfigurationError, EXIT_USAGE),
    (JobNotFound, EXIT_NOT_FOUND),
    (TaskNotFound, EXIT_NOT_FOUND),
    (PermitNotFound, EXIT_NOT_FOUND),
    (QuotaExceeded, EXIT_REFUSED),
    (SubscriptionNotFound, EXIT_NOT_FOUND),
    (DeliveryNotFound, EXIT_NOT_FOUND),
    (SubscriptionConflict, EXIT_REFUSED),
    (ScheduleNotFound, EXIT_NOT_FOUND),
    (UnknownFactory, EXIT_NOT_FOUND),
    (UnknownHandler, EXIT_NOT_FOUND),
    (UnknownQueue, EXIT_NOT_FOUND),
    (TaskInvalid, EXIT_REFUSED),
    (TaskConflict, EXIT_REFUSED),
    (ScheduleInvalid, EXIT_REFUSED),
    (SnapshotMissing, EXIT_NOT_FOUND),
    (JobInvalid, EXIT_REFUSED),
    (JobConflict, EXIT_REFUSED),
    (ReviewConflict, EXIT_REFUSED),
    (TokenRefused, EXIT_REFUSED),
    (RestoreRefused, EXIT_REFUSED),
    (FingerprintMismatch, EXIT_REFUSED),
    (SchemaMismatch, EXIT_REFUSED),
    (StoreUnavailable, EXIT_UNREACHABLE),
    (CommitUnknown, EXIT_UNREACHABLE),
    (StorageUnavailable, EXIT_UNREACHABLE),
    (ChannelError, EXIT_UNREACHABLE),
    (SourceUnavailable, EXIT_UNREACHABLE),
    (sa.exc.DBAPIError, EXIT_UNREACHABLE),
)
EPILOG = "\n\n".join(
    (
        "--database, --transport, --checkpoints, --prefix, --local, --namespace and --debug may stand anywhere in the line. Every user of a machine sees its command lines: "
        "put a URL that holds a password into its MILLSTREAM_… variable.",
        "Exit codes:",
        "0 done",
        "1 failed, or the job did",
        "2 wrong usage or configuration",
        "3 not found",
        "4 refused: conflict, invalid job or task, or a schema that does not fit",
        "5 database, broker or checkpoint storage cannot be reached",
    )
)
_ANYWHERE = {"--database", "--transport", "--checkpoints", "--prefix", "--local", "--namespace"}


class Commands(TyperGroup):
    """The root command: takes the program's own options anywhere in the line, and turns errors into one text and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _own_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MillstreamError, TimeoutError, OSError, sa.exc.DBAPIError) as exc:
            raise typer.Exit(_tell(exc, ctx.params)) from None
        except Exception as exc:
            if type(exc).__module__.partition(".")[0] in ("typer", "click"):
                raise  # usage errors and exits: shown by Typer
            raise typer.Exit(_tell(exc, ctx.params, unexpected=True)) from None


def _own_first(args: list[str]) -> list[str]:
    """The program's own options moved to the front, where its parser takes them."""
    own: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(args):
        name, equals, _ = args[i].partition("=")
        if args[i] == "--":
            rest += args[i:]
            break
        if name in _ANYWHERE and not equals:
            own += args[i : i + 2]
            i += 2
            continue
        (own if name in _ANYWHERE or name == "--debug" else rest).append(args[i])
        i += 1
    return own + rest


def _tell(exc: Exception, params: Mapping[str, Any], *, unexpected: bool = False) -> int:
    """Say what is wrong on stderr; the exit code."""
    urls = [str(v) for v in (*(params.get(f) for f in VARIABLES), *(os.environ.get(n) for n in VARIABLES.values())) if v]
    if params.get("debug"):
        print(formatting.scrubbed("".join(traceback.format_exception(exc)), urls), file=sys.stderr)
    text = str(exc) or type(exc).__name__
    if isinstance(exc, sa.exc.DBAPIError):
        text = f"the database refused: {(str(exc.orig).splitlines() or [''])[0]}"
    if unexpected:
        text = f"this should not have happened: {type(exc).__name__}: {text}; run it again with --debug and report what it shows"
    print(f"millstream: {formatting.scrubbed(text, urls)}", file=sys.stderr)
    return next((code for kind, code in _EXITS if isinstance(exc, kind)), EXIT_FAILED)


@dataclass
class Given:
    """The program's own options as given."""

    values: dict[str, Any] = field(default_factory=dict)
    local: Path | None = None
    namespace: str = "default"

    def installation(self, *, database_only: bool = False) -> Installation:
        """From the options over the environment. ``database_only``: a command that reads and writes rows and opens neither channels nor checkpoints does not ask for them."""
        given = {f: v for f, v in self.values.items() if v is not None}
        if self.local is not None:
            return Installation.local(self.local, **given)
        found: dict[str, Any] = {f: os.environ[name] for f, name in VARIABLES.items() if os.environ.get(name)} | given
        try:
            installation = Installation.checked(found)
        except ConfigurationError as exc:
            also = "" if database_only else Installation.missing_for_streams(found)
            raise ConfigurationError("; ".join(filter(None, (str(exc), also)))) from None
        return installation if database_only else installation.for_streams()

    def names_a_database(self) -> bool:
        """Whether any is given."""
        return self.local is not None or bool(self.values.get("database") or os.environ.get(VARIABLES["database"]))

    def tasks(self) -> Tasks:
        """Durable tasks, acted on as the user who is logged in."""
        return Tasks(self.installation(database_only=True), None, self.namespace, actor=f"cli:{getpass.getuser()}")

    def subscriptions(self) -> Subscriptions:
        """Subscriptions to the ends of tasks, likewise."""
        return Subscriptions(self.installation(database_only=True), self.namespace, actor=f"cli:{getpass.getuser()}")

    def schedules(self, handlers: str | None = None) -> Schedules:
        """Schedules, likewise; ``handlers``: module:attribute of the Handlers object."""
        registry = handlers_of(handlers) if handlers else None
        return Schedules(self.installation(database_only=True), registry, self.namespace, actor=f"cli:{getpass.getuser()}")

    def queues(self) -> Queues:
        """Queues and handlers of durable tasks, likewise."""
        return Queues(self.installation(database_only=True), self.namespace, actor=f"cli:{getpass.getuser()}")

    def permits(self) -> Permits:
        """Permits, likewise."""
        return Permits(self.installation(database_only=True), self.namespace, actor=f"cli:{getpass.getuser()}")

    def jobs(self, pipelines: str | None = None, *, build: bool = False) -> Jobs:
        registry = pipelines_of(pipelines) if build else None
        return Jobs(self.installation(database_only=True), registry, self.namespace)
