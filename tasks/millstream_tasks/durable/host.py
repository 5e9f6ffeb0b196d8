"""A worker session's step machine for durable tasks: lease, claims, starts, ends.

Driven by a shell (the process beside a Celery worker, a thread in embedded mode, the simulator). Rows are the truth: wake-ups only make it look sooner. What must never happen
here: an attempt begun or kept past the lease; an end that is dropped before the database has answered for it; a wait on user code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection

import msgspec
import structlog

from millstream_schema.durable.catalogue import HandlerEntry, Served
from millstream_schema.durable.decisions import careful
from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.outcomes import Committed, Killed, Reported, Unfit, Unstarted
from millstream_schema.durable.progress import Told
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.errors import CommitUnknown, StoreError, StoreUnavailable
from millstream_schema.ports import Chance, Clock, Ids
from millstream_schema.store import catalogue, claims, progress, registry, settling
from millstream_schema.store.claims import Claimed
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.settling import Answer, Settlement

from .floors import Floors
from .kept_calls import KeptCalls
from .pool import Pool
from .progress import Gathered
from .shares import Fairness
from .texts import text_of

log = structlog.get_logger(__name__)
SETTLED_AT_ONCE = 200
LANES_FOR = 1.0
"""Seconds for which the picture of lanes and their load is good enough to share by."""
LANES_KEPT, LANES_TRIED = 600.0, 16
"""Seconds and number of lanes that are tried although they held nothing when they were last looked at: a wake-up need not wait for the next look."""
FIRST_PAUSE = 0.05
PREFETCH_SECONDS = 0.1
"""What is held beyond the free slots is expected to begin within so long."""
HANDED_SECONDS = 0.01
"""What is handed over to a slot that is taken is expected to begin within so long."""
BEHIND_SLOW = 1.0
"""Seconds a claimed task waits for a slot before it goes back."""
TYPICAL_PART = 0.05
"""Weight of the newest attempt in what is taken for a typical one."""
LATE_KEPT = 1_000
"""Ends of fenced attempts that are still waited for, as evidence."""
AGAIN = 0.2
"""Seconds after which what the database refused is tried again."""
ASIDE = 5.0
"""Seconds after which an end that it refuses in whatever form is tried again."""


class HostSettings(msgspec.Struct, frozen=True):
    """``slots``: of the pool. ``prefetch``: short tasks held beyond the free slots, at most. ``settle_ms``: how long an end waits for others to be written with.
    ``poll_ms``: longest pause between looks. ``told``: what this worker tells of its handlers, for those who submit by name."""

    name: str
    queues: tuple[str, ...]
    handlers: tuple[str, ...]
    slots: int = 1
    lease_ms: int = 10_000
    margin_ms: int = 1_000
    renew_ms: int = 3_000
    poll_ms: int = 1_000
    prefetch: int = 0
    settle_ms: int = 5
    told: tuple[HandlerEntry, ...] = ()


class _Held(msgspec.Struct):
    """One attempt this session holds."""

    row: TaskRow
    since: float
    began: bool = False
    killed: bool = False
    told: bool = False


class TaskHost:
    """One worker session at a time; a new one after each lost lease. ``counted``: what else its process counts; shown in the session's row with each renewal, for metrics.
    ``settled``: told of tasks whose ends are written."""

    def __init__(
        self,
        database: Database,
        pool: Pool,
        clock: Clock,
        ids: Ids,
        chance: Chance,
        settings: HostSettings,
        counted: Callable[[], dict[str, int]] = dict,
        settled: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        self._settled = settled
        self._counted = counted
        self._db = database
        self._pool = pool
        self._clock = clock
        self._ids = ids
        self._chance = chance
        self._settings = settings
        self.session = ""
        self.draining = False
        self._marked = ""  # the session whose row says that it drains
        self.answers: dict[Answer, int] = dict.fromkeys(Answer, 0)
        self._deadline = 0.0
        self._renew_at = 0.0
        self._look_at = 0.0
        self._pause = FIRST_PAUSE
        self._more = False
        self._one_by_one = False
        self._alone = False  # the last claim failed: ends are written without it
        self._typical = PREFETCH_SECONDS
        self._begun_at = 0.0
        self._held: dict[str, _Held] = {}
        self._buffer: deque[str] = deque()
        self._late: dict[tuple[str, int], str] = {}
        self._reports: deque[tuple[str, int, Reported, tuple[NewTask, ...], float]] = deque()
        self._unsettled: list[Settlement] = []
        self._settle_at = 0.0
        self._aside: list[Settlement] = []
        self._aside_until = 0.0
        self._claim = ""
        self._claim_token = ""
        self._lanes: dict[str, float] = {}
        self._fairness = Fairness()
        self._lanes_until = 0.0
        self._floors = Floors()
        self._said = Gathered()
        self._calls = KeptCalls()

    # -- handed in from other threads ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be work. Thread-safe."""
        self._look_at = 0.0

    def ended(self, task: str, fence: int, outcome: Reported, submits: tuple[NewTask, ...] = (), seconds: float = 0.0) -> None:
        """An attempt is over that ran for so long. Thread-safe; written by the next step."""
        self._reports.append((task, fence, outcome, submits, seconds))

    def back(self, task: str, fence: int) -> None:
        """The pool was handed this attempt, and gives it back before it has begun: the first of what waits. From this host's own thread, while it calls the pool."""
        held = self._held.get(task)
        if held is None or held.row.fence != fence:
            return
        held.began = False
        if self.draining:
            self.ended(task, fence, Unstarted())
        else:
            self._buffer.appendleft(task)

    def told(self, task: str, fence: int, said: Told) -> None:
        """What a running attempt says. Thread-safe; written with the next heartbeat or end."""
        self._said.add(task, fence, said)

    def known(self, task: str, fence: int, intent: IntentId, call: KnownCall | None) -> None:
        """What a call to the outside came to, or that its attempt has written it. Thread-safe; written by the step after the attempt's end, if it has not."""
        self._calls.add(task, fence, intent, call)

    # -- the step -----------------------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do what is due; seconds until there may be more."""
        now = self._clock.monotonic()
        if self.session and now >= self._deadline:
            self._lost()
        pool_wants = self._pool.tick()
        try:
            if not self.session:
                self._register(now)
            if self.draining and self.session != self._marked:
                self._mark()
            self._take_reports(now)
            if now >= self._renew_at:
                self._renew(now)
            self._calls.write(self._db, self._runs, now)
            self._feed()
            self._take_back(now)
            if self._more and self._room() * 2 >= self._settings.slots + self._ahead():
                self._look_at = 0.0  # the last claim left some behind: take them up in large parts
            if self._aside and now >= self._aside_until:
                self._unsettled += self._aside
                self._aside.clear()
            if self._alone and self._unsettled:
                self._settle()
            if now >= self._look_at and not self.draining:
                self._look(now)
                self._feed()
            self._alone = False
            if self._unsettled and now >= self._settle_at:
                self._settle()
        except CommitUnknown:
            return 0.0  # every write of ours is repeated as it was
        except StoreError as exc:
            log.warning("the database refused; tried again", error=str(exc))
            self._look_at = max(self._look_at, now + AGAIN)
            self._settle_at = now + AGAIN
            self._alone = True
            return AGAIN
        upcoming = [self._deadline, self._renew_at, now + pool_wants]
        if not self.draining:
            upcoming.append(self._look_at)
        if self._unsettled:
            upcoming.append(self._settle_at)
        if self._aside:
            upcoming.append(self._aside_until)
        return max(0.0, min(upcoming) - self._clock.monotonic())

    def drain(self) -> None:
        """Claim nothing more and give back at once what has not begun."""
        self.draining = True
        self._pool.give_back()
        for task in list(self._buffer):
            self.ended(task, self._held[task].row.fence, Unstarted())
        self._buffer.clear()

    def _mark(self) -> None:
        """Whoever asks what is served does not count this session any more, though its lease holds."""
        self._db.run(lambda tx: registry.drain_node(tx, self.session))
        self._marked = self.session

    def abandon(self, why: str) -> None:
        """The drain's time is over: what still runs is killed and ends by its declared effects."""
        for task, held in self._held.items():
            if held.began and not held.killed:
                held.killed = True
                self._pool.kill(task, held.row.fence)
                self.ended(task, held.row.fence, Killed("drain", why))

    @property
    def holding(self) -> int:
        """Attempts that are not settled, or have left something to be written."""
        return len(self._held) + len(self._unsettled) + len(self._aside) + len(self._calls)

    def _runs(self, task: str, fence: int) -> bool:
        held = self._held.get(task)
        return held is not None and held.row.fence == fence

    # -- the lease ----------------------------------------------------------------------------------------------------------------------

    def _register(self, now: float) -> None:
        """A session of a new id; its row has no slots for stream subtasks."""
        if self.draining:
            return
        s = self._settings
        session = self._ids.new("session", 10)
        self._db.run(lambda tx: catalogue.enter(tx, session, s.name, s.lease_ms * 1000, self._served(), s.told))
        self.session = session
        self._valid_from(now)
        self._look_at = 0.0

    def _served(self) -> Served:
        """What the session's row tells: what is served here, and what was counted, for metrics."""
        s = self._settings
        ends = {f"ends_{answer.value}": count for answer, count in self.answers.items() if answer is not Answer.UNKNOWN}
        return Served(s.queues, dict.fromkeys(s.handlers, "") | {e.name: e.version for e in s.told}, {**ends, **self._counted()})

    def _valid_from(self, sent: float) -> None:
        """The lease counts from before the request was sent, and is left a margin before its end."""
        s = self._settings
        self._deadline = sent + (s.lease_ms - s.margin_ms) / 1000
        self._pool.lease(self._deadline)
        self._renew_at = sent + s.renew_ms / 1000

    def _renew(self, now: float) -> None:
        """Renew, and read in the same transaction what is asked of what is held. No task row is locked."""
        s = self._settings
        if not self.session:
            return
        fences = {task: h.row.fence for task, h in self._held.items()}
        told, said = msgspec.json.encode(self._served()).decode(), self._said.all()

        def work(tx: Transaction) -> tuple[bool, dict[str, tuple[int, bool]], frozenset[str]]:
            renewed, flags = registry.renew_node(tx, self.session, s.lease_ms * 1000, told), settling.flags(tx, self.session)
            progress.write(tx, said)
            gone = {task: fence for task, fence in fences.items() if flags.get(task, (-1, False))[0] != fence}
            return renewed, flags, settling.committed(tx, gone) if gone else frozenset()

        try:
            renewed, flags, committed = self._db.run(work)
        except (StoreUnavailable, CommitUnknown):
            raise
        except StoreError:
            self._said.written(said)  # perhaps it is to blame: evidence must hold up no heartbeat
            raise
        self._said.written(said)
        if not renewed:
            self._lost()
            return
        self._valid_from(now)
        reported = {s.task for s in (*self._unsettled, *self._aside)}
        for task, held in list(self._held.items()):
            fence, cancel = flags.get(task, (-1, False))
            if fence != held.row.fence:
                if task not in reported and task not in committed:  # its own transaction settled it: its report is on its way
                    self._fence(task)  # somebody else's by now, or settled otherwise
            elif cancel and not held.told:
                held.told = True
                if held.began:
                    self._pool.cancel(task, fence)
                else:
                    self._buffer = deque(t for t in self._buffer if t != task)
                    self.ended(task, fence, Unstarted())

    def _fence(self, task: str) -> None:
        held = self._held.pop(task)
        self._buffer = deque(t for t in self._buffer if t != task)
        if held.began and not held.killed:
            self._pool.kill(task, held.row.fence)
        if held.began:
            self._late[task, held.row.fence] = held.row.token
            if len(self._late) > LATE_KEPT:
                del self._late[next(iter(self._late))]

    def _lost(self) -> None:
        """The lease is over: stop everything. What was not settled is reported all the same: late evidence, or an end that is still ours."""
        log.warning("the lease of this session is over", session=self.session, held=len(self._held))
        for task in list(self._held):
            self._fence(task)
        self.session = ""
        self._claim = ""
        self._renew_at = 0.0

    # -- claiming -----------------------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Claim up to what is free, ends of attempts written with it. When there is nothing, look less often, and at the latest when the next waiting task is due."""
        s = self._settings
        room = self._room()
        if room <= 0 or not self.session:
            self._more = True  # for all we know: the next free slot looks at once
            self._look_at = now + s.poll_ms / 1000
            return
        if now >= self._lanes_until:
            self._survey(now)
        claimed = self._claimed(room)
        if claimed is None:
            self._lost()
            return
        for row in claimed.tasks:
            if row.id not in self._held:
                self._held[row.id] = _Held(row, now)
                self._fairness.took(row.lane)
                self._buffer.append(row.id)
        self._more = len(claimed.tasks) >= room
        if claimed.tasks:
            self._pause = FIRST_PAUSE
            self._look_at = now if claimed.more else now + self._pause
            return
        if claimed.more:  # what stood in front was blocked and is out of the way
            self._look_at = now
            return
        self._lanes_until = min(self._lanes_until, now + self._pause)  # there may be lanes that are not known yet
        self._pause = min(self._pause * 2, s.poll_ms / 1000)
        self._look_at = now + self._pause
        if claimed.next_us is not None:
            due = (claimed.next_us - claimed.now_us) / 1e6
            self._look_at = min(self._look_at, now + max(0.0, due))
            if due <= 0:
                self._db.run(lambda tx: claims.wake_due(tx, 100))

    def _room(self) -> int:
        """Free slots and a prefetch of what is done within a moment: long tasks are left for whoever has a slot."""
        return self._pool.free() + self._ahead() - len(self._buffer) - self._pool.waiting()

    def _ahead(self) -> int:
        if self._pool.free() <= 0 and self._clock.monotonic() - self._begun_at > PREFETCH_SECONDS:
            return 0  # what runs is not short, whatever ran before
        return min(self._settings.prefetch, int(self._settings.slots * PREFETCH_SECONDS / max(self._typical, 1e-6)))

    def _may_hand_over(self) -> bool:
        """Whether the pool is to have one more than it can begin at once: a few milliseconds' worth, so that a slot need not wait for this host."""
        share = int(HANDED_SECONDS / max(self._typical, 1e-6)) * self._settings.slots
        return self._ahead() > 0 and self._pool.ahead() > 0 and self._pool.waiting() < share

    def _take_back(self, now: float) -> None:
        """What waits behind something slow goes back, for whoever has a slot."""
        if self._buffer and now - self._held[self._buffer[0]].since > BEHIND_SLOW:
            for task in self._buffer:
                self.ended(task, self._held[task].row.fence, Unstarted())
            self._buffer.clear()
            self._look_at = max(self._look_at, now + BEHIND_SLOW)

    def _survey(self, now: float) -> None:
        """Which lanes there are, how many of each others hold, what is set of them. Good for a while: what changes meanwhile costs fairness a little, and no task."""
        found, others, settings = self._db.read(lambda tx: claims.survey(tx, self.session, self._settings.queues, self._lanes))
        for lane in found:
            self._lanes.pop(lane, None)
            self._lanes[lane] = now  # newest last
        for lane in [lane for lane, seen in self._lanes.items() if now - seen > LANES_KEPT or len(self._lanes) > LANES_TRIED]:
            if lane not in found:
                del self._lanes[lane]
        own = Counter(h.row.lane for h in self._held.values())
        self._fairness.surveyed(others, own, settings, list(self._lanes))
        self._lanes_until = now + LANES_FOR

    def _claimed(self, room: int) -> Claimed | None:
        parts = self._fairness.split(room)
        again = bool(self._claim)  # kept until it is answered: an unknown outcome is resolved by the same claim
        if not again:
            self._claim, self._claim_token = self._ids.new("claim", 10), self._ids.new("token", 10)
        free = max(0, self._pool.free() - len(self._buffer))
        batch = [] if self._one_by_one else self._unsettled[:SETTLED_AT_ONCE]
        began = self._clock.monotonic()
        floors = dict(self._floors.at(began))
        said = self._said.all() if batch else {}

        def work(tx: Transaction) -> tuple[dict[str, Answer], Claimed | None]:
            progress.write(tx, said)
            answers = settling.settle(tx, batch) if batch else {}
            handlers = self._settings.handlers
            return answers, claims.claim(
                tx, self.session, self._claim, self._claim_token, parts, handlers, free, again=again, floors=floors
            )

        try:
            answers, claimed = self._db.run(work)
        except (StoreUnavailable, CommitUnknown):
            raise
        except StoreError:
            self._one_by_one = bool(batch)  # perhaps one of the ends is to blame: the next claim goes without them
            raise
        self._claim = ""
        self._said.written(said)
        self._note(answers)
        del self._unsettled[: len(batch)]
        if claimed is not None:
            self._floors.learn(began, self._clock.monotonic() - began, claimed.tasks)
        return claimed

    def _feed(self) -> None:
        """Begin what is buffered while slots are free, and hand over some more if all are short. The start of an ``external`` attempt, or of one that was lost before, is committed
        before its code runs: it waits for a free slot."""
        while self._buffer and self._clock.monotonic() < self._deadline:
            task = self._buffer[0]
            held = self._held[task]
            row = held.row
            free = self._pool.free() > 0
            if not free and (careful(row) or not self._may_hand_over()):
                return
            if row.state is TaskState.DISPATCHED:
                committed = careful(row)
                if committed and not self._db.run(lambda tx, r=row: claims.begin(tx, self.session, r.id, r.fence, r.token)):  # type: ignore[misc]
                    self._fence(task)
                    continue
                held.row = row = msgspec.structs.replace(row, state=TaskState.RUNNING, starts=row.starts + 1)
                if committed and self._clock.monotonic() >= self._deadline:
                    return  # it counts as started; the loss of the lease decides
            self._buffer.popleft()
            held.began = True
            if free:
                self._begun_at = self._clock.monotonic()
            self._pool.start(row)

    # -- settling -----------------------------------------------------------------------------------------------------------------------

    def _take_reports(self, now: float) -> None:
        while self._reports:
            task, fence, outcome, submits, seconds = self._reports.popleft()
            held = self._held.get(task)
            if held is None or held.row.fence != fence:
                token = self._late.pop((task, fence), None)
                if token is not None and not isinstance(
                    outcome, Committed
                ):  # fenced meanwhile: what it says is evidence, or its end after all if nobody has taken it back yet
                    self._unsettled.append(Settlement(task=task, fence=fence, token=token, outcome=outcome, submits=submits))
                continue
            del self._held[task]
            self._fairness.ended(held.row.lane)
            if held.row.permit:
                self._floors.forget()  # the next one for its permit has waited for long
            if held.began:
                self._begun_at = now  # its slot is free for the next one
                self._typical += (seconds - self._typical) * TYPICAL_PART
            if isinstance(outcome, Committed):
                self.answers[Answer.APPLIED] += 1
                self._tell((task,))
                if self._said:
                    self._renew_at = now  # there is no end to write beside
                continue
            if held.row.effects is Effects.EXTERNAL or not self._held:
                self._settle_at = now  # nobody to be written with
            elif not self._unsettled:
                self._settle_at = now + self._settings.settle_ms / 1000
            chance = self._chance.uniform(0.0, 1.0)
            self._unsettled.append(
                Settlement(task=task, fence=fence, token=held.row.token, outcome=outcome, submits=submits, chance=chance)
            )

    def _settle(self) -> None:
        """Write ends until none is left."""
        while self._unsettled:
            batch = self._unsettled[: 1 if self._one_by_one else SETTLED_AT_ONCE]
            said = {} if self._one_by_one else self._said.all()  # what is refused shall be the end's own doing

            def work(tx: Transaction, batch: list[Settlement] = batch, said: dict[tuple[str, int], Told] = said) -> dict[str, Answer]:
                progress.write(tx, said)
                return settling.settle(tx, batch)

            try:
                answers = self._db.run(work)
            except (StoreUnavailable, CommitUnknown):
                raise
            except StoreError as exc:
                self._refused(batch, exc)
                continue
            self._said.written(said)
            self._note(answers)
            del self._unsettled[: len(batch)]
        self._one_by_one = False

    def _refused(self, batch: list[Settlement], error: StoreError) -> None:
        """The database refuses what it was given: each end by itself, so that one holds up no other; that one's task has failed, because its result cannot be stored.

        If that is refused, too, it is perhaps nothing about this end: a database that takes no writes for now must not make failures of successes.
        """
        if not self._one_by_one:
            self._one_by_one = True
            return
        (refused,) = batch
        failed = msgspec.structs.replace(refused, outcome=Unfit(text_of(error)), submits=())
        try:
            self._note(self._db.run(lambda tx: settling.settle(tx, [failed])))
        except (StoreUnavailable, CommitUnknown):
            raise
        except StoreError as exc:
            log.error("an end cannot be stored; it is kept and tried again", task=refused.task, error=str(exc))
            self._aside.append(refused)
            self._aside_until = self._clock.monotonic() + ASIDE
        del self._unsettled[0]

    def _note(self, answers: dict[str, Answer]) -> None:
        for answer in answers.values():
            self.answers[answer] += 1
        self._tell([task for task, answer in answers.items() if answer is Answer.APPLIED])

    def _tell(self, ended: Collection[str]) -> None:
        if ended and self._settled is not None:
            self._settled(ended)
