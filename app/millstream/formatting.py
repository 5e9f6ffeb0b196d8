"""What the CLI shows: tables for people, JSON with stable keys for programs, one clear text for an error.

Called by the CLI. What must never happen here: a password on a terminal or in a log.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from millstream_schema.reasons import one_line
from millstream_schema.store.rows import JobRow

_SECRET = re.compile(r"(://[^\s:/@'\"]*:)[^\s/'\"]*@")
_QUERY = re.compile(r"(?i)\b(password|passwd|pwd)=[^\s&;'\"]+")
_PIPE_WIDTH = 200
_COLOURS = {
    "RUNNING": "green",
    "FINISHED": "green",
    "COMMITTED": "green",
    "FAILED": "red",
    "ABORTED": "red",
    "RESTARTING": "yellow",
    "WAITING_FOR_RESOURCES": "yellow",
}


def scrubbed(text: str, urls: Iterable[str] = ()) -> str:
    """``text`` without passwords: in any URL it holds, in ``password=…``, and those of ``urls`` wherever they stand."""
    for url in urls:
        credentials, at, _ = url.partition("://")[2].rpartition("@")
        password = credentials.partition(":")[2]
        if at and len(password) > 3:
            text = text.replace(password, "***")
    return _QUERY.sub(r"\1=***", _SECRET.sub(r"\1***@", text))


def console(*, stderr: bool = False) -> Console:
    """A console on what stdout is now; wide when it is no terminal, so that a pipe gets whole lines."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else _PIPE_WIDTH, highlight=False)


def show(*parts: RenderableType) -> None:
    out = console()
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, str | Text))


def notice(text: str) -> None:
    """What somebody who waits should know; on stderr, so that stdout stays what was asked for."""
    print(f"millstream: {text}", file=sys.stderr, flush=True)


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def job_line(row: JobRow) -> dict[str, Any]:
    """A job in a list: the keys are stable. Times in UTC µs."""
    return {
        "id": row.id,
        "namespace": row.namespace,
        "name": row.name,
        "pipeline": row.factory,
        "state": row.state.value,
        "desired": row.desired.value,
        "reason": row.reason,
        "generation": row.generation,
        "restarts": row.restarts,
        "newest_durable": row.newest_durable,
        "newest_committed": row.newest_committed,
        "pending_commits": msgspec.json.decode(row.pending_commits),
        "created_us": row.created_us,
        "changed_us": row.changed_us,
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Texts left, numbers right, states in colour; no cell is read as markup."""
    found = [list(r) for r in rows]
    made = Table(
        title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(columns)
    )
    for i, name in enumerate(columns):
        numeric = any(isinstance(r[i], int | float | Decimal) for r in found)
        made.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in found:
        made.add_row(*(Text("" if cell is None else str(cell), style=_COLOURS.get(str(cell), "")) for cell in row))
    return made


def moment(us: int) -> str:
    """UTC µs for people."""
    return datetime.fromtimestamp(us // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S") if us else ""


def pairs(found: Mapping[str, Any], without: Iterable[str] = ()) -> str:
    """What is known of one thing, a line each; what is empty is left out, and instants (``…_us``) are written as people read them."""
    lines = []
    for name, value in found.items():
        if name in without or value in ("", None, [], {}) or (name.endswith("_us") and not value):
            continue
        if name.endswith("_us"):
            lines.append(f"{name.removesuffix('_us'):14} {moment(value)} UTC")
        elif isinstance(value, Mapping):
            lines.append(f"{name:14} {', '.join(f'{n} {k}' for k, n in sorted(value.items()))}")
        else:
            lines.append(f"{name:14} {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join(lines)


def milliseconds(value: float | None) -> Decimal | None:
    """A duration with three figures that count, down to the microsecond it was measured in: 3421, 38.2, 0.125."""
    if value is None:
        return None
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3 if value else 0
    return Decimal(str(value)).quantize(Decimal(1).scaleb(-places))


def jobs_table(rows: Sequence[JobRow]) -> Table:
    columns = ("name", "state", "wanted", "durable", "committed", "restarts", "submitted (UTC)", "reason")
    lines = [
        (
            r.name,
            r.state.value,
            r.desired.value,
            r.newest_durable,
            r.newest_committed,
            r.restarts,
            moment(r.created_us),
            brief(r.reason),
        )
        for r in rows
    ]
    return table(f"{len(lines)} job{'' if len(lines) == 1 else 's'}", columns, lines)


def epochs_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("epoch", "generation", "kind", "state", "duration ms", "alignment ms", "commit ms", "bytes", "triggered (UTC)", "reason")
    return table(
        "epochs",
        columns,
        [
            (
                e["epoch"],
                e["generation"],
                e["kind"],
                e["state"],
                milliseconds(e["duration_ms"]),
                milliseconds(e["alignment_ms"]),
                milliseconds(e["commit_ms"]),
                e["size"],
                moment(e["triggered_us"]),
                brief(e["reason"]),
            )
            for e in lines
        ],
    )


def epoch_parts(epoch: Mapping[str, Any]) -> list[RenderableType]:
    """One durable epoch: offsets, segments, committables."""
    return [
        Text(f"epoch {epoch['epoch']} ({epoch['kind']}), generation {epoch['generation']}, plan {epoch['plan_fingerprint']}"),
        table(
            "offsets",
            ("operator", "split", "cursor", "finished"),
            [(o["operator"], o["split"], _compact(o["cursor"]), o["finished"]) for o in epoch["offsets"]],
        ),
        table("segments", ("subtask", "key", "bytes"), [(s["subtask"], s["key"], s["size"]) for s in epoch["segments"]]),
        table("committables", ("id", "rows"), [(c["id"], c["rows"]) for c in epoch["committables"]]),
    ]


def savepoints_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("savepoint", "epoch", "state", "taken (UTC)", "error")
    return table("savepoints", columns, [(s["id"], s["epoch"], s["state"], moment(s["created_us"]), brief(s["error"])) for s in lines])


def status_parts(status: Mapping[str, Any]) -> list[RenderableType]:
    """One job for people."""
    parts: list[RenderableType] = [table(f"{status['name']} ({status['id']})", ("", ""), _facts(status))]
    if status["subtasks"]:
        columns = ("subtask", "node", "state", "committed", "detail")
        parts.append(
            table(
                "subtasks",
                columns,
                [(s["subtask"], s["node"], s["state"], s["committed"], brief(s["detail"])) for s in status["subtasks"]],
            )
        )
    if counts := [(n["name"], name, count) for n in status["nodes"] for name, count in n["counts"].items() if count]:
        parts.append(table("counted by nodes", ("node", "what", "count"), counts))
    if status["epochs"]:
        parts.append(epochs_table(status["epochs"]))
    if status["savepoints"]:
        parts.append(savepoints_table(status["savepoints"]))
    if status["history"]:
        parts.append(
            table(
                "history",
                ("at (UTC)", "event", "detail"),
                [(moment(h["at_us"]), h["event"], brief(h["detail"])) for h in status["history"]],
            )
        )
    return parts


def _facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    causes = (
        ", ".join(f"{cause} {count}" for cause, count in sorted(status["causes"].items())) if isinstance(status["causes"], dict) else ""
    )
    facts = [
        ("pipeline", status["factory"]),
        ("namespace", status["namespace"]),
        ("state", status["state"]),
        ("wanted", status["desired"]),
        ("reason", one_line(status["reason"])),
        ("obstacle", status["obstacle"]),
        ("guarantee", " ".join(filter(None, (status["guarantee"], status["note"])))),
        ("generation, term", f"{status['generation']}, {status['term']}"),
        ("restarts", f"{status['restarts']}{f' ({causes})' if causes else ''}"),
        ("durable, committed", f"{status['newest_durable']}, {status['newest_committed']}"),
        ("plan", status["plan_fingerprint"]),
        ("commits waiting for", "; ".join(status["commits_waiting_for"])),
        ("pending commits", "; ".join(map(_compact, status["pending_commits"]))),
    ]
    return [(name, value) for name, value in facts if value]


def brief(text: str) -> str:
    """For a table's cell: one line, cut."""
    return one_line(text)[:160]


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
