"""What a driver's error means for the caller.

Raised through the connection door; caught by sinks and snapshot storage. Whoever connects must not have to know three drivers' exceptions.
What must never happen here: an error after which the outcome is open being reported as if nothing had been done.

::

    StoreUnavailable
    └── TargetUnavailable   nothing was done (connection, disk, read-only); try again later
        └── TargetBusy      nothing was done (lock wait, deadlock, serialization); try again at once
    SinkError
    └── TargetRefused       the database will never accept it (constraint, type, missing table, permission)
"""

from __future__ import annotations

import enum
import sqlite3
from typing import Final

from millstream_schema.errors import SinkError, StoreUnavailable


class TargetUnavailable(StoreUnavailable):
    """The target database cannot be reached or cannot write; nothing was done, it is safe to try again."""


class TargetBusy(TargetUnavailable):
    """A lock was not granted in time, or the database broke a deadlock; nothing was done, try again."""


class TargetRefused(SinkError):
    """The target database refuses the statement for good."""


class Failure(enum.Enum):
    """``LOST`` leaves the outcome of a COMMIT open; ``BUSY`` and ``REFUSED`` are definite: the transaction is rolled back."""

    LOST = "lost"
    BUSY = "busy"
    REFUSED = "refused"


# PostgreSQL: class 08 connection, 53 resources, 57 operator intervention, 58 system error; 40003 is "completion unknown", 25006 a standby.
_PG_LOST_CLASSES: Final = ("08", "53", "57", "58")
_PG_LOST: Final = {"40003", "25006", "25P03", "25P02"}
_PG_BUSY: Final = {"55P03", "40001", "40P01"}
_MYSQL_BUSY: Final = {1205, 1213, 1020, 3572}
# Connection, shutdown, disk and table full, read-only, too many connections, packets out of order.
_MYSQL_LOST: Final = {
    *(1021, 1040, 1053, 1077, 1114, 1129, 1158, 1159, 1160, 1161, 1180, 1184, 1203, 1226, 1290, 1317),
    *(1836, 1927, 1969, 2002, 2003, 2006, 2013, 2014, 2055, 4031),
}
_SQLITE_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_SQLITE_LOST: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_PROTOCOL,
}


def classify(dialect: str, error: BaseException) -> Failure:
    """What ``error``, raised by the driver of ``dialect``, means. OSErrors are lost connections whatever the driver."""
    if isinstance(error, OSError):
        return Failure.LOST
    if dialect == "sqlite":
        return _sqlite(error)
    if dialect == "postgresql":
        return _postgresql(error)
    return _mysql(error)


def _sqlite(error: BaseException) -> Failure:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return Failure.REFUSED
    if code & 0xFF in _SQLITE_BUSY:
        return Failure.BUSY
    return Failure.LOST if code & 0xFF in _SQLITE_LOST else Failure.REFUSED


def _postgresql(error: BaseException) -> Failure:
    state = getattr(error, "sqlstate", None)
    if state is None:
        lost = type(error).__name__ in ("OperationalError", "InterfaceError", "ConnectionTimeout", "PipelineAborted")
        return Failure.LOST if lost else Failure.REFUSED
    if state in _PG_BUSY:
        return Failure.BUSY
    return Failure.LOST if state in _PG_LOST or state[:2] in _PG_LOST_CLASSES else Failure.REFUSED


def _mysql(error: BaseException) -> Failure:
    code = error.args[0] if error.args else None
    if code in _MYSQL_BUSY:
        return Failure.BUSY
    return Failure.LOST if code in _MYSQL_LOST or type(error).__name__ == "InterfaceError" else Failure.REFUSED
