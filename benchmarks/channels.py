"""Throughput and latency of one channel between two processes (two threads for ``memory``).

    python benchmarks/channels.py --transport unix --frames 20000 --size 65536

Prints one JSON object: frames/s, MiB/s, and the latency of one frame put into an idle channel (µs, median and 99th
percentile of round trips halved).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import uuid
from collections.abc import Callable
from time import perf_counter

from millstream_schema.channels import ChannelId, ChannelReader, ChannelWriter, Frame, Transport
from millstream_tasks.channels.memory import MemoryBroker, MemoryTransport
from millstream_tasks.channels.unix import UnixTransport

Make = Callable[[], Transport]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["memory", "unix", "redis", "rabbitmq"], required=True)
    parser.add_argument("--frames", type=int, default=20000)
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--pings", type=int, default=300)
    parser.add_argument("--redis-url", default=os.environ.get("MILLSTREAM_REDIS_URL", "redis://127.0.0.1:6379/0"))
    parser.add_argument("--rabbitmq-url", default=os.environ.get("MILLSTREAM_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//"))
    args = parser.parse_args()
    job = uuid.uuid4().hex
    there, back = ChannelId(job, 1, "there", 0, 0), ChannelId(job, 1, "back", 0, 0)
    with tempfile.TemporaryDirectory() as runtime_dir:
        make = factory(args, runtime_dir)
        if args.transport == "memory":
            peer: threading.Thread | multiprocessing.Process
            ready: threading.Event | object
            ready = threading.Event()
            peer = threading.Thread(target=consume, args=(make, there, back, args, ready))
        else:
            context = multiprocessing.get_context("fork")
            ready = context.Event()
            peer = context.Process(target=consume, args=(make, there, back, args, ready))  # type: ignore[assignment]
        peer.start()
        try:
            result = produce(make, there, back, args, ready)
        finally:
            peer.join(10)
    print(json.dumps(result))


def factory(args: argparse.Namespace, runtime_dir: str) -> Make:
    if args.transport == "memory":
        broker = MemoryBroker()
        return lambda: MemoryTransport(broker)
    if args.transport == "unix":
        return lambda: UnixTransport(runtime_dir)
    if args.transport == "redis":
        from millstream_tasks.channels.redis import RedisTransport

        return lambda: RedisTransport(args.redis_url, "bench")
    from millstream_tasks.channels.rabbitmq import RabbitTransport

    return lambda: RabbitTransport(args.rabbitmq_url, "bench")


def produce(make: Make, there: ChannelId, back: ChannelId, args: argparse.Namespace, ready: object) -> dict[str, object]:
    transport = make()
    answers = transport.create(back, args.capacity)
    assert ready.wait(30), "the consumer did not start"  # type: ignore[attr-defined]
    writer = transport.connect(there, args.capacity)
    data = os.urandom(args.size)
    trips = ping(transport, writer, answers, data, args.pings)
    seconds = flood(transport, writer, data, args.pings, args)
    transport.delete([there, back])
    transport.close()
    return {
        "transport": args.transport,
        "frames": args.frames,
        "size": args.size,
        "capacity": args.capacity,
        "frames_per_s": round(args.frames / seconds),
        "mib_per_s": round(args.frames * args.size / seconds / 2**20, 1),
        "latency_us_p50": round(statistics.median(trips)) if trips else None,
        "latency_us_p99": round(trips[int(len(trips) * 0.99)]) if trips else None,
    }


def ping(transport: Transport, writer: ChannelWriter, answers: ChannelReader, data: bytes, pings: int) -> list[float]:
    """One frame at a time into an idle channel; half round trips in µs, sorted."""
    trips = []
    for number in range(1, pings + 1):
        started = perf_counter()
        writer.put(Frame(number, data))
        while answers.take() is None:
            transport.wait(5)
        trips.append((perf_counter() - started) / 2 * 1e6)
        answers.processed(number)
    return sorted(trips)


def flood(transport: Transport, writer: ChannelWriter, data: bytes, number: int, args: argparse.Namespace) -> float:
    """As many frames as the window lets through; seconds until the last is reported as processed."""
    last = number + args.frames
    started = perf_counter()
    while number < last:
        room = args.capacity - (number - writer.reported)
        if room <= 0:
            transport.wait(5)
            continue
        for _ in range(min(room, last - number)):
            number += 1
            writer.put(Frame(number, data))
    while writer.reported < last:
        transport.wait(5)
    return perf_counter() - started


def consume(make: Make, there: ChannelId, back: ChannelId, args: argparse.Namespace, ready: object) -> None:
    transport = make()
    reader = transport.create(there, args.capacity)
    ready.set()  # type: ignore[attr-defined]
    writer = None
    done = 0
    while done < args.pings + args.frames:
        frame = reader.take()
        if frame is None:
            transport.wait(5)
            continue
        assert frame.number == done + 1, f"frame {frame.number} after {done}"
        done = frame.number
        reader.processed(done)
        if done <= args.pings:
            writer = writer or transport.connect(back, args.capacity)
            writer.put(Frame(done, b"pong"))
    transport.wait(0.2)
    transport.close()


if __name__ == "__main__":
    main()
