"""What travels on the pipe between a worker's task process and the processes that run handlers."""

from __future__ import annotations

import msgspec

from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.outcomes import Reported
from millstream_schema.durable.progress import Told
from millstream_schema.durable.records import NewTask, TaskRow


class TaskBoot(msgspec.Struct, frozen=True):
    """First frame to a handler process. ``handlers``: ``module:attribute``; ``celery``: likewise the application whose modules are to be imported first, or empty.

    ``database``, ``prefix``, ``timeout_ms``: of the installation. The URL may hold a password: it travels on the pipe, never in arguments.
    """

    handlers: str
    celery: str
    beat_ms: int
    database: str
    prefix: str
    timeout_ms: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run this attempt when what was sent before is over. ``leave``: the number of its leave to begin, which may have been taken back meanwhile."""

    task: TaskRow
    leave: int


class EndAsked(msgspec.Struct, frozen=True, tag=True):
    """The end of an attempt is asked for: ``ctx.cancelled`` says so."""

    task: str
    fence: int


class Until(msgspec.Struct, frozen=True, tag=True):
    """The lease holds until this instant of CLOCK_BOOTTIME, which all processes of a machine share; past it a handler's process ends at once."""

    deadline: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Imported and waiting; ``problem``: why not."""

    problem: str = ""


class Began(msgspec.Struct, frozen=True, tag=True):
    """This attempt's code runs now."""

    task: str
    fence: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An attempt is over."""

    task: str
    fence: int
    outcome: Reported
    submits: tuple[NewTask, ...]
    seconds: float


class Settled(msgspec.Struct, frozen=True, tag=True):
    """An attempt's own transaction has committed with its end; its code may still go on for a while."""

    task: str
    fence: int
    seconds: float


class Said(msgspec.Struct, frozen=True, tag=True):
    """What an attempt has said since its last such frame."""

    task: str
    fence: int
    told: Told


class Known(msgspec.Struct, frozen=True, tag=True):
    """What a call to the outside came to, which its attempt is about to write down; None: it is written."""

    task: str
    fence: int
    intent: IntentId
    call: KnownCall | None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process lives: sent by a thread of its own, so that it tells of the interpreter and not of the handler."""


ToChild = Run | EndAsked | Until
FromChild = Ready | Began | Said | Known | Settled | Ended | Beat

encode = msgspec.msgpack.Encoder().encode
decode_boot = msgspec.msgpack.Decoder(TaskBoot).decode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
