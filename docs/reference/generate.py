"""Writes the generated parts of the documentation from the code: ``python docs/reference/generate.py`` (``--check`` only compares).

A generated part stands between ``<!-- generated: NAME -->`` (or ``<!-- include: FILE -->``) and ``<!-- end -->``. Called by people after a change and
by ``tests/integration/test_docs.py``. What must never happen here: a setting, command, table or state that the code has and the documents do not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from millstream.cli import main as program
from millstream.installation import VARIABLES, Installation
from millstream.metrics import ALIGNMENT, JOB_GAUGES, NODE_COUNTERS, SUBTASK_COUNTERS, SUBTASK_GAUGES
from millstream.schedule_metrics import BEHIND, IN_REVIEW, SCHEDULE_COUNTERS
from millstream_coordinator.decisions import FREE, PERMANENT
from millstream_schema import errors
from millstream_schema.connectors import SinkCapability, SourceCapability
from millstream_schema.durable.schedules import FIRE_TRANSITIONS, SCHEDULE_TRANSITIONS
from millstream_schema.model import EdgeConfig, Guarantee
from millstream_schema.plan import SINK_OK, SOURCE_OK
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import ASSIGNMENT_TRANSITIONS, EPOCH_TRANSITIONS, JOB_TRANSITIONS
from millstream_schema.store.tables import SCHEMA_VERSION, tables

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- (generated|include): ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

SETTINGS: Mapping[str, tuple[str, str]] = {
    "epoch_interval_ms": (
        "ms",
        "From one epoch's trigger to the next. Bounds what a recovery repeats and how long results of two-phase sinks stay hidden. 0: no periodic epochs, under BEST_EFFORT only",
    ),
    "min_pause_ms": (
        "ms",
        "At least this long between the last trigger (or start) and the next, also when a queue source asks for an epoch",
    ),
    "alignment_ms": (
        "ms",
        "A subtask that has not acknowledged the epoch in flight and shows no progress for this long: the job restarts, from the stall budget",
    ),
    "epoch_timeout_ms": ("ms", "Absolute. Only aborts the epoch: a slow sink slows a job and does not fail it"),
    "start_limit_ms": ("ms", "A generation that is not READY by then is restarted: a lost deployment is noticed"),
    "commit_deadline_ms": (
        "ms",
        "How long an ending waits for its last commits. What is left then is listed as pending, never rolled back",
    ),
    "retained": ("epochs", "Durable epochs whose manifests and segments are kept. Savepoints are apart"),
    "max_uncommitted": (
        "epochs",
        "Durable epochs that may wait for their commit; beyond it no epoch is triggered, and `status` names what is waited for",
    ),
    "max_aborts": ("epochs", "More aborted epochs in a row than this restart the job"),
    "watermark_interval_ms": ("ms", "A source sends a watermark at most this often"),
    "source_batch": ("records", "A source's reader is asked for at most so many at once; barriers are taken between two such reads"),
    "discovery_interval_ms": ("ms", "How often an unbounded source is asked for new splits"),
    "incremental": ("", "Snapshots hold what changed since the newest durable epoch; off: all state each time"),
    "max_segments": ("segments", "Increments on top of one another before a full snapshot is written"),
    "restart": ("", "See RestartPolicy below"),
    "checkpoints": (
        "URL",
        "Checkpoint storage of this job: `file:///…` (or an absolute path) or a database URL. Empty: the installation's",
    ),
}
RESTART: Mapping[str, tuple[str, str]] = {
    "kind": (
        "",
        "`exponential`: doubles from `delay_ms` to `max_delay_ms`, times a random 0.5–1. `fixed`: `delay_ms`. `rate`: `delay_ms`, "
        "and the budgets count only the restarts of the last `interval_ms`",
    ),
    "delay_ms": ("ms", "Pause before the first restart"),
    "max_delay_ms": ("ms", "Longest pause"),
    "failures": ("restarts", "Budget for failures. The next failure ends the job as FAILED, its causes in the reason. 0: no restart"),
    "stalls": ("restarts", "Budget for stalls, apart: a stall must not use up what is meant for failures"),
    "interval_ms": (
        "ms",
        "A durable epoch this long after the last restart refills both budgets. Under `rate`: how far back restarts count",
    ),
}
EDGE: Mapping[str, tuple[str, str]] = {
    "capacity": ("envelopes", "Credit window of each channel: how far a producer may be ahead of what its consumer has processed"),
    "batch_records": ("records", "An envelope is sent when it has so many"),
    "batch_bytes": ("bytes", "Largest envelope before compression; at least 1024, at most 1 MiB"),
    "linger_ms": (
        "ms",
        "How long a record waits for company: at most this under load (but never less than 5), not at all while there is nothing else to do",
    ),
    "mode": (
        "",
        "`BLOCKING_QUEUE` hands objects over and is refused between processes; `CREDIT_BASED` sends envelopes through the codec even within one. "
        "None: by placement. Either way the bound is the producer's credit",
    ),
    "compression": ("", "`zstd` or none. Payloads of more than 512 bytes, where it makes them smaller"),
    "codec": ("", "`msgpack` or `json`"),
    "verify_serialization": ("", "Edges between threads of one process go through the codec as between processes. For tests"),
}
INSTALLATION: Mapping[str, tuple[str, str]] = {
    "database": ("URL", "SQLAlchemy URL of the control database: `postgresql+psycopg://`, `mysql+pymysql://` (MariaDB) or `sqlite:///`"),
    "transport": ("URL", "For stream jobs. Channels between subtasks: `unix:///directory` (one machine), `redis://` or `amqp://`"),
    "checkpoints": ("URL", "For stream jobs. `file:///directory` (or the absolute path alone) that every node reaches, or a database URL"),
    "prefix": ("", "Starts the name of every table, queue, key and channel: two installations in one database and broker do not meet"),
    "lease_ms": (
        "ms",
        "A node or coordinator that could not renew for so long is taken for dead. Renewed every quarter (node) or third (coordinator)",
    ),
    "poll_ms": ("ms", "How often rows are read without a hint"),
    "renew_ms": ("ms", "How often a node renews. A quarter of the lease when not given, at most a third: two renewals may be lost"),
    "idle_in_transaction_ms": (
        "ms",
        "Limit of locks and idle transactions. A quarter of the lease when not given, below a third: a stopped process must not keep a row",
    ),
    "liveness_ms": ("ms", "A subtask process silent for this long is killed by its node. 0.8 of the lease when not given, below it"),
    "channel_expiry_ms": ("ms", "Broker channels that nobody uses go after this long; at least an hour"),
    "result_timeout_ms": ("ms", "How long a wait for a task's result lasts that gives no time of its own: none is without an end"),
}
TABLES: Mapping[str, str] = {
    "schema": "One row: the schema's version, and whether a migration is under way (`MIGRATING`, `READY`).",
    "installation": "One row: an id made with the schema, by which a session of a user's is told to be on this database, and the secret that signs cursors and tokens.",
    "coordinator": "`coordinator`: holder of the lease, term, time of the last tick. `capacity`: a row to lock while slots are counted. "
    "`task-sweep`: when durable tasks were last swept, and until when no lease is judged.",
    "node": "Node processes; a new id at each start.",
    "job": "Jobs: what was submitted (factory, config, settings, plan, model), what is wanted (`desired`) and what is (`state`), with the fences. "
    "`live_name` is unique: one live job a name.",
    "assignment": "Which node runs which subtask of which generation, and what it reported. The last 20 generations are kept.",
    "epoch": "Epochs with their state, times and size.",
    "ack": "One row per acknowledged (or declined) snapshot of an epoch.",
    "manifest": "What each durable epoch restores, as canonical JSON with its checksum.",
    "split": "Splits of sources: owner and the cursor of the last restore.",
    "source": "Whether discovery is over.",
    "savepoint": "Savepoints: a manifest of their own and the model it belongs to.",
    "channel": "Channels that were made and not yet deleted, by exact name.",
    "history": "What happened to a job; the last 200 entries.",
    "task": "Durable tasks, one row each from acceptance to its end: request, state, fence and claim token, what it waits for, result. "
    "`(namespace, handler, key)` is unique; `ready_lane`, `wake_us` and `blocked_by` are set only for those that can be claimed, wait for an instant, or are blocked.",
    "attempt": "How attempts ended, and what was reported after another end had been settled (`late`).",
    "progress": "How far an attempt said it was, last: one row each, written beside its session's heartbeats and ends. Goes with its task.",
    "note": "What attempts have noted while they ran, for people; at most 100 each. Goes with its task.",
    "permit": "Resources that at most `capacity` tasks use at once, and the sequence their attempts are numbered from.",
    "subscription": "Who wants to know how tasks end: filters, how deliveries are handed out, how far it has caught up with what was ending when it was made. "
    "`seq` follows the order of commits; `live_name` is unique: one live subscription a name.",
    "event": "Ends of tasks, one row each, written with the end if somebody subscribes: the frozen outcome. `pending` until its deliveries are made; "
    "`seen`: the newest subscription its transaction saw.",
    "delivery": "One event on its way to one subscription. `due_us`: when it may be handed out, or its lease ends. `PASSED` marks, for the time of catching up, "
    "what had ended before the subscription was there.",
    "lane": "Weight and pause of a queue in a namespace, where somebody has set them.",
    "gate": "Pauses and rates that somebody has set before a queue, a handler or a permit key of a namespace: who paused it and why; how many may start in a "
    "time and what is in the bucket. A row goes when nothing is set of it.",
    "quota": "What may come in from outside: of a queue of a namespace, or of the namespace (`queue` is empty).",
    "acceptance": "Tasks that were accepted under a quota with a window, until no window counts them any more.",
    "intent": "Calls that handlers make by `ctx.external`: by the first task (`root`), name and key; `OPEN` until it is known whether the call happened, then `DONE` with its "
    "outcome, or `NOT_DONE`. `opening` tells one call from the next; `task`, `fence`: the attempt that began the newest. Goes with the last task of its root.",
    "handler": "What workers told of the handlers they serve, a row for each version: queue, effects, policy, permit and the parameters with their JSON Schemas. "
    "Whoever submits by name is checked against it.",
    "schedule": "Schedules: state, present version, the instant that fires next (`next_us`) and when the sweep looks (`due_us`), the newest one that is behind, counters.",
    "schedule_version": "What each version of a schedule says; never changed.",
    "fire": "Fires: one row each with its task, or one for many in a row that were not run. The primary key is a fire's identity; `unsettled` is set while its task may not "
    "be over. Kept for 30 days.",
    "operation": "Acts on tasks that a person or program asked for: retries by hand, and acts on many with how far they are (`after_us`, `after_id`, `seen`, `done`).",
    "retention": "How long settled tasks are kept, where it is not 30 days: for all, a queue or a handler, of one namespace or of all.",
}
CAUSES: Mapping[str, str] = {
    "operator": "user code raised",
    "record": "a record could not be decoded and the source's policy is `fail`",
    "source": "a source lost or cannot reach what it reads",
    "target": "a sink's database could not be reached, or stayed busy, for as long as the sink tries",
    "channel": "a data channel was lost, or an envelope is missing",
    "codec": "a value or envelope cannot be encoded or decoded",
    "storage": "checkpoint storage",
    "error": "any other exception: a target that refused (SinkError), a defect in a connector of your own",
    "fenced": "the subtask met a newer generation",
    "died": "the subtask's process ended without a word (kill -9, out of memory)",
    "silent": "the process did not answer its node",
    "node": "the node's lease expired",
    "start": "not READY within `start_limit_ms`, or the process could not be started",
    "stall": "no progress within `alignment_ms` (stall budget)",
    "aborts": "more than `max_aborts` epochs in a row were aborted",
    "handback": "a worker that shut down handed its subtasks back",
    "fingerprint": "the node's code gives another plan than was submitted",
    "factory": "the node has no pipeline of that name, or its module cannot be imported",
    "invalid": "the node cannot give what the job requires",
    "restore": "the snapshot does not fit the job",
    "unreadable": "a manifest or segment is missing or damaged",
}

TASK_EVENTS: Mapping[str, str] = {
    "task-received": "an attempt of a subtask starts on the node; `uuid` is the attempt's id, `name` is `millstream.subtask`, `args` are job, subtask, generation",
    "task-started": "the same moment",
    "task-succeeded": "the subtask finished",
    "task-revoked": "its generation is over: the subtask was ended",
    "task-failed": "the attempt failed; `exception` is the cause in words, 500 characters at most",
}
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
PACKAGES = ("app", "coordinator", "flower", "schema", "tasks")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)]) + "\n"


def _fields(struct: Any, texts: Mapping[str, tuple[str, str]]) -> str:
    """Every field of a Struct: a KeyError here means that a setting has no text yet."""
    defaults = {name: getattr(struct(), name) for name in struct.__struct_fields__}
    assert set(texts) == set(defaults), f"{struct.__name__}: {set(texts) ^ set(defaults)}"
    return table(
        ("field", "unit", "default", "meaning and reason"),
        [(f"`{name}`", texts[name][0], _default(value), texts[name][1] + ".") for name, value in defaults.items()],
    )


def _default(value: object) -> str:
    if isinstance(value, RestartPolicy):
        return "`RestartPolicy()`"
    if value == "":
        return "empty"
    return "none" if value is None else f"`{value.value if isinstance(value, StrEnum) else value}`"


def installation() -> str:
    assert set(INSTALLATION) == set(Installation.model_fields)
    rows = []
    for name, field in Installation.model_fields.items():
        bounds = " ".join(
            f"{word} {getattr(m, attribute)}"
            for m in field.metadata
            for word, attribute in (("≥", "ge"), ("≤", "le"))
            if hasattr(m, attribute)
        )
        default = "required" if field.is_required() else f"`{field.default}`" if field.default != "" else "empty"
        rows.append((f"`{name}`", f"`{VARIABLES[name]}`", INSTALLATION[name][0], default, bounds, INSTALLATION[name][1] + "."))
    return table(("field", "variable", "unit", "default", "bounds", "meaning and reason"), rows)


def _transitions(states: Mapping[Any, frozenset[Any]]) -> str:
    order = list(states)
    return table(("from", "to"), [(f"`{s}`", ", ".join(f"`{t}`" for t in order if t in states[s]) or "(none: an end)") for s in order])


def capabilities() -> str:
    rows = []
    for guarantee in Guarantee:
        sources = ", ".join(f"`{c}`" for c in SourceCapability if c in SOURCE_OK[guarantee])
        sinks = ", ".join(f"`{c}`" for c in SinkCapability if c in SINK_OK[guarantee])
        rows.append((f"`{guarantee}`", sources, sinks))
    return table(("guarantee", "sources it takes", "sinks it takes"), rows)


def metrics() -> str:
    rows = [
        ("`millstream_jobs_truncated`", "gauge", "", "Jobs left out of this scrape"),
        ("`millstream_job_state`", "gauge", "job, state, guarantee", "1 for the state the job is in"),
        ("`millstream_job_restarts_total`", "counter", "job, cause", "Restarts by cause"),
        ("`millstream_epoch_duration_seconds`", "gauge", "job", "Trigger to durable of the newest durable epoch"),
        ("`millstream_epoch_size_bytes`", "gauge", "job", "Size of the newest durable epoch"),
        ("`millstream_epoch_alignment_seconds`", "gauge", "job", ALIGNMENT),
    ]
    rows += [(f"`millstream_job_{name}`", "gauge", "job", text) for name, text in JOB_GAUGES.items()]
    rows += [(f"`millstream_subtask_{name}_total`", "counter", "job, subtask", text) for name, text in SUBTASK_COUNTERS.items()]
    rows += [(f"`millstream_subtask_{name}`", "gauge", "job, subtask", text) for name, text in SUBTASK_GAUGES.items()]
    rows += [
        ("`millstream_channel_depth`", "gauge", "job, channel", "Envelopes sent and not yet processed"),
        ("`millstream_channel_credit`", "gauge", "job, channel", "Envelopes that may be sent"),
    ]
    rows += [(f"`millstream_node_{name}_total`", "counter", "node", text) for name, text in NODE_COUNTERS.items()]
    rows += [
        ("`millstream_schedule_state`", "gauge", "schedule, state", "1 for the state the schedule is in"),
        ("`millstream_schedule_behind_seconds`", "gauge", "schedule", BEHIND),
        ("`millstream_schedule_in_review`", "gauge", "schedule", IN_REVIEW),
    ]
    rows += [(f"`millstream_schedule_{name}_total`", "counter", "schedule", text) for name, text in SCHEDULE_COUNTERS.items()]
    return table(("metric", "kind", "labels", "what"), rows)


def log_events() -> str:
    """Every event that the product logs, from its calls. A text is fixed; what varies stands in fields."""
    rows: dict[tuple[str, str, str], set[str]] = {}
    for path, call, method in _calls(LEVELS):
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "log"):
            continue
        text = call.args[0]
        if isinstance(text, ast.Constant):
            event = f"`{text.value!s}`"
        else:
            assert ast.unparse(text) == "str(exc)", f"{path}:{call.lineno}: the text of an event must be a literal"
            event = "(the text of the error that ended the process)"
        fields = {k.arg or "**" for k in call.keywords} - {"exc_info"}
        level = "error" if method == "exception" else method
        rows.setdefault((event, level, _module(path)), set()).update(fields)
    listed = [(event, level, f"`{module}`", ", ".join(sorted(fields))) for (event, level, module), fields in rows.items()]
    return table(("event", "level", "from", "fields"), sorted(listed, key=lambda r: (r[2], r[0], r[1])))


def task_events() -> str:
    """Every task event that nodes send for Flower and ``celery events``."""
    rows = []
    for _, call, _ in _calls(frozenset({"send"})):
        if call.args and isinstance(call.args[0], ast.Constant) and str(call.args[0].value).startswith("task-"):
            event = str(call.args[0].value)
            rows.append((f"`{event}`", TASK_EVENTS[event], ", ".join(k.arg or "**" for k in call.keywords)))
    assert {r[0].strip("`") for r in rows} == set(TASK_EVENTS)
    return table(("event", "sent when", "fields"), rows)


def _calls(methods: frozenset[str]) -> Iterator[tuple[Path, Any, str]]:
    """Calls of methods with these names in the product's code."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                    yield path, node, node.func.attr


def _module(path: Path) -> str:
    """``app/millstream/dev.py`` as ``millstream.dev``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def causes() -> str:
    assert set(CAUSES) >= PERMANENT | FREE

    def effect(cause: str) -> str:
        return "fails the job at once" if cause in PERMANENT else "restart, costs nothing" if cause in FREE else "restart"

    return table(("cause", "meaning", "what follows"), [(f"`{c}`", text, effect(c)) for c, text in CAUSES.items()])


def error_tree() -> str:
    tree = (errors.__doc__ or "").partition("::\n\n")[2]
    named = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.MillstreamError)}
    missing = {name for name in named if not re.search(rf"\b{name}\b", tree)}
    assert not missing, f"the tree in errors.py lacks {missing}"
    return "```text\n" + "\n".join(line.removeprefix("    ") for line in tree.rstrip().splitlines()) + "\n```\n"


def sql_tables() -> str:
    found = tables("millstream_")
    parts = [f"Schema version {SCHEMA_VERSION}.\n"]
    assert {t.name.removeprefix("millstream_") for t in found.metadata.tables.values()} == set(TABLES)
    for name, text in TABLES.items():
        columns = getattr(found, name).columns
        listed = ", ".join(f"**{c.name}**" if c.primary_key else c.name for c in columns)
        parts.append(f"### millstream_{name}\n\n{text}\n\n{listed}\n")
    return "\n".join(parts)


def commands() -> str:
    """Every command with its arguments and options, as the parser knows them."""
    root = typer.main.get_command(program)
    parts = ["### millstream\n\n" + _parameters(root)]
    for path, command in _walk(root, "millstream"):
        parts.append(f"### {path}\n\n{(command.help or '').strip()}\n\n{_parameters(command)}")
    return "\n".join(parts)


def _walk(group: Any, path: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, command in group.commands.items():
        found += _walk(command, f"{path} {name}") if hasattr(command, "commands") else [(f"{path} {name}", command)]
    return found


def _parameters(command: Any) -> str:
    rows = []
    for p in command.params:
        if p.name in ("help", "install_completion", "show_completion"):
            continue
        if p.param_type_name == "argument":
            rows.append((f"`{p.name.upper()}`" + ("" if p.required else " (optional)"), (getattr(p, "help", "") or "").strip()))
        else:
            variable = f" (`{p.envvar}`)" if p.envvar else ""
            rows.append((f"`{' '.join(p.opts)}`", (p.help or "").strip() + variable))
    return table(("argument or option", "what"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "StreamSettings": lambda: _fields(StreamSettings, SETTINGS),
    "RestartPolicy": lambda: _fields(RestartPolicy, RESTART),
    "EdgeConfig": lambda: _fields(EdgeConfig, EDGE),
    "Installation": installation,
    "job states": lambda: _transitions(JOB_TRANSITIONS),
    "epoch states": lambda: _transitions(EPOCH_TRANSITIONS),
    "assignment states": lambda: _transitions(ASSIGNMENT_TRANSITIONS),
    "schedule states": lambda: _transitions(SCHEDULE_TRANSITIONS),
    "fire states": lambda: _transitions(FIRE_TRANSITIONS),
    "capabilities": capabilities,
    "metrics": metrics,
    "log events": log_events,
    "task events": task_events,
    "causes": causes,
    "errors": error_tree,
    "tables": sql_tables,
    "commands": commands,
}


def documents() -> list[Path]:
    """Every Markdown file of the documentation."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    """A document with its generated parts as the code has them now."""

    def part(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        body = f"```python\n{(ROOT / name).read_text()}```\n" if kind == "include" else PARTS[name]()
        return f"{start}\n{body}\n{end}"

    return PART.sub(part, text)


def main(arguments: Sequence[str]) -> int:
    stale = [path for path in documents() if rendered(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{'differs' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.write_text(rendered(path.read_text()))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
