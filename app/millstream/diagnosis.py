"""What is wrong with an installation, from facts: a pure judgement, each finding with its reason and its cure.

Used by ``doctor``. What must never happen here: a finding without a cure; a word about what nobody can change.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from millstream_schema.durable.explaining import instant
from millstream_schema.store.health import MOST, Health


class Gravity(enum.StrEnum):
    WRONG = "wrong"
    """Work is lost, done twice or not done, or will be."""
    DOUBTFUL = "doubtful"
    """It may be meant; look at it."""
    FINE = "fine"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. ``about``: a stable name; ``found``: what is; ``reason``: why that matters; ``cure``: what to do."""

    about: str
    gravity: Gravity
    found: str
    reason: str = ""
    cure: str = ""


QUIET_US = 60_000_000
"""A coordinator that has not ticked for so long is none."""
CLOCKS_US = 1_000_000
"""By how much the clocks may differ."""


def installation_findings(h: Health, dialect: str, here_us: int, lease_us: int) -> list[Finding]:
    """``here_us``: this machine's clock when ``h.now_us`` was read, ``lease_us``: of worker sessions."""
    parts = (_workers(h), _coordinator(h), _reviews(h), _behind(h), _clock(h, here_us, lease_us), _durability(h, dialect), _unfinished(h))
    return [f for part in parts for f in part]


def _wrong(about: str, found: str, reason: str, cure: str) -> Finding:
    return Finding(about=about, gravity=Gravity.WRONG, found=found, reason=reason, cure=cure)


def _doubtful(about: str, found: str, reason: str, cure: str) -> Finding:
    return Finding(about=about, gravity=Gravity.DOUBTFUL, found=found, reason=reason, cure=cure)


def _fine(about: str, found: str) -> Finding:
    return Finding(about=about, gravity=Gravity.FINE, found=found)


def _workers(h: Health) -> Iterator[Finding]:
    """Queues and handlers with waiting tasks that nobody serves."""
    served = {q for s in h.sessions.values() for q in s.queues}
    deserted = sorted({lane.partition("/")[2] for lane in h.waiting} - served)
    if deserted:
        yield _wrong(
            "queues without workers", f"tasks wait in {', '.join(deserted)}", "no live worker serves these queues: their tasks never begin",
            "start workers that serve them (their handlers' queues, or queues=(…)), or cancel the tasks: millstream tasks cancel --dry-run --queue …",
        )  # fmt: skip
    orphans = sorted(
        {
            f"{handler} (queue {queue})" for lane, handlers in h.waiting.items() for queue in [lane.partition("/")[2]] if queue in served
            for handler in handlers if not any(queue in s.queues and handler in s.handlers for s in h.sessions.values())
        }
    )  # fmt: skip
    if orphans:
        yield _wrong(
            "handlers without workers", f"tasks wait for {', '.join(orphans)}", "workers serve the queue, but none of them has the handler",
            "deploy the module that registers it to a worker of that queue, or cancel the tasks",
        )  # fmt: skip
    if not deserted and not orphans:
        yield _fine("workers", f"{len(h.sessions)} live sessions serve {', '.join(sorted(served)) or 'no queue'}")
    if h.expired:
        yield _doubtful(
            "lost workers", f"{h.expired} sessions without a lease still hold tasks", "their workers stopped without a word; the sweep takes the tasks back",
            "if this does not go away within two leases, no coordinator sweeps: see there",
        )  # fmt: skip


def _coordinator(h: Health) -> Iterator[Finding]:
    last = max(h.swept_us, h.ticked_us)
    if h.now_us - last > QUIET_US:
        yield _wrong(
            "coordinator", "never seen" if not last else f"last seen {instant(last)}",
            "nobody wakes due tasks, takes back what lost workers held, fires schedules or forgets old tasks", "start a worker: each one coordinates when it can",
        )  # fmt: skip
    else:
        yield _fine("coordinator", f"last seen {instant(last)}")


def _reviews(h: Health) -> Iterator[Finding]:
    if h.in_review:
        counts = ", ".join(f"{name}: {count}{'+' if count >= MOST else ''}" for name, count in sorted(h.in_review.items()))
        yield _doubtful(
            "reviews", f"tasks in review ({counts}), the first since {instant(h.oldest_review_us)}", "nobody knows whether these had their effect: nothing happens by itself",
            "millstream reviews list, then done, fail or retry",
        )  # fmt: skip
    else:
        yield _fine("reviews", "no task is in review")


def _behind(h: Health) -> Iterator[Finding]:
    if h.late_schedules:
        names = ", ".join(f"{name} by {late // 1_000_000} s" for name, late in sorted(h.late_schedules.items()))
        yield _wrong(
            "schedules",
            f"late: {names}",
            "nobody fires them in time, or they are held",
            "millstream schedules show NAME; a worker has to run",
        )
    else:
        yield _fine("schedules", "none is late")
    if h.parked_deliveries:
        names = ", ".join(f"{name}: {count}" for name, count in sorted(h.parked_deliveries.items()))
        yield _doubtful(
            "deliveries", f"parked ({names})", "their consumers could not take them in as many attempts as allowed",
            "millstream deliveries list NAME --state PARKED, mend the consumer, millstream deliveries redeliver",
        )  # fmt: skip
    else:
        yield _fine("deliveries", "none is parked")


def _clock(h: Health, here_us: int, lease_us: int) -> Iterator[Finding]:
    apart = abs(h.now_us - here_us)
    found = f"the database's and this machine's clock are {apart / 1e6:.1f} s apart"
    if apart > CLOCKS_US:
        make = _wrong if apart > lease_us // 2 else _doubtful
        yield make(
            "clocks",
            found,
            "tasks live by the database's clock; what people give as instants comes from machines like this one",
            "run NTP (chrony) on both",
        )
    else:
        yield _fine("clocks", found)


WANTED = {
    "postgresql": {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"},
    "mysql": {"innodb_flush_log_at_trx_commit": "1", "sync_binlog": "1"},
    "sqlite": {"journal_mode": "wal", "synchronous": "2"},
}


def _durability(h: Health, dialect: str) -> Iterator[Finding]:
    wanted = {n: v for n, v in WANTED[dialect].items() if n != "sync_binlog" or h.settings.get("log_bin") == "1"}
    off = {n: h.settings.get(n, "?") for n, v in wanted.items() if h.settings.get(n) != v}
    if off:
        yield _wrong(
            "durability", ", ".join(f"{n} = {v}" for n, v in sorted(off.items())), "a commit that was answered may be lost with the power: a task, or the end of one",
            "set " + ", ".join(f"{n} = {wanted[n]}" for n in sorted(off)),
        )  # fmt: skip
    else:
        yield _fine("durability", ", ".join(f"{n} = {v}" for n, v in sorted(wanted.items())))
    if dialect == "sqlite" and len(h.sessions) > 1:
        yield _doubtful(
            "sqlite", f"{len(h.sessions)} worker sessions share one file", "SQLite has one writer at a time and one machine: no network file system, no failover",
            "use PostgreSQL or MariaDB for more than one machine or some hundred tasks a second",
        )  # fmt: skip


def _unfinished(h: Health) -> Iterator[Finding]:
    if h.unfinished:
        yield _doubtful(
            "operations", f"{h.unfinished} acts on many tasks stopped half way", "whoever carried them out was interrupted",
            "millstream tasks operations; the same --token goes on",
        )  # fmt: skip
