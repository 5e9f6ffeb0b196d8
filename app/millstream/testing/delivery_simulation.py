"""Subscriptions in a simulated world of workers and tasks: the sweep, consumers that die between doing and saying so, a broker that loses what it carries.

Beside :mod:`task_simulation`, on the same world and store. What must never happen here: a record of what a consumer did that the product could see.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from typing import Any

from millstream_coordinator.delivery_sweep import DeliverySweep, Message
from millstream_schema.durable.deliveries import Mode
from millstream_schema.errors import DeliveryNotFound, StoreError, SubscriptionNotFound

from ..inbox import Inbox
from ..installation import Installation
from ..subscriptions import Delivery, Subscriptions
from .task_simulation import TaskSimulation
from .world import Crash, SimChance, SimClock

LEASE = 2.0


class SimBroker:
    """Carries messages, with the faults of hints: lost, twice, late; can be away. What it does not take it gives back, or forgets with the process that sent it."""

    def __init__(self, sim: TaskSimulation) -> None:
        self._sim = sim
        self._back: list[Message] = []
        self.waiting: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        """Queue → what is in it."""

    def room(self) -> int:
        return 50 if self._sim.world.reachable("broker") else 0

    def publish(self, messages: list[Message]) -> None:
        w = self._sim.world
        for message in messages:
            if w.strikes(w.faults.hint, "message not taken"):
                self._back.append(message)
                continue
            copies = 0 if w.strikes(w.faults.hint, "message lost") else 2 if w.strikes(w.faults.hint, "message twice") else 1
            for _ in range(copies):
                delay = w.rng.random() * (8 if w.strikes(w.faults.hint, "message late") else 0.1)
                body = json.loads(json.dumps(message.body))
                w.at(delay, lambda q=message.target, body=body: self.waiting[q].append(body))  # type: ignore[misc]

    def unsent(self) -> list[Message]:
        back, self._back = self._back, []
        return back

    def flush(self) -> None:
        """FLUSHALL."""
        self._sim.world.probes["broker flushed"] += any(self.waiting.values())
        self.waiting.clear()


class SimDeliverer:
    """A coordinator's sweep over deliveries; started again after a crash."""

    def __init__(self, sim: TaskSimulation, broker: SimBroker) -> None:
        self.sim = sim
        self._broker = broker
        self.paused = False
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        sweep = self.sweep = DeliverySweep(sim.database, SimClock(sim.world), SimChance(sim.world), sim.ids, self._broker)
        sim.world.at(sim.world.rng.random(), lambda: self._step(sweep))

    def nap(self, where: str) -> None:
        self.paused = True
        self.sim.world.nap(self.sim.world.rng.random() * 4)
        self.paused = False

    def _step(self, sweep: DeliverySweep) -> None:
        w = self.sim.world
        if sweep is not self.sweep:
            return
        if not self.paused:
            try:
                w.act(self, sweep.sweep)
            except StoreError:
                w.probes["delivery sweep met an outage"] += 1
            except Crash:
                w.at(0.5 + w.rng.random() * 2, self._boot)
                return
            assert sweep.set_aside == 0, "the sweep set something aside: see its log"
        w.at(0.4, lambda: self._step(sweep))


class SimConsumer:
    """A consumer with a database of its own: an inbox, and the effects. Dies between any two steps; another process of it goes on."""

    def __init__(self, sim: TaskSimulation, client: Subscriptions, name: str, broker: SimBroker) -> None:
        self.sim = sim
        self.name = name
        self.effects: Counter[str] = Counter()
        """Task → how often its end has had effects."""
        self.said: dict[str, tuple[str, Any]] = {}
        """Task → the end it was told."""
        self._client = client
        self._broker = broker
        self._database = sqlite3.connect(":memory:")
        self._inbox = Inbox()
        self._inbox.create(self._database)
        self._database.execute("CREATE TABLE effect (event TEXT)")
        self._database.commit()
        sim.world.at(sim.world.rng.random(), self._step)

    def nap(self, where: str) -> None:
        """It stands still past its lease; what it has in its hands comes to others meanwhile."""
        self.sim.world.nap(self.sim.world.rng.random() * 2 * LEASE)

    def _step(self) -> None:
        w = self.sim.world
        pause = 0.3
        try:
            w.act(self, self._consume)
        except (StoreError, SubscriptionNotFound, DeliveryNotFound):
            pause = 0.5
        except Crash:
            self._database.rollback()
            w.probes["consumer died"] += 1
            pause = 0.5 + w.rng.random()
        w.at(pause, self._step)

    def _consume(self) -> None:
        """What is there, by pulling or from the broker."""
        if self._client.get(self.name).mode is Mode.PULL:
            for delivery in self._client.pull(self.name, 5):
                self._one(delivery)
            return
        mine = self._broker.waiting[self.name]
        while mine:
            try:
                self._one(self._client.received(mine.pop(0)))
            except DeliveryNotFound:
                self.sim.world.probes["an old message passed over"] += 1

    def _one(self, delivery: Delivery) -> None:
        w = self.sim.world
        if w.strikes(w.faults.store * 4, "delivery refused"):
            self._client.refuse(delivery, "not now")
            return
        self._dies("consumer died before it did anything")
        if self._inbox.accept(self._database, delivery):
            self._database.execute("INSERT INTO effect VALUES (?)", (delivery.event,))
            self._dies("consumer died before its commit")
            self._database.commit()
            self.effects[delivery.event] += 1
            self.said[delivery.event] = (delivery.state.value, delivery.value)
        else:
            self._database.rollback()
            w.probes["a repeat recognised"] += 1
        self._dies("consumer died before it acknowledged")
        w.stumble("before it acknowledges", 5)
        self._client.acknowledge(delivery)

    def _dies(self, when: str) -> None:
        w = self.sim.world
        if w.strikes(w.faults.store * 5, when):
            raise Crash


class DeliverySimulation:
    """Subscriptions of each kind, made while tasks end, each with consumers. ``made``: when each was committed, simulated seconds."""

    def __init__(self, sim: TaskSimulation) -> None:
        self.sim = sim
        self.broker = SimBroker(sim)
        self.deliverers = [SimDeliverer(sim, self.broker) for _ in range(2)]
        self.client = Subscriptions(
            Installation(database="sqlite://", transport="unix://", checkpoints="file:///"),
            database=sim.database,
            ids=sim.ids,
            chance=SimChance(sim.world),
        )
        self.consumers: dict[str, SimConsumer] = {}
        self.made: dict[str, float] = {}
        sim.world.at(2.0, self._trouble)

    def nap(self, where: str) -> None:
        self.sim.world.nap(self.sim.world.rng.random())

    def subscribe(self, name: str, **definition: Any) -> None:
        """Somebody asks for it until it is there. One that is published has a queue of its name."""
        w = self.sim.world
        try:
            w.act(self, lambda: self.client.create(name, lease=LEASE, delay=0.2, max_delay=2.0, attempts=1000, **definition))
        except (StoreError, Crash):
            w.at(0.2, lambda: self.subscribe(name, **definition))
            return
        self.made[name] = w.now
        self.consumers[name] = SimConsumer(self.sim, self.client, name, self.broker)

    def _trouble(self) -> None:
        w = self.sim.world
        if w.strikes(w.faults.hint, "flush"):
            self.broker.flush()
        if w.reachable("broker") and w.strikes(w.faults.away, "away: broker"):
            w.away["broker"] = w.now + w.rng.random() * 5
        if w.now < w.faults.until:
            w.at(1.0, self._trouble)
