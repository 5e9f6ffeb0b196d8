"""What every carrier of channels promises, shown for all four by the same tests."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from time import monotonic

import pytest
from tests.contract.channels.harness import Carrier, Pair, raises, take, until
from tests.unit.runner.rig import spoken

from millstream_schema.channels import ChannelReader, ChannelWriter, Frame, Transport
from millstream_schema.envelope import Envelope, Kind, decode_envelope
from millstream_schema.errors import ChannelError, ChannelLost, ChannelMissing
from millstream_schema.values import TypeRegistry
from millstream_tasks.runner.inputs import InputChannel


@pytest.mark.parametrize("seed", [1, 2])
def test_frames_arrive_in_order_and_unchanged_under_any_credit_window(carrier: Carrier, seed: int) -> None:
    """Thousands of frames of random sizes through a random window come out as they went in."""
    chance = random.Random(seed)
    capacity = chance.choice([1, 2, 7, 64])
    pair = Pair(carrier, capacity)
    total = 3000 if capacity > 2 else 400
    sizes = [chance.choice([0, 1, 100, 5000]) for _ in range(total)]
    sent, got = hashlib.sha256(), hashlib.sha256()
    state = {"put": 0, "taken": 0}

    def step() -> bool:
        while state["put"] < total and state["put"] - pair.writer.reported < capacity and chance.random() < 0.95:
            data = chance.randbytes(sizes[state["put"]])
            state["put"] += 1
            sent.update(data)
            pair.writer.put(Frame(state["put"], data))
        while chance.random() < 0.95 and (frame := pair.reader.take()) is not None:
            state["taken"] += 1
            assert frame.number == state["taken"]
            got.update(frame.data)
            if chance.random() < 0.6 or state["taken"] % capacity == 0:
                pair.reader.processed(frame.number)
        return state["taken"] == total

    until(step, *pair.both)
    assert got.digest() == sent.digest()


def test_producer_and_consumer_on_two_threads_lose_nothing_and_never_sleep_over_a_frame(carrier: Carrier) -> None:
    """With long waits on both sides a missed wake-up would show as a time-out."""
    total, capacity = 2000, 4
    pair = Pair(carrier, capacity)
    numbers: list[int] = []
    failures: list[BaseException] = []

    def consume() -> None:
        try:
            while len(numbers) < total:
                frame = pair.reader.take()
                if frame is None:
                    pair.consumer.wait(10)
                    continue
                numbers.append(frame.number)
                pair.reader.processed(frame.number)
            pair.consumer.wait(0)
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=consume)
    thread.start()
    started = monotonic()
    number = 0
    while number < total:
        if number - pair.writer.reported >= capacity:
            pair.producer.wait(10)
            continue
        number += 1
        pair.writer.put(Frame(number, b"x" * 50))
    while pair.writer.reported < total - capacity:
        pair.producer.wait(10)
    thread.join(20)
    assert not thread.is_alive()
    assert failures == []
    assert numbers == list(range(1, total + 1))
    assert monotonic() - started < 9, "some wait slept until its time-out"


def test_T57_repeated_frames_are_harmless(pair: Pair) -> None:
    """T-57: repeats may be handed out or not; without them the sequence is whole and in order."""
    for number in (1, 2, 2, 1, 3, 3, 4):
        pair.writer.put(Frame(number, b"%d" % number))
    fresh: list[Frame] = []

    def four() -> bool:
        while (frame := pair.reader.take()) is not None:
            if frame.number > len(fresh):
                fresh.append(frame)
            pair.reader.processed(len(fresh))
        return len(fresh) == 4

    until(four, *pair.both)
    assert fresh == [Frame(n, b"%d" % n) for n in (1, 2, 3, 4)]
    until(lambda: pair.writer.reported == 4, *pair.both)


def test_connecting_to_a_channel_nobody_created_raises_channel_missing(carrier: Carrier) -> None:
    """A producer can make no channel; the message names it. The transport stays usable."""
    transport = carrier.transport()
    channel = carrier.channel()
    with pytest.raises(ChannelMissing, match=channel.job):
        transport.connect(channel, 8)
    consumer = carrier.transport()
    reader = consumer.create(channel, 8)
    transport.connect(channel, 8).put(Frame(1, b"a"))
    assert take(reader, 1, consumer, transport) == [Frame(1, b"a")]


def test_putting_into_a_deleted_channel_raises_channel_missing_and_makes_nothing_anew(carrier: Carrier, pair: Pair) -> None:
    """A zombie producer ends at its next frames, whoever deleted the channel, and connecting again fails too."""
    pair.writer.put(Frame(1, b"a"))
    assert take(pair.reader, 1, *pair.both) == [Frame(1, b"a")]
    deleter = carrier.transport()
    deleter.delete([pair.channel])
    numbers = iter(range(2, 100_000))
    raises(ChannelMissing, lambda: pair.writer.put(Frame(next(numbers), b"b")), *pair.both)
    with pytest.raises(ChannelMissing):
        _ = pair.writer.reported
    with pytest.raises(ChannelMissing):
        deleter.connect(pair.channel, 8)


def test_deleting_is_by_exact_name_and_passes_over_what_does_not_exist(carrier: Carrier) -> None:
    """Another channel of the same job keeps working; deleting twice, or a name never made, is no error."""
    kept, gone = Pair(carrier, 8), Pair(carrier, 8)
    gone.consumer.delete([gone.channel, carrier.channel(), gone.channel])
    gone.consumer.delete([gone.channel])
    kept.writer.put(Frame(1, b"a"))
    assert take(kept.reader, 1, *kept.both) == [Frame(1, b"a")]
    kept.reader.processed(1)
    until(lambda: kept.writer.reported == 1, *kept.both)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_T24_watermarks_and_statuses_keep_their_place_among_the_records_when_frames_come_again(carrier: Carrier, seed: int) -> None:
    """T-24: a producer that sends every few frames once more, as after a lost answer: what the consumer takes is what was said, in that order, each once."""
    frames, chance = spoken(f"contract-{seed}"), random.Random(seed)
    pair = Pair(carrier, 8)
    receiving = InputChannel(pair.channel, pair.reader, TypeRegistry())
    heard: list[Envelope] = []
    state = {"put": 0}

    def step() -> bool:
        while state["put"] < len(frames) and state["put"] - pair.writer.reported < 8:
            state["put"] += 1
            pair.writer.put(frames[state["put"] - 1])
            if chance.random() < 0.3:
                for frame in frames[max(0, state["put"] - chance.randint(1, 4)) : state["put"]]:
                    pair.writer.put(frame)
        while (envelope := receiving.take()) is not None:
            heard.append(envelope)
            pair.reader.processed(receiving.number)
        return len(heard) == len(frames)

    until(step, *pair.both)
    assert heard == [decode_envelope(frame.data, TypeRegistry(), "c") for frame in frames]
    assert {e.kind for e in heard} == {Kind.RECORDS, Kind.WATERMARK, Kind.STATUS, Kind.BARRIER}


def test_T52_a_held_channel_does_not_block_another_of_the_same_consumer(carrier: Carrier) -> None:
    """T-52: with one channel full and not taken from, the other goes through thousands of frames."""
    capacity = 4
    consumer, producer = carrier.transport(), carrier.transport()
    held_id, free_id = carrier.channel(), carrier.channel()
    held, free = consumer.create(held_id, capacity), consumer.create(free_id, capacity)
    held_writer, free_writer = producer.connect(held_id, capacity), producer.connect(free_id, capacity)
    for number in range(1, capacity + 1):
        held_writer.put(Frame(number, b"h" * 1000))
    total = 1000
    state = {"put": 0, "taken": 0}

    def step() -> bool:
        while state["put"] < total and state["put"] - free_writer.reported < capacity:
            state["put"] += 1
            free_writer.put(Frame(state["put"], b"f"))
        while (frame := free.take()) is not None:
            state["taken"] += 1
            assert frame.number == state["taken"]
            free.processed(frame.number)
        return state["taken"] == total

    until(step, producer, consumer)
    assert held_writer.reported == 0
    assert [frame.number for frame in take(held, capacity, consumer, producer)] == [1, 2, 3, 4]


def test_a_held_channel_does_not_make_every_wait_return_at_once(carrier: Carrier) -> None:
    """Frames that are deliberately not taken must not turn the subtask's loop into a busy one."""
    pair = Pair(carrier, 4)
    for number in range(1, 5):
        pair.writer.put(Frame(number, b"h"))
    assert take(pair.reader, 1, *pair.both)[0].number == 1
    for _ in range(10):  # let what is under way arrive and be announced
        pair.producer.wait(0.01)
        pair.consumer.wait(0.02)
    started = monotonic()
    pair.consumer.wait(0.2)
    assert monotonic() - started >= 0.19


def test_a_reader_is_handed_at_most_capacity_unprocessed_frames(carrier: Carrier) -> None:
    """A producer that ignores its credit cannot overrun the consumer; each report lets exactly as many through."""
    capacity = 5
    pair = Pair(carrier, capacity)
    for number in range(1, 41):
        pair.writer.put(Frame(number, b"x" * 200))
    taken = [frame.number for frame in take(pair.reader, capacity, *pair.both)]
    for _ in range(10):
        pair.producer.wait(0.005)
        pair.consumer.wait(0.005)
        assert pair.reader.take() is None
    while len(taken) < 40:
        step = min(2, 40 - len(taken))
        pair.reader.processed(len(taken) - capacity + step)
        taken += [frame.number for frame in take(pair.reader, step, *pair.both)]
        pair.consumer.wait(0.005)
        assert pair.reader.take() is None
    assert taken == list(range(1, 41))


def test_wait_does_not_sleep_over_a_frame_that_a_report_has_set_free(carrier: Carrier) -> None:
    """Take until None at full capacity, report, wait: the wait returns for the next frame, not after its time-out."""
    pair = Pair(carrier, 1)
    for number in (1, 2, 3):
        pair.writer.put(Frame(number, b"x"))
    (frame,) = take(pair.reader, 1, *pair.both)
    for number in (2, 3):
        assert pair.reader.take() is None
        pair.reader.processed(frame.number)
        started = monotonic()
        pair.consumer.wait(5)  # without a look in between
        while (free := pair.reader.take()) is None:
            pair.consumer.wait(5)
        assert monotonic() - started < 4
        frame = free
        assert frame.number == number


def test_wake_ends_a_running_wait_and_the_next_one(carrier: Carrier) -> None:
    """wake from another thread ends a wait of ten seconds at once; a wake before the wait is not lost."""
    transport = carrier.transport()
    transport.wait(0)
    entered = threading.Event()

    def waker() -> None:
        entered.wait()
        transport.wake()

    thread = threading.Thread(target=waker)
    thread.start()
    started = monotonic()
    entered.set()
    transport.wait(10)
    thread.join()
    transport.wake()
    transport.wake()
    transport.wait(10)
    assert monotonic() - started < 5
    before = monotonic()
    transport.wait(0.1)
    assert monotonic() - before >= 0.09


def test_frames_of_one_mebibyte_pass_unharmed(carrier: Carrier) -> None:
    """The largest envelope the design allows, several in flight, between small ones."""
    pair = Pair(carrier, 4)
    chance = random.Random(7)
    frames = [Frame(n, chance.randbytes(1024 * 1024 if n % 3 else 10)) for n in range(1, 13)]
    got: list[Frame] = []
    queue: Iterator[Frame] = iter(frames)
    state = {"put": 0}

    def step() -> bool:
        while state["put"] < len(frames) and state["put"] - pair.writer.reported < pair.capacity:
            pair.writer.put(next(queue))
            state["put"] += 1
        while (frame := pair.reader.take()) is not None:
            got.append(frame)
            pair.reader.processed(frame.number)
        return len(got) == len(frames)

    until(step, *pair.both)
    assert got == frames


def test_an_old_generation_cannot_put_into_the_new_channel(carrier: Carrier) -> None:
    """Writer of generation 1 and reader of generation 2 of one edge do not meet; after the delete the old writer ends."""
    old = Pair(carrier, 8, carrier.channel(1, "edge"))
    consumer = carrier.transport()
    successor = carrier.channel(2, "edge")
    reader = consumer.create(successor, 8)
    old.writer.put(Frame(1, b"old"))
    consumer.delete([old.channel])
    numbers = iter(range(2, 100_000))
    raises(ChannelMissing, lambda: old.writer.put(Frame(next(numbers), b"old")), consumer, *old.both)
    assert reader.take() is None
    writer = old.producer.connect(successor, 8)
    writer.put(Frame(1, b"new"))
    assert take(reader, 1, consumer, old.producer) == [Frame(1, b"new")]
    assert reader.take() is None


def test_creating_a_channel_again_makes_it_empty_and_starts_from_one(carrier: Carrier, pair: Pair) -> None:
    """Neither frames nor the progress of its former life show up."""
    for number in (1, 2, 3):
        pair.writer.put(Frame(number, b"old"))
    take(pair.reader, 3, *pair.both)
    pair.reader.processed(2)
    until(lambda: pair.writer.reported == 2, *pair.both)
    pair.writer.close()
    pair.reader.close()
    reader = pair.consumer.create(pair.channel, 8)
    writer = pair.producer.connect(pair.channel, 8)
    writer.put(Frame(1, b"new"))
    assert take(reader, 1, *pair.both) == [Frame(1, b"new")]
    assert writer.reported == 0
    reader.processed(1)
    until(lambda: writer.reported == 1, *pair.both)


def test_progress_is_reported_although_no_more_frames_come(pair: Pair) -> None:
    """The last reports reach the producer too, one by one or together."""
    for number in range(1, 8):
        pair.writer.put(Frame(number, b"x"))
    take(pair.reader, 7, *pair.both)
    assert pair.writer.reported == 0
    pair.reader.processed(1)
    until(lambda: pair.writer.reported == 1, *pair.both)
    pair.reader.processed(6)
    pair.reader.processed(7)
    pair.reader.processed(3)
    until(lambda: pair.writer.reported == 7, *pair.both)


def test_a_report_ends_the_wait_of_a_producer_without_credit(pair: Pair) -> None:
    """A producer that sleeps in wait for credit is woken by the report, not by its time-out."""
    pair.writer.put(Frame(1, b"x"))
    take(pair.reader, 1, *pair.both)
    pair.reader.processed(1)
    pair.consumer.wait(0)
    started = monotonic()
    while pair.writer.reported < 1:
        pair.producer.wait(10)
        assert monotonic() - started < 8


def test_closing_the_writer_first_sends_what_is_queued(pair: Pair) -> None:
    """Frames put right before close arrive, and the end of the writer is no loss to the reader."""
    for number in range(1, 9):
        pair.writer.put(Frame(number, b"y" * 3000))
    pair.writer.close()
    pair.writer.close()
    assert [frame.number for frame in take(pair.reader, 8, pair.consumer)] == list(range(1, 9))
    pair.reader.processed(8)
    pair.consumer.wait(0.01)
    assert pair.reader.take() is None
    with pytest.raises(ChannelError):
        pair.writer.put(Frame(9, b""))


def test_closing_the_transport_first_sends_what_is_queued(pair: Pair) -> None:
    """Transport.close flushes every writer."""
    for number in range(1, 9):
        pair.writer.put(Frame(number, b"z" * 3000))
    pair.producer.close()
    assert [frame.number for frame in take(pair.reader, 8, pair.consumer)] == list(range(1, 9))


def test_no_thread_is_left_after_close(carrier: Carrier) -> None:
    """Everything a transport started has ended when close returns; closing twice is harmless."""
    before = set(threading.enumerate())
    pair = Pair(carrier, 8)
    pair.writer.put(Frame(1, b"a"))
    take(pair.reader, 1, *pair.both)
    pair.producer.close()
    pair.consumer.close()
    pair.consumer.close()
    assert set(threading.enumerate()) <= before


def test_T25_every_channel_of_a_broadcast_gets_the_frame_or_the_sender_is_told(carrier: Carrier) -> None:
    """T-25: a barrier to three channels of which one was deleted raises; never a silent "some got it"."""
    consumer, producer = carrier.transport(), carrier.transport()
    ids = [carrier.channel() for _ in range(3)]
    readers = [consumer.create(channel, 8) for channel in ids]
    writers = [producer.connect(channel, 8) for channel in ids]
    broadcast(writers, 1)
    for reader in readers:
        assert take(reader, 1, consumer, producer) == [Frame(1, b"barrier")]
    carrier.transport().delete([ids[1]])
    numbers = iter(range(2, 100_000))
    message = raises(ChannelMissing, lambda: broadcast(writers, next(numbers)), producer, consumer)
    assert ids[1].edge in message


def broadcast(writers: list[ChannelWriter], number: int) -> None:
    for writer in writers:
        writer.put(Frame(number, b"barrier"))


def test_a_closed_reader_hands_out_nothing(carrier: Carrier, pair: Pair) -> None:
    """After close the reader raises, whatever had arrived, or arrives on its way out."""
    for number in range(1, 4):
        pair.writer.put(Frame(number, b"a"))
    until(lambda: True, *pair.both)
    pair.reader.close()
    pair.reader.close()
    for _ in range(20):
        with pytest.raises(ChannelLost):
            pair.reader.take()
        for transport in pair.both:
            transport.wait(0.002)


def test_fan_in_of_many_channels_on_one_transport(carrier: Carrier) -> None:
    """Thirty channels of one consumer, interleaved, each whole and in order."""
    consumer, producer = carrier.transport(), carrier.transport()
    ids = [carrier.channel() for _ in range(30)]
    readers: list[ChannelReader] = [consumer.create(channel, 4) for channel in ids]
    writers: list[ChannelWriter] = [producer.connect(channel, 4) for channel in ids]
    total = 20
    put, taken = [0] * 30, [0] * 30

    def step() -> bool:
        for index, writer in enumerate(writers):
            while put[index] < total and put[index] - writer.reported < 4:
                put[index] += 1
                writer.put(Frame(put[index], b"%d" % index))
        for index, reader in enumerate(readers):
            while (frame := reader.take()) is not None:
                taken[index] += 1
                assert frame == Frame(taken[index], b"%d" % index)
                reader.processed(frame.number)
        return taken == [total] * 30

    until(step, producer, consumer)


def test_both_directions_between_two_transports(carrier: Carrier) -> None:
    """A transport reads and writes at the same time, as every middle subtask does."""
    left, right = carrier.transport(), carrier.transport()
    there, back = carrier.channel(), carrier.channel()
    right_in, left_in = right.create(there, 2), left.create(back, 2)
    left_out, right_out = left.connect(there, 2), right.connect(back, 2)
    for number in range(1, 51):
        left_out.put(Frame(number, b"ping"))
        echo(right_in, right_out, number, left, right)
        assert take(left_in, 1, left, right) == [Frame(number, b"ping")]
        left_in.processed(number)
    until(lambda: left_out.reported == 50 and right_out.reported == 50, left, right)


def echo(reader: ChannelReader, writer: ChannelWriter, number: int, *transports: Transport) -> None:
    (frame,) = take(reader, 1, *transports)
    reader.processed(number)
    writer.put(frame)
