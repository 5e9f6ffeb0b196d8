"""What a claim may let through: pauses, token buckets and permits, as pure functions of rows and the database's time.

A gate stands before a queue, a handler or a permit key of one namespace, where somebody has set one: it may be paused, and it may let only so many pass in a time. Called by the
statements that claim, under the locks of the gates and permits concerned. What must never happen here: a clock, SQL; more let through than a permit's room or a bucket's tokens.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence

import msgspec

from .. import given
from ..errors import ConfigurationError
from .records import PermitRow, TaskRow

STAYS = "*"
"""For a blocker: the task is not parked, because nobody asks for its whole lane."""


class GateKind(enum.StrEnum):
    """Before what a gate stands."""

    QUEUE = "queue"
    HANDLER = "handler"
    PERMIT = "permit"


BITS = {GateKind.QUEUE: 1, GateKind.HANDLER: 2, GateKind.PERMIT: 4}
"""How a task remembers of which gates it has tokens."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate. ``rate`` may pass in ``per_us``, up to ``burst`` of them at once; 0: as many as come.

    ``level`` is what is in the bucket at ``level_us``, in units of which one start takes ``per_us``, so that whole numbers are exact. ``wake_us``: when to look again at what waits
    for a token; None: nothing does.
    """

    id: str
    namespace: str
    kind: GateKind
    name: str
    paused: int = 0
    paused_by: str = ""
    paused_why: str = ""
    paused_us: int = 0
    rate: int = 0
    per_us: int = 0
    burst: int = 0
    level: int = 0
    level_us: int = 0
    wake_us: int | None = None
    changed_by: str = ""
    changed_us: int = 0
    rev: int = 0

    @property
    def limits(self) -> bool:
        """Whether starts are counted."""
        return self.rate > 0


def gate_id(kind: GateKind, namespace: str, name: str) -> str:
    """Gates of two namespaces never meet."""
    return f"{kind.value}:{namespace}/{name}"


def gates_of(task: TaskRow) -> dict[GateKind, str]:
    """Ids of the gates a task would have to pass, if they were there."""
    found = {
        GateKind.QUEUE: gate_id(GateKind.QUEUE, task.namespace, task.queue),
        GateKind.HANDLER: gate_id(GateKind.HANDLER, task.namespace, task.handler),
    }
    return found | ({GateKind.PERMIT: gate_id(GateKind.PERMIT, task.namespace, task.permit)} if task.permit else {})


PERIODS = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
"""Units of a rate's time, in µs."""
_RATE = re.compile(r"([1-9][0-9]{0,5})/([smh])\Z")


def rate_of(text: str) -> tuple[int, int]:
    """``"100/m"`` as 100 and a minute's µs. Raises ConfigurationError."""
    found = _RATE.match(text) if isinstance(text, str) else None
    if not found:
        raise ConfigurationError(f"rate {given.shown(text)} must be a whole number per second, minute or hour, e.g. 10/s, 100/m or 5/h")
    return int(found[1]), PERIODS[found[2]]


def rate_text(gate: Gate) -> str:
    """The other way round; empty: no rate."""
    unit = next((u for u, us in PERIODS.items() if us == gate.per_us), "")
    return f"{gate.rate}/{unit}" if gate.limits else ""


# -- the bucket


def filled(gate: Gate, now: int) -> Gate:
    """With the tokens that have come in since. A clock that was set back gives none and takes none."""
    gained = max(0, now - gate.level_us) * gate.rate
    return msgspec.structs.replace(gate, level=min(gate.burst * gate.per_us, gate.level + gained), level_us=max(now, gate.level_us))


def tokens(gate: Gate) -> int:
    """How many may pass, as it is filled."""
    return gate.level // gate.per_us


def less(gate: Gate, count: int) -> Gate:
    """After so many have passed."""
    return msgspec.structs.replace(gate, level=gate.level - count * gate.per_us)


def given_back(gate: Gate, taken_us: int) -> Gate:
    """With a token of a task that never started, taken then.

    Less what has come in since: that may have filled a place that was empty only because the token was out, and then it has been replaced. With both, more could start in a short
    time than the bucket ever holds.
    """
    left = max(0, gate.per_us - max(0, gate.level_us - taken_us) * gate.rate)
    return msgspec.structs.replace(gate, level=min(gate.burst * gate.per_us, gate.level + left))


def available_us(gate: Gate, count: int = 1) -> int:
    """When so many tokens are there, if none is taken; for more than it ever holds, when the next one would have come."""
    missing = count * gate.per_us - gate.level
    if count > gate.burst:
        missing = gate.per_us
    return gate.level_us + max(0, -(-missing // gate.rate))


def rated(gate: Gate, rate: int, per_us: int, burst: int, now: int) -> Gate:
    """With another rate. A bucket that had none is full; what waits is looked at at once."""
    if not rate:
        return msgspec.structs.replace(gate, rate=0, per_us=0, burst=0, level=0, level_us=now, wake_us=None)
    had = tokens(filled(gate, now)) if gate.limits else burst
    return msgspec.structs.replace(gate, rate=rate, per_us=per_us, burst=burst, level=min(had, burst) * per_us, level_us=now, wake_us=now)


# -- who may pass


class Verdict(msgspec.Struct):
    """What becomes of the tasks a claim has locked. ``granted``: in order, with their gates' bits; ``parked``: task → under what; ``passed``: left where they are."""

    granted: list[tuple[TaskRow, int]] = msgspec.field(default_factory=list)
    parked: dict[str, str] = msgspec.field(default_factory=dict)
    passed: list[str] = msgspec.field(default_factory=list)


def permit_blocker(permit: str) -> str:
    """Under what tasks are parked that wait for a permit."""
    return f"permit:{permit}"


def pause_blocker(gate: str) -> str:
    """Under what tasks are parked that a pause keeps."""
    return f"pause:{gate}"


def rate_blocker(gate: str) -> str:
    """Under what tasks are parked that wait for a token."""
    return f"rate:{gate}"


class Gatekeeper:
    """Decides one task after the other, best rank first, and counts on.

    ``gates`` are filled and locked, ``permits`` locked; ``lines``: who is first in line of a permit that keeps an order.
    """

    def __init__(self, gates: Mapping[str, Gate], permits: Mapping[str, PermitRow], lines: Mapping[str, Sequence[str]]) -> None:
        self.gates = dict(gates)
        self._permits = permits
        self.room = {p.id: p.capacity - p.held for p in permits.values()}
        self._lines = {permit: list(line) for permit, line in lines.items()}
        self.verdict = Verdict()

    def judge(self, tasks: Sequence[TaskRow]) -> Verdict:
        """All of them."""
        for task in sorted(tasks, key=lambda t: (t.rank, t.id)):
            self._judge(task)
        return self.verdict

    def _judge(self, task: TaskRow) -> None:
        gates = {kind: self.gates[found] for kind, found in gates_of(task).items() if found in self.gates}
        if task.permit and task.permit_id not in self._permits:
            self.verdict.passed.append(task.id)  # somebody else decides about that permit just now
            return
        blocker = self._paused(task, gates) or self._without_permit(task) or self._without_token(gates)
        if blocker == "":
            self._grant(task, gates)
        elif blocker == STAYS:
            self.verdict.passed.append(task.id)
        else:
            self.verdict.parked[task.id] = blocker

    @staticmethod
    def _paused(task: TaskRow, gates: Mapping[GateKind, Gate]) -> str:
        paused = [kind for kind, gate in gates.items() if gate.paused]
        if GateKind.QUEUE in paused:
            return STAYS  # the whole lane waits where it is: no claim asks for it
        if GateKind.HANDLER in paused:
            return pause_blocker(gates[GateKind.HANDLER].id)
        if GateKind.PERMIT in paused:
            # Who holds it already is not in its line.
            return pause_blocker(gates[GateKind.PERMIT].id) if task.permit_held else permit_blocker(task.permit_id)
        return ""

    def _without_permit(self, task: TaskRow) -> str:
        if not task.permit or task.permit_held:
            return ""
        in_turn = not task.ordered or self._lines.get(task.permit_id, [])[:1] == [task.id]
        if in_turn and self.room[task.permit_id] > 0 and not self._permits[task.permit_id].paused:
            return ""
        return permit_blocker(task.permit_id)

    @staticmethod
    def _without_token(gates: Mapping[GateKind, Gate]) -> str:
        dry = [kind for kind, gate in gates.items() if gate.limits and not tokens(gate)]
        if GateKind.QUEUE in dry:
            return STAYS
        return rate_blocker(gates[dry[0]].id) if dry else ""

    def _grant(self, task: TaskRow, gates: Mapping[GateKind, Gate]) -> None:
        bits = 0
        for kind, gate in gates.items():
            if gate.limits:
                self.gates[gate.id] = less(gate, 1)
                bits |= BITS[kind]
        if task.permit and not task.permit_held:
            self.room[task.permit_id] -= 1
            if task.ordered:
                self._lines[task.permit_id].pop(0)
        self.verdict.granted.append((task, bits))
