"""What an attempt is given beside its arguments by whoever runs it: clocks, ids, and the ways to ask and tell its worker something.

Made by the pools for each attempt, in the process or thread that runs it. What must never happen here: anything of another attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.ports import Clock, Ids

from .databases import HandlerDatabases
from .progress import Telling


@dataclass(frozen=True)
class Surroundings:
    """``told``: whether the end of this attempt is asked for. ``committed``: to be called when its own transaction has settled it. ``wait``: stands still so many seconds.

    ``telling``: takes what the attempt says while it runs. ``raised``: hears of an exception that is none of the verbs, with its traceback, which goes no further.
    ``known``: is given what a call by ``ctx.external`` came to before that is written down, and None when it is."""

    ids: Ids
    clock: Clock
    told: Callable[[], bool]
    databases: HandlerDatabases
    committed: Callable[[], None]
    wait: Callable[[float], object]
    telling: Telling
    raised: Callable[[BaseException], None]
    known: Callable[[IntentId, KnownCall | None], None]
