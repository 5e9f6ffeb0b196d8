"""Handlers that call the outside in the simulated world, through the product's own pipe, and the outside itself, which counts what really happened.

Used by :mod:`.task_simulation`. What must never happen here: an effect that is not counted; a process that is dead and writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.outcomes import Raised, Reported
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.requests import HandlerSpec, encode_arguments
from millstream_schema.ports import Ids
from millstream_schema.store.database import Database
from millstream_tasks.durable.answers import Answer, Done, Intent, NotDone, OutcomeUnknown
from millstream_tasks.durable.context import TaskContext
from millstream_tasks.durable.databases import HandlerDatabases
from millstream_tasks.durable.execution import execute
from millstream_tasks.durable.handlers import Handler, HandlerRegistry
from millstream_tasks.durable.progress import Telling
from millstream_tasks.durable.surroundings import Surroundings

from .world import Crash, SimClock, World

CALLS = ("charge", "mail")
"""What such a handler calls, in this order."""


class Calls(msgspec.Struct, frozen=True):
    """How the outside treats one handler's calls. ``hook``: none, ``truthful`` or ``unsure``.

    Probabilities: ``refuses``: it says that it did not happen; ``silent``: no answer, before or after the effect; ``dies``: the process that calls, before or after it.
    """

    refuses: float = 0.1
    silent: float = 0.1
    dies: float = 0.1
    hook: str = ""


class Outside:
    """``effects``: what happened, by idempotency key. It does not look for repeats, so that each is seen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.effects: dict[str, list[int]] = defaultdict(list)
        self._flying: dict[str, set[int]] = defaultdict(set)
        self._serial = 0

    def call(self, key: str, how: Calls, dies: Callable[[], None]) -> int:
        """One call, on its way for a while. Raises what its caller gets to see."""
        w = self._world
        self._serial += 1
        serial = self._serial
        self._flying[key].add(serial)
        w.stumble("before a call arrives", 40.0)
        if w.rng.random() < how.refuses:
            w.probes["call refused"] += 1
            raise NotDone("refused")
        if w.rng.random() < how.dies / 2:
            dies()
        silent = w.rng.random() < how.silent
        if serial not in self._flying[key] or (silent and w.rng.random() < 0.5):
            raise TimeoutError("nothing came back")  # it never arrived
        self._flying[key].discard(serial)
        self.effects[key].append(serial)
        w.stumble("before a call's answer", 40.0)
        if w.rng.random() < how.dies / 2:
            dies()
        if silent:
            raise TimeoutError("its answer was lost")
        return serial

    def reconcile(self, intent: Intent, how: Calls) -> Answer:
        """What it says of a call. Not done, it can never arrive any more."""
        self._world.probes[f"reconcile: {how.hook}"] += 1
        if how.hook == "unsure" or self._world.rng.random() < 0.1:
            return OutcomeUnknown("it does not answer")
        happened = self.effects[intent.idempotency_key]
        if happened:
            return Done(happened[0])
        self._flying[intent.idempotency_key].clear()
        return NotDone()


class _Store(HandlerDatabases):
    """The simulated store, as one process reaches it: dead, it does not."""

    def __init__(self, process: CallingProcess, database: Database) -> None:
        super().__init__("sqlite://", "", 0, database.clock, {})
        self._process = process
        self._database = database

    def short(self) -> Database:
        self._process.reach()
        return self._database


class CallingProcess:
    """The process that runs one attempt; an actor. ``dead``: nothing of it goes on."""

    def __init__(
        self,
        world: World,
        outside: Outside,
        database: Database,
        ids: Ids,
        alive: Callable[[], bool],
        known: Callable[[IntentId, KnownCall | None], None],
    ) -> None:
        self._world = world
        self._outside = outside
        self._database = database
        self._ids = ids
        self._alive = alive
        self._known = known
        self.dead = False

    def run(self, task: TaskRow, how: Calls) -> Reported | None:
        """The attempt, to its end; None: the process died of it."""
        registry = HandlerRegistry()
        hook = (lambda intent: self._outside.reconcile(intent, how)) if how.hook else None
        registry.add(Handler(lambda ctx: self._handle(ctx, how), HandlerSpec(name=task.handler), reconcile=hook))
        around = Surroundings(
            ids=self._ids, clock=SimClock(self._world), told=lambda: False, databases=_Store(self, self._database), committed=lambda: None, wait=self._wait,
            telling=Telling(SimClock(self._world), lambda _: None), raised=lambda _: None, known=self._tell,
        )  # fmt: skip
        attempt = msgspec.structs.replace(task, args=encode_arguments((), {}))
        outcome: Reported = self._world.act(self, lambda: execute(attempt, registry, around))[0]
        died = self.dead or (isinstance(outcome, Raised) and outcome.error == Crash.__name__)
        return None if died else outcome

    def _handle(self, ctx: TaskContext, how: Calls) -> list[Any]:
        return [ctx.external(name, lambda key: self._outside.call(key, how, self._die)) for name in CALLS]

    def nap(self, where: str) -> None:
        """Stand still; killed meanwhile, or going on as a zombie."""
        self._world.nap(self._world.rng.random() * 8)
        if not self._alive():
            self._world.probes[f"calling zombie: {where}"] += 1
            if self._world.rng.random() < 0.5:
                self._die()

    def _die(self) -> None:
        self.dead = True
        raise Crash

    def _tell(self, intent: IntentId, call: KnownCall | None) -> None:
        """Its worker hears what a call came to, while both are there."""
        self.reach()
        self._known(intent, call)

    def _wait(self, seconds: float) -> None:
        self.reach()
        if seconds:
            self._world.nap(seconds)

    def reach(self) -> None:
        """Raises Crash, once it is dead."""
        if self.dead:
            raise Crash
