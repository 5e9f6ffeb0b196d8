"""Contract of the RabbitMQ queue source: acknowledged only after a durable epoch, each id once, whatever is lost in between."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import amqp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema.connectors import CheckpointParticipant, ConnectorContext, Json, Source, SourceCapability, Split
from millstream_schema.errors import RecordError, SourceError, SourceUnavailable
from millstream_tasks.sources.rabbitmq_ledger import Ledger
from millstream_tasks.sources.rabbitmq_queue import RabbitQueueReader, RabbitQueueSource

URL = "amqp://guest:guest@127.0.0.1:5672/"
HOUR_MS = 3_600_000


class FakeQueue:
    """An honest small broker: a queue with redelivery in order, a prefetch window, tags that die with their connection."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.unacked: dict[int, str] = {}
        self.next_tag = 1
        self.acked: list[str] = []

    def deliver(self, ledger: Ledger, prefetch: int) -> list[str]:
        """Deliver what fits into the window; the ids that are to be emitted."""
        fresh = []
        while self.ready and len(self.unacked) < prefetch:
            message = self.ready.pop(0)
            tag, self.next_tag = self.next_tag, self.next_tag + 1
            self.unacked[tag] = message
            if ledger.delivered(tag, message):
                fresh.append(message)
        return fresh

    def acknowledge(self, acks: list[tuple[int, bool]]) -> None:
        for tag, multiple in acks:
            assert tag in self.unacked, "an unknown tag closes the channel"
            for covered in [t for t in self.unacked if t == tag or (multiple and t < tag)]:
                self.acked.append(self.unacked.pop(covered))

    def lose(self) -> None:
        self.ready = list(self.unacked.values()) + self.ready
        self.unacked = {}
        self.next_tag = 1


STEP = st.sampled_from(["publish", "publish", "repeat", "deliver", "emit", "emit", "save", "durable", "abort", "lost", "crash", "ack"])


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60), st.integers(1, 6))
def test_whatever_is_lost_each_id_counts_once_and_no_ack_is_early(steps: list[str], prefetch: int) -> None:
    """Property: under any order of deliveries, cuts, aborts, lost connections and crashes, what durable epochs hold is every id exactly
    once, in the end all are acknowledged, and never one whose epoch is not durable (T-65)."""
    queue, ledger = FakeQueue(), Ledger(HOUR_MS)
    published: list[str] = []
    pending: list[str] = []
    since_cut: list[str] = []
    sealed: dict[int, list[str]] = {}
    durable: list[str] = []
    newest: tuple[int, Json] = (0, {"taken": [], "durable": []})
    saved: dict[int, Json] = {}
    epoch = 0

    def acknowledge() -> None:
        queue.acknowledge(ledger.take_due())
        assert set(queue.acked) <= set(durable)

    def step(name: str) -> None:
        nonlocal ledger, epoch, newest, since_cut
        if name in ("publish", "repeat"):
            message = published[0] if name == "repeat" and published else f"m{len(published)}"
            published.append(message)
            queue.ready.append(message)
        elif name == "deliver":
            pending.extend(queue.deliver(ledger, prefetch))
        elif name == "emit" and pending:
            ledger.emitted(pending[0])
            since_cut.append(pending.pop(0))
        elif name == "save":
            epoch += 1
            saved[epoch] = json.loads(json.dumps(ledger.save(epoch, 0)))
            sealed[epoch] = since_cut
            since_cut = []
        elif name == "durable" and epoch in saved:
            for number in sorted(sealed):
                durable.extend(sealed.pop(number))
            newest = (epoch, saved.pop(epoch))
            ledger.durable(epoch, 0)
            acknowledge()
        elif name == "ack":
            acknowledge()
        elif name in ("lost", "crash"):
            queue.lose()
            pending.clear()
            ledger.connection_lost()
            if name == "crash":
                ledger = Ledger(HOUR_MS)
                ledger.restore(*newest, 0)
                since_cut = []
                sealed.clear()
                saved.clear()
        assert len(durable) == len(set(durable))

    for name in steps:
        step(name)
    for _ in range(len(published) + 1):
        for name in ["deliver", *["emit"] * prefetch, "save", "durable", "deliver", "ack"]:
            step(name)
    assert sorted(durable) == sorted(set(published))
    assert sorted(queue.acked) == sorted(published)


def test_acknowledgements_cover_exactly_what_is_due() -> None:
    """Property: one multiple-ack for the unbroken beginning, single acks beyond the first message that is not due."""
    ledger = Ledger(HOUR_MS)
    for tag in range(1, 8):
        assert ledger.delivered(tag, f"m{tag}")
    for tag in (1, 2, 3, 5, 7):
        ledger.emitted(f"m{tag}")
    ledger.save(1, 0)
    ledger.durable(1, 0)
    assert ledger.take_due() == [(3, True), (5, False), (7, False)]
    assert ledger.take_due() == []
    assert ledger.unacked == 2


def test_ids_are_forgotten_after_the_retention_and_not_before() -> None:
    """Property: the state holds an id until dedup_retention after its epoch became durable; a restore starts that time again."""
    ledger = Ledger(1000)
    ledger.delivered(1, "a")
    ledger.emitted("a")
    ledger.save(1, 0)
    ledger.durable(1, 500)
    assert ledger.save(2, 1499) == {"taken": [], "durable": [[500, ["a"]]]}
    restored = Ledger(1000)
    restored.restore(2, {"taken": [], "durable": [[500, ["a"]]]}, 9000)
    assert restored.delivered(1, "a") is False
    assert ledger.save(3, 1500) == {"taken": [], "durable": []}
    assert ledger.delivered(2, "a") is True


@pytest.mark.parametrize("state", [None, {}, {"taken": [[1]], "durable": []}, {"taken": [], "durable": [["x", []]]}])
def test_a_foreign_state_is_refused(state: Json) -> None:
    """Property: state that is not this source's is an error, never an empty start."""
    with pytest.raises(SourceError, match="not the state of a queue source"):
        Ledger(1).restore(1, state, 0)


def test_state_of_a_later_epoch_is_refused() -> None:
    """Property: messages of an epoch above the restored one are not taken for durable."""
    with pytest.raises(SourceError, match="holds messages of epoch 5"):
        Ledger(1).restore(4, {"taken": [[5, ["a"]]], "durable": []}, 0)


class Rabbit:
    """A queue of its own on the real server."""

    def __init__(self) -> None:
        self.name = f"ms-source-{uuid.uuid4().hex[:12]}"
        self.connection = amqp.Connection("127.0.0.1:5672", "guest", "guest")
        self.connection.connect()
        self.channel = self.connection.channel()
        self.channel.queue_declare(self.name, durable=False, auto_delete=False)
        self.readers: list[RabbitQueueReader] = []

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self.raw(json.dumps(number).encode(), message_id=f"m{number}")

    def raw(self, body: bytes, **properties: Any) -> None:
        self.channel.basic_publish(amqp.Message(body, **properties), routing_key=self.name)

    def open(self, now_ms: Callable[[], int] = lambda: 0, **options: Any) -> RabbitQueueReader:
        source = RabbitQueueSource(URL, self.name, **options)
        assert source.problems() == []
        (split,) = source.discover(frozenset())
        assert source.discover(frozenset({split.split_id})) == []
        reader = source.open(split, None, ConnectorContext("job", "source", 0, 1, 1, lambda: None, now_ms))
        self.readers.append(reader)
        return reader

    def left(self) -> int:
        """Messages that a fresh consumer would get: all others were acknowledged. Every reader is closed for it."""
        self.close_readers()
        return int(self.channel.queue_declare(self.name, passive=True).message_count)

    def close_readers(self) -> None:
        for reader in self.readers:
            reader.close()
        self.readers = []

    def close(self) -> None:
        self.close_readers()
        self.channel.queue_delete(self.name)
        self.connection.close()


@pytest.fixture
def rabbit() -> Iterator[Rabbit]:
    made = Rabbit()
    yield made
    made.close()


def take(reader: RabbitQueueReader, count: int, limit: int = 100) -> list[Any]:
    """``count`` bodies, then proof that no further one is handed out now."""
    bodies: list[Any] = []
    deadline = time.monotonic() + 10
    while len(bodies) < count and time.monotonic() < deadline:
        bodies += [value["body"] for value in reader.poll(min(limit, count - len(bodies))).values]
    for _ in range(5):
        bodies += [value["body"] for value in reader.poll(0 if count else limit).values]
    return bodies


def nothing_more(reader: RabbitQueueReader) -> bool:
    return all(reader.poll(100).values == [] for _ in range(20))


@pytest.mark.rabbitmq
def test_a_crash_at_any_point_loses_nothing_and_repeats_nothing(rabbit: Rabbit) -> None:
    """Property: after a crash the messages of the durable epoch are acknowledged and not emitted, all others are emitted again."""
    rabbit.publish(*range(10))
    reader = rabbit.open()
    assert isinstance(reader, CheckpointParticipant)
    assert take(reader, 3) == [0, 1, 2]
    reader.save_state(1)
    assert reader.prepare_commit(1) == []
    reader.finish_commit(1, True)
    assert take(reader, 2) == [3, 4]
    state = json.loads(json.dumps(reader.save_state(2)))
    assert take(reader, 2) == [5, 6]
    reader.close()
    again = rabbit.open()
    again.restore_from_epoch(2, state)
    assert take(again, 5) == [5, 6, 7, 8, 9]
    assert nothing_more(again)
    again.save_state(3)
    again.finish_commit(3, True)
    assert rabbit.left() == 0


@pytest.mark.rabbitmq
def test_nothing_is_acknowledged_before_its_epoch_is_durable(rabbit: Rabbit) -> None:
    """Property: taken, sealed and aborted messages stay in the queue; a later durable epoch subsumes the aborted one (T-65)."""
    rabbit.publish(*range(4))
    reader = rabbit.open()
    assert take(reader, 2) == [0, 1]
    reader.save_state(1)
    reader.finish_commit(1, False)
    assert take(reader, 1) == [2]
    assert rabbit.left() == 4
    reader = rabbit.open()
    assert take(reader, 2) == [0, 1]
    reader.save_state(1)
    reader.finish_commit(1, False)
    assert take(reader, 1) == [2]
    reader.save_state(2)
    reader.finish_commit(2, True)
    assert rabbit.left() == 1


@pytest.mark.rabbitmq
def test_a_lost_connection_repeats_no_record_within_the_attempt(rabbit: Rabbit) -> None:
    """Property: what was emitted and is delivered again takes its new tag, is not emitted, and is acknowledged by the epoch."""
    rabbit.publish(*range(6))
    reader = rabbit.open(heartbeat=2)
    assert take(reader, 3) == [0, 1, 2]
    reader.save_state(1)
    fresh = drop(reader)
    assert fresh + take(reader, 3 - len(fresh)) == [3, 4, 5]
    assert nothing_more(reader)
    assert drop(reader) == []
    reader.finish_commit(1, True)  # durable while there is no connection: acknowledged when delivered again
    assert nothing_more(reader)
    assert nothing_more(reader)
    assert rabbit.left() == 3


def drop(reader: RabbitQueueReader) -> list[Any]:
    """Cut the reader's TCP connection under it, and let it notice and connect again; the bodies it hands out by then."""
    before = reader._connection
    assert before is not None
    before._connection.transport.sock.shutdown(2)
    bodies: list[Any] = []
    deadline = time.monotonic() + 10
    while (reader._connection is None or reader._connection is before) and time.monotonic() < deadline:
        bodies += [value["body"] for value in reader.poll(1).values]
    assert reader._connection is not None
    assert reader._connection is not before
    return bodies


@pytest.mark.rabbitmq
def test_a_full_window_asks_for_an_epoch_and_goes_on_after_it(rabbit: Rabbit) -> None:
    """Property: with prefetch 3, the fourth message comes only after an epoch; wants_epoch says so at that time and at no other."""
    rabbit.publish(*range(5))
    reader = rabbit.open(prefetch=3)
    assert not reader.wants_epoch
    assert take(reader, 3) == [0, 1, 2]
    assert nothing_more(reader)
    assert reader.wants_epoch
    reader.save_state(1)
    reader.finish_commit(1, True)
    assert not reader.wants_epoch
    assert take(reader, 2) == [3, 4]
    assert not reader.wants_epoch


@pytest.mark.rabbitmq
def test_a_second_reader_waits_for_the_first_to_go(rabbit: Rabbit) -> None:
    """Property: a replaced reader that still lives shares no messages with its successor."""
    rabbit.publish(1)
    first = rabbit.open()
    assert take(first, 1) == [1]
    second = rabbit.open()
    assert nothing_more(second)
    impatient = rabbit.open(give_up=0)
    with pytest.raises(SourceUnavailable, match="another consumer"):
        impatient.poll(1)
    first.close()
    assert take(second, 1) == [1]


@pytest.mark.rabbitmq
def test_poison_and_missing_ids_follow_the_policy(rabbit: Rabbit) -> None:
    """Property: each poison message is reported once, acknowledged with its epoch; fail hands out what came before (T-59)."""

    def put() -> None:
        rabbit.publish(1)
        rabbit.raw(b"{bad", message_id="bad")
        rabbit.raw(b"2")
        rabbit.publish(3)

    put()
    failing = rabbit.open()
    assert take(failing, 1) == [1]
    with pytest.raises(RecordError, match="bad"):
        for _ in range(1000):
            failing.poll(10)
    failing.close()
    dead_letters = rabbit.open(poison="dead-letter")
    values: list[Any] = []
    dead: list[Any] = []
    deadline = time.monotonic() + 10
    while len(values) < 2 and time.monotonic() < deadline:
        read = dead_letters.poll(10)
        values += read.values
        dead += read.dead
    assert values == [{"id": "m1", "body": 1}, {"id": "m3", "body": 3}]
    assert [d[1] for d in dead] == [b"{bad", b"2"]
    assert "no id in 'message_id'" in dead[1][2]
    dead_letters.save_state(1)
    dead_letters.finish_commit(1, True)
    assert rabbit.left() == 0


@pytest.mark.rabbitmq
def test_ids_may_come_from_a_header_and_bodies_in_other_formats(rabbit: Rabbit) -> None:
    """Property: id_header, format and parse are used."""
    rabbit.raw("é".encode(), application_headers={"uid": 7}, content_encoding="utf-8")
    reader = rabbit.open(id_header="uid", format="text", parse=str.upper)
    deadline = time.monotonic() + 10
    values: list[Any] = []
    while not values and time.monotonic() < deadline:
        values = reader.poll(10).values
    assert values == [{"id": "7", "body": "É"}]
    reader.close()
    raw = rabbit.open(id_header="uid", format="bytes")
    assert take(raw, 1) == ["é".encode()]


@pytest.mark.rabbitmq
def test_a_queue_that_does_not_exist_or_is_refused_is_an_error(rabbit: Rabbit) -> None:
    """Property: what waiting cannot mend is raised at once, with what to do."""
    context = ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: 0)
    with pytest.raises(SourceError, match="Declare it before"):
        RabbitQueueSource(URL, rabbit.name + "-none").open(Split("0"), None, context).poll(1)
    with pytest.raises(SourceError, match="refuses access"):
        RabbitQueueSource("amqp://guest:wrong@127.0.0.1/", rabbit.name).open(Split("0"), None, context).poll(1)


@pytest.mark.rabbitmq
def test_a_queue_deleted_under_the_reader_is_an_error(rabbit: Rabbit) -> None:
    """Property: the broker's cancel is noticed; the missing queue is named."""
    rabbit.publish(1)
    reader = rabbit.open()
    assert take(reader, 1) == [1]
    rabbit.channel.queue_delete(rabbit.name)
    deadline = time.monotonic() + 10
    with pytest.raises(SourceError, match="has no queue"):
        while time.monotonic() < deadline:
            reader.poll(1)


def test_an_unreachable_broker_is_an_empty_read_and_then_an_error() -> None:
    """Property: an outage does not block a poll, and ends in an error after give_up."""
    context = ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: 0)
    for give_up in (60, 0):
        reader = RabbitQueueSource("amqp://127.0.0.1:1/", "q", give_up=give_up).open(Split("0"), None, context)
        if give_up:
            assert reader.poll(10).values == []
        else:
            with pytest.raises(SourceUnavailable, match="could not be reached"):
                reader.poll(10)
        reader.close()


def test_wrong_options_are_listed_and_the_password_is_nowhere() -> None:
    """Property: problems() lists everything wrong; config() identifies without secrets; the source is transactional."""
    bad = RabbitQueueSource("http://x", "", prefetch=0, format="xml", dedup_retention=0, heartbeat=0, give_up=-1, poison="no")
    assert len(bad.problems()) == 8
    source: Source = RabbitQueueSource("amqp://u:s3cret@h:5672/v", "q")
    assert source.problems() == []
    assert source.capability is SourceCapability.TRANSACTIONAL_READ
    assert source.config()["broker"] == "amqp://h:5672/v"
    assert "s3cret" not in json.dumps(source.config())
