"""What is known of a call to the outside, as a handler's code says it: what ``call`` of ``ctx.external`` and reconcile hooks give back or raise, and what such a hook is asked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import msgspec


class Done(msgspec.Struct, frozen=True):
    """The call happened; ``result``: its outcome, in plain values."""

    result: Any = None


class NotDone(Exception):
    """The call certainly did not happen, and cannot happen any more: it may be made again. Raise it out of a call, or give it back."""


class OutcomeUnknown(Exception):
    """Nobody can say whether the call happened: a person is asked."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was begun and whose outcome is not known, as a reconcile hook is asked about it.

    ``args``, ``kwargs``: of the task; ``calls``: how often the call was begun; ``opened_at``: when it was begun last (UTC); ``detail``: what is known of why it is in doubt.
    """

    name: str
    key: str
    idempotency_key: str
    task_id: str
    args: list[Any]
    kwargs: dict[str, Any]
    calls: int
    opened_at: dt.datetime
    detail: str


Answer = Done | NotDone | OutcomeUnknown
Reconcile = Callable[[Intent], Answer]
"""A handler's hook: asks the outside what became of a call. What it raises counts as not known, but for ``NotDone``."""
