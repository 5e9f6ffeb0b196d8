"""``millstream markers …``: the marker tables in databases of users' own, for ``ctx.transaction(name)``. Mounted by ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream_schema.errors import ConfigurationError
from millstream_schema.store import markers

from . import formatting
from .arguments import handlers_of

markers_app = typer.Typer(no_args_is_help=True, help="Marker tables in databases of your own, for ctx.transaction(name).")


@markers_app.command("init")
def init(
    ctx: typer.Context,
    handlers: Annotated[str, typer.Option("--handlers", help="module:attribute of the Handlers object that names the databases.")],
    names: Annotated[list[str] | None, typer.Argument(help="Which of them; all, if none are named.")] = None,
) -> None:
    """Make the marker table in them. Harmless where it is there."""
    known = handlers_of(handlers).databases
    wanted = names or sorted(known)
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        raise ConfigurationError(
            f"{handlers} names these databases: {', '.join(sorted(known)) or 'none'}; give them by Handlers(databases={{...}})"
        )
    prefix = ctx.obj.installation(database_only=True).table_prefix
    for name in wanted:
        source = known[name]
        markers.create(source if isinstance(source, str) else source(), prefix)
        formatting.show(f"{name} has the marker table {prefix}marker")
