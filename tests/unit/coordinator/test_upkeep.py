"""Storage work in lanes of its own: slow storage holds up neither the lease nor other jobs, and nothing that a manifest needs is collected."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.contract.store.stores import insert_job, manifest, read_job
from tests.unit.coordinator.test_coordinator import Rig

from millstream_coordinator.coordinator import COLLECT_EVERY, Coordinator
from millstream_coordinator.lanes import ThreadLanes
from millstream_coordinator.loop import CoordinatorLoop
from millstream_coordinator.upkeep import COPY_AGAIN
from millstream_schema.connectors import PROOF, Handle
from millstream_schema.errors import StorageUnavailable
from millstream_schema.hints import NoHints
from millstream_schema.manifest import EpochManifest, open_manifest
from millstream_schema.ports import SystemChance, SystemClock
from millstream_schema.states import JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_tasks.snapshots.files import FileSnapshots


class HeldLanes:
    """Runs nothing before the test says so."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, lane: str, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> int:
        """Everything that is there now; how much it was."""
        count = len(self.waiting)
        for _ in range(count):
            self.waiting.popleft()()
        return count


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.db.close()


@pytest.fixture
def held(rig: Rig) -> HeldLanes:
    lanes = HeldLanes()
    rig.coordinator.work_in(lanes)
    return lanes


def with_segments(rig: Rig, epoch: int, *keys: str) -> EpochManifest:
    """The manifest of a durable epoch of job ``j`` whose segments are in storage."""
    handles = [rig.storage.put(key, key.encode()) for key in keys]
    whole = manifest("j", epoch)
    first, *rest = whole.subtasks
    made = replace(whole, subtasks=[replace(first, segments=handles), *[replace(s, segments=[]) for s in rest]])
    rig.db.run(lambda tx: epochs.write_manifest(tx, made))
    return made


def durable(rig: Rig, epoch: int) -> None:
    job = read_job(rig.db, "j")
    assert rig.db.run(lambda tx: jobs.update_job(tx, job, newest_durable=epoch, newest_committed=epoch))


def savepoint_state(db: Database, savepoint: str = "sp") -> str:
    row = db.read(lambda tx: epochs.read_savepoint(tx, savepoint))
    assert row is not None
    return str(row["state"])


def test_a_job_starts_once_its_storage_is_proved_and_others_do_not_wait_for_it(rig: Rig, held: HeldLanes) -> None:
    """Nodes refuse storage that does not hold the proof: no deployment before it is written. A job that ran before goes on meanwhile."""
    insert_job(rig.db, "a-new", JobState.PENDING, generation=0)
    insert_job(rig.db, "b-ran", JobState.RESTARTING)
    rig.sweep()
    assert (read_job(rig.db, "a-new").state, read_job(rig.db, "b-ran").state) == (JobState.PENDING, JobState.DEPLOYING)
    assert rig.storage.keys(PROOF) == []
    assert held.run() == 2
    rig.sweep(0.0)
    assert read_job(rig.db, "a-new").state is JobState.DEPLOYING
    assert rig.storage.keys(PROOF) == [f"{PROOF}/a-new", f"{PROOF}/b-ran"]


def test_a_running_job_whose_proof_cannot_be_written_goes_on(rig: Rig, held: HeldLanes) -> None:
    """A coordinator that takes over while storage is away advances what ran, and proves it once storage is back."""
    insert_job(rig.db, "j", JobState.RESTARTING)
    rig.world.away["storage"] = rig.world.now + 3
    rig.sweep()
    held.run()
    rig.sweep()
    assert rig.coordinator.set_aside == 0 and read_job(rig.db, "j").state is JobState.DEPLOYING
    rig.sweep(6)
    held.run()
    assert rig.storage.keys(PROOF) == [f"{PROOF}/j"]


def test_the_lease_is_renewed_while_a_savepoint_is_copied(rig: Rig, held: HeldLanes) -> None:
    """A copy that takes ten leases loses none, another job's start does not wait for it, and it is not begun twice."""
    insert_job(rig.db, "j", JobState.PENDING, generation=0)
    made = with_segments(rig, 7, "j/e7/a")
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", made, "m"))
    rig.sweep()
    copy = held.waiting.pop()
    standby = rig.another("c2")
    for _ in range(30):
        rig.sweep(3.5)
        standby.sweep()
        held.run()
    assert rig.coordinator.leading and rig.coordinator.term == 1 and not standby.leading
    assert read_job(rig.db, "j").generation > 0
    assert (savepoint_state(rig.db), rig.storage.keys("savepoints/")) == ("COPYING", [])
    copy()
    rig.sweep()
    assert (savepoint_state(rig.db), rig.storage.keys("savepoints/")) == ("COMPLETE", ["savepoints/sp/j/e7/a"])


def test_a_copy_that_ends_after_the_lease_is_lost_is_harmless(rig: Rig, held: HeldLanes) -> None:
    """Another coordinator has copied it meanwhile: its row is as that one wrote it; what comes late changes nothing and breaks nothing."""
    made = with_segments(rig, 7, "j/e7/a")
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", made, "m"))
    rig.sweep()
    other = rig.another("c2")
    rig.world.now += 11
    other.sweep()  # copies inline
    other.sweep()
    before = rig.db.read(lambda tx: epochs.read_savepoint(tx, "sp"))
    assert other.leading and before is not None and before["state"] == "COMPLETE"
    assert held.run() == 1
    rig.sweep()
    assert not rig.coordinator.leading and rig.coordinator.defects == 0
    assert rig.db.read(lambda tx: epochs.read_savepoint(tx, "sp")) == before
    copied = open_manifest(before["body"], before["checksum"], "sp")
    assert [rig.storage.get(h) for h in copied.handles()] == [b"j/e7/a"]


def test_a_copy_that_fails_is_told_and_tried_again(rig: Rig, held: HeldLanes) -> None:
    """Not at once: storage that refuses everything must not keep the coordinator busy."""
    made = with_segments(rig, 7, "j/e7/a")
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", made, "m"))
    rig.sweep()
    rig.world.away["storage"] = rig.world.now + COPY_AGAIN / 2
    held.run()
    rig.sweep(0.0)
    row = rig.db.read(lambda tx: epochs.read_savepoint(tx, "sp"))
    assert row is not None and row["state"] == "COPYING" and "cannot be reached" in row["error"]
    assert held.run() == 0
    rig.sweep(COPY_AGAIN + 0.1)
    assert held.run() == 1
    rig.sweep(0.0)
    assert savepoint_state(rig.db) == "COMPLETE"


def collected(rig: Rig, held: HeldLanes, meanwhile: Callable[[], None]) -> None:
    """One collection, with something that happens after each of its decisions."""
    rig.sweep(COLLECT_EVERY + 1)
    for _ in range(2):
        assert held.waiting, "listing, then deleting"
        meanwhile()
        held.run()
        meanwhile()
        rig.sweep(0.1)


def test_nothing_that_a_manifest_written_meanwhile_names_is_collected(rig: Rig, held: HeldLanes) -> None:
    """Epochs become durable between the decision and each deletion; each keeps blobs of the one before it. What nothing names is gone in the end."""
    insert_job(rig.db, "j", newest_durable=2, newest_committed=2, settings='{"retained":1}')
    with_segments(rig, 1, "j/e1/old", "j/e1/shared")
    with_segments(rig, 2, "j/e1/shared", "j/e2/mine")
    rig.storage.put("j/e1/aborted", b"x")
    rig.storage.put("j/e3/acknowledged", b"j/e3/acknowledged")
    epoch = [2]

    def advanced() -> None:
        epoch[0] += 1
        with_segments(rig, epoch[0], "j/e1/shared", "j/e3/acknowledged", f"j/e{epoch[0]}/mine")
        durable(rig, epoch[0])

    collected(rig, held, advanced)
    newest = rig.db.read(lambda tx: epochs.read_manifest(tx, "j", epoch[0]))
    assert [rig.storage.get(h) for h in newest.handles()] == [h.key.encode() for h in newest.handles()]
    assert not {"j/e1/old", "j/e1/aborted"} & set(rig.storage.keys("j/"))
    assert epoch[0] > 4, "nothing became durable between the decisions"
    collected(rig, held, lambda: None)
    assert [k for k in rig.storage.keys("j/") if k not in {h.key for h in newest.handles()}] == []


def test_what_is_kept_is_read_again_before_anything_is_deleted(rig: Rig, held: HeldLanes) -> None:
    """A blob that was found dead, and that a savepoint names by the time of the deletion, stays; so does one of an epoch in flight, which no row names yet."""
    insert_job(rig.db, "j", newest_durable=8, newest_committed=8, settings='{"retained":1}')
    old = with_segments(rig, 7, "j/e7/saved")
    with_segments(rig, 8, "j/e8/mine")
    rig.storage.put("j/e7/dead", b"x")
    rig.storage.put("j/e9/in-flight", b"x")
    rig.sweep(COLLECT_EVERY + 1)
    held.run()  # it is listed as dead
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", old, "m"))
    rig.sweep(0.1)
    held.run()
    assert rig.storage.keys("j/") == ["j/e7/saved", "j/e8/mine", "j/e9/in-flight"]


def test_a_savepoint_that_waits_to_be_copied_keeps_its_blobs(rig: Rig, held: HeldLanes) -> None:
    """Also one of an ended job that was resumed: what it names is in no retained manifest any more."""
    insert_job(rig.db, "j", newest_durable=8, newest_committed=8, settings='{"retained":1}')
    old = with_segments(rig, 7, "j/e7/saved")
    with_segments(rig, 8, "j/e8/mine")
    rig.storage.put("j/e7/dead", b"x")
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", old, "m"))
    copy = rig.storage.copy
    failing = [True]

    def copy_or_not(handle: Handle, key: str) -> Handle:
        if failing[0]:
            raise StorageUnavailable("no space left")
        return copy(handle, key)

    rig.storage.copy = copy_or_not  # type: ignore[method-assign]
    for _ in range(4):
        rig.sweep(COLLECT_EVERY + 1)
        held.run()
    assert rig.storage.keys("j/") == ["j/e7/saved", "j/e8/mine"]
    failing[0] = False
    for _ in range(4):
        rig.sweep(COLLECT_EVERY + 1)
        held.run()
    assert savepoint_state(rig.db) == "COMPLETE"
    assert rig.storage.keys("") == ["j/e8/mine", f"{PROOF}/j", "savepoints/sp/j/e7/saved"]


class SlowCopies(FileSnapshots):
    """Copies take until the test lets them go on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.copying = threading.Event()
        self.go_on = threading.Event()

    def copy(self, handle: Handle, key: str) -> Handle:
        self.copying.set()
        assert self.go_on.wait(30)
        return super().copy(handle, key)


def test_a_loop_copies_on_a_thread_of_its_own(tmp_path: Path) -> None:
    """While a copy stands still for longer than the lease, the lease is kept and a new job is started; then the savepoint is complete."""
    db = Database(f"sqlite:///{tmp_path}/store.db", SystemClock())
    create_schema(db)
    storage = SlowCopies((tmp_path / "snapshots").as_uri())
    handle = storage.put("old/e7/a", b"content")
    whole = manifest("old", 7)
    first, *rest = whole.subtasks
    made = replace(whole, subtasks=[replace(first, segments=[handle]), *[replace(s, segments=[]) for s in rest]])
    insert_job(db, "old", JobState.STOPPED)
    db.run(lambda tx: epochs.write_savepoint(tx, "sp", made, "m"))
    db.run(lambda tx: registry.register_node(tx, "n1", "n1", 8, 60_000_000, "{}"))
    coordinator = Coordinator(db, NoHints(), SystemClock(), SystemChance(), lambda _url: storage, "c1", 400, 0.02)
    loop = CoordinatorLoop(coordinator, 0.02)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        assert storage.copying.wait(30)
        expires = db.read(registry.read_lease)["expires_us"]  # type: ignore[index]
        insert_job(db, "new", JobState.PENDING, generation=0)
        until(lambda: read_job(db, "new").state is JobState.DEPLOYING)
        until(lambda: db.read(lambda tx: tx.now_us()) > expires)  # a lease has passed since the copy began
        lease = db.read(registry.read_lease)
        assert lease is not None and (lease["term"], lease["holder"]) == (1, "c1")
        assert savepoint_state(db) == "COPYING"
        storage.go_on.set()
        until(lambda: savepoint_state(db) == "COMPLETE")
    finally:
        storage.go_on.set()
        loop.stop()
        thread.join(30)
        db.close()
    assert not thread.is_alive() and storage.keys("savepoints/") == ["savepoints/sp/old/e7/a"]


def until(condition: Callable[[], bool]) -> None:
    """Poll for what another thread writes to rows."""
    pause = threading.Event()
    for _ in range(1500):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("it did not come")


def test_a_lane_goes_on_after_work_that_fails_and_drops_what_waits_when_closed() -> None:
    """Lanes run beside each other, each in order; whoever waits for a result is woken after each."""
    woken: SimpleWakes = SimpleWakes()
    lanes = ThreadLanes(woken.add)
    stands, go_on, ran = threading.Event(), threading.Event(), list[str]()

    def stand() -> None:
        stands.set()
        assert go_on.wait(30)

    def fail() -> None:
        raise OSError("broken")

    lanes.submit("slow", stand)
    lanes.submit("quick", fail)
    lanes.submit("quick", lambda: ran.append("after a failure"))
    assert woken.wait(2) and ran == ["after a failure"]
    assert stands.wait(30)
    lanes.submit("slow", lambda: ran.append("dropped"))
    closing = threading.Thread(target=lanes.close)
    closing.start()
    until(lambda: lanes.closed)
    go_on.set()
    closing.join(30)
    assert woken.wait(3) and ran == ["after a failure"]


class SimpleWakes:
    """Counts wakes."""

    def __init__(self) -> None:
        self._came = threading.Semaphore(0)
        self._count = 0

    def add(self) -> None:
        self._came.release()

    def wait(self, count: int) -> bool:
        """Until there were so many in all."""
        while self._count < count:
            if not self._came.acquire(timeout=30):
                return False
            self._count += 1
        return True
