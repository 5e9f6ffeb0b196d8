"""The options that say which tasks are meant, the same for every command that looks for some or acts on many.

Used by ``cli_tasks`` and ``cli_bulk``. What must never happen here: an option that is taken and not looked at.
"""

from __future__ import annotations

import datetime as dt
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from millstream_schema.durable.finding import TaskFilter
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError
from millstream_schema.ports import SystemClock

_AGO = re.compile(r"(\d+)([smhd])\Z")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_INSTANT = "an instant with its offset (2030-01-31T08:00:00+01:00), or an age: 90s, 15m, 6h, 30d"

FILTERS: dict[str, tuple[Any, Any]] = {
    "state": (Annotated[list[str] | None, typer.Option("--state", help="Only those in this state; may be repeated.")], None),
    "handler": (Annotated[str, typer.Option("--handler", help="Only those of this handler.")], ""),
    "queue": (Annotated[str, typer.Option("--queue", help="Only those of this queue.")], ""),
    "business_key": (Annotated[str, typer.Option("--business-key", help="Only those with this business key.")], ""),
    "created_from": (Annotated[str, typer.Option("--created-from", help=f"Created at or after: {_INSTANT}.")], ""),
    "created_until": (Annotated[str, typer.Option("--created-until", help="Created before, likewise.")], ""),
    "settled_from": (Annotated[str, typer.Option("--settled-from", help="Ended at or after, likewise.")], ""),
    "settled_until": (Annotated[str, typer.Option("--settled-until", help="Ended before, likewise.")], ""),
    "origin": (
        Annotated[str, typer.Option("--origin", help="How they came in, by its first parts: direct, batch, task:ID, schedule:NAME, retry, review, …")], "",
    ),
    "error_class": (Annotated[str, typer.Option("--error-class", help="Only those whose last exception was of this class.")], ""),
    "retry_of": (Annotated[str, typer.Option("--retry-of", help="Only the retries of this task.")], ""),
}  # fmt: skip


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it gets the filter they make as ``where``."""
    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.name != "where"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in FILTERS.items()
    ]

    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in FILTERS}
        command(**given, where=filter_of(**chosen))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept] + added
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect documents it
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def filter_of(**given: Any) -> TaskFilter:
    """What the options say. Raises ConfigurationError."""
    states = tuple(state_of(s) for s in given.pop("state") or ())
    instants: dict[str, Any] = {
        n: instant_of(given.pop(n), "--" + n.replace("_", "-")) for n in list(given) if n.endswith(("_from", "_until"))
    }
    return TaskFilter(states=states, **instants, **given)


def state_of(text: str) -> TaskState:
    try:
        return TaskState(text.upper())
    except ValueError:
        raise ConfigurationError(f"--state must be one of {', '.join(TaskState)}, not {text!r}") from None


def age_of(text: str, option: str) -> dt.timedelta:
    """A length of time as 90s, 15m, 6h, 30d."""
    found = _AGO.match(text)
    if found is None or len(found[1]) > 9:
        raise ConfigurationError(f"{option} must be like 90s, 15m, 6h or 30d, not {text!r}")
    return dt.timedelta(**{_UNITS[found[2]]: int(found[1])})


def ago(age: dt.timedelta) -> dt.datetime:
    """The instant so long before now."""
    return dt.datetime.fromtimestamp(SystemClock().now_us() / 1e6, dt.UTC) - age


def instant_of(text: str, option: str) -> dt.datetime | None:
    if not text:
        return None
    try:
        if _AGO.match(text):
            return ago(age_of(text, option))
        found = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{option} must be {_INSTANT}, not {text!r}") from None
    if found.tzinfo is None:
        raise ConfigurationError(f"{option} {text!r} has no offset: write e.g. {text}+00:00")
    return found
