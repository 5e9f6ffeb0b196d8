"""Rows there is one of: whoever decides over something that is decided by one at a time locks its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from .database import Transaction


def lock_single(tx: Transaction, key: str) -> Mapping[str, Any]:
    """The row of the table ``coordinator`` under ``key``, locked; it is made if nobody did.

    It is looked for first: an INSERT that meets the row locks it shared on MariaDB, and two such locks that want to be more are a deadlock.
    """
    t = tx.t.coordinator
    locked = sa.select(t).where(t.c.id == key).with_for_update()
    row = tx.row(locked)
    if row is None:
        tx.insert_or_nothing(t, id=key, holder="", term=0, expires_us=0, ticked_us=0, rev=0)
        row = tx.row(locked)
    assert row is not None
    return row
