"""From a call to what its submission stores: names checked, arguments encoded with their exact types, one digest for "the same request".

Called by clients and by handlers that submit. What must never happen here: a request that is accepted and cannot be read again; a default that changes what a digest means.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import msgspec

from ..canonical import fingerprint
from ..errors import CodecError, TaskInvalid
from ..values import TypeRegistry, decode_column, encode_column
from .records import NewTask, Policy
from .states import Effects

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}\Z")
HANDLER = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}\Z")
LONGEST_KEY = 200
LARGEST_ARGUMENTS = 256 * 1024
DIGEST_RULE = 1
PRIORITIES = range(-1000, 1001)
LONGEST_DELAY_S = 10 * 365 * 86_400
NO_TYPES = TypeRegistry()


class HandlerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler's author declares: the defaults of its tasks. ``permit``: a key, with ``{argument}`` places filled in at submission."""

    name: str
    queue: str = "default"
    effects: Effects = Effects.EXTERNAL
    policy: Policy = Policy()
    permit: str = ""
    ordered: bool = False


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one submission as they were given; what is not given is not in the digest."""

    queue: str = ""
    priority: int = 0
    delay_s: float = 0.0
    due_at: dt.datetime | None = None
    start_by_s: float = 0.0
    deadline_s: float = 0.0
    business_key: str = ""
    permit: str = ""


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As text whose values come back with their exact types. Raises TaskInvalid for what cannot be stored or is too large."""
    try:
        text = encode_column([list(args), kwargs], NO_TYPES, format="json")[2:].decode()
    except CodecError as exc:
        raise TaskInvalid(f"the arguments cannot be stored: {exc}") from exc
    if len(text.encode()) > LARGEST_ARGUMENTS:
        raise TaskInvalid(
            f"the arguments take {len(text.encode())} bytes, {LARGEST_ARGUMENTS} are allowed: store the data elsewhere and pass its address"
        )
    return text


def decode_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """What :func:`encode_arguments` wrote."""
    args, kwargs = decode_column(b"\x01J" + text.encode(), NO_TYPES)
    return args, kwargs


def encode_result(value: Any) -> str:
    """A handler's result. Raises TaskInvalid."""
    try:
        text = encode_column([value], NO_TYPES, format="json")[2:].decode()
    except CodecError as exc:
        raise TaskInvalid(f"the result cannot be stored: {exc}: return plain values") from exc
    if len(text.encode()) > LARGEST_ARGUMENTS:
        raise TaskInvalid(f"the result takes {len(text.encode())} bytes, {LARGEST_ARGUMENTS} are allowed: return an address instead")
    return text


def decode_result(text: str) -> Any:
    """What :func:`encode_result` wrote; None for a task without one."""
    return decode_column(b"\x01J" + text.encode(), NO_TYPES)[0] if text else None


def digest(handler: str, arguments: str, options: Options) -> str:
    """What makes two requests the same: handler, arguments and options as given, by a numbered rule."""
    given = msgspec.to_builtins(options)
    return f"{DIGEST_RULE}:{fingerprint([handler, arguments, given])}"


def new_task(
    spec: HandlerSpec, namespace: str, task_id: str, key: str, arguments: str, options: Options, *, permit: str, actor: str, origin: str
) -> NewTask:
    """The complete request. ``permit``: the handler's, filled in; one in the options wins. Raises TaskInvalid, naming what is wrong with which option."""
    permit = options.permit or permit
    problems = _problems(spec, namespace, key, permit, options)
    if problems:
        raise TaskInvalid("; ".join(problems))
    due = 0 if options.due_at is None else int(options.due_at.timestamp() * 1e6)
    return NewTask(
        id=task_id, namespace=namespace, handler=spec.name, key=key or task_id, digest=digest(spec.name, arguments, options),
        queue=options.queue or spec.queue, args=arguments, effects=spec.effects, policy=spec.policy, priority=options.priority,
        delay_us=int(options.delay_s * 1e6), due_us=due, start_by_us=int(options.start_by_s * 1e6), deadline_us=int(options.deadline_s * 1e6),
        permit=permit, ordered=spec.ordered, business_key=options.business_key, origin=origin, actor=actor,
    )  # fmt: skip


def _problems(spec: HandlerSpec, namespace: str, key: str, permit: str, options: Options) -> list[str]:
    found = []
    if not NAME.match(namespace):
        found.append(f"namespace {namespace!r} must match {NAME.pattern}")
    if not HANDLER.match(spec.name):
        found.append(f"handler {spec.name!r} must match {HANDLER.pattern}")
    if not NAME.match(options.queue or spec.queue):
        found.append(f"queue {options.queue or spec.queue!r} must match {NAME.pattern}")
    for name, text in (("key", key), ("business_key", options.business_key), ("permit", permit)):
        if len(text) > LONGEST_KEY or "\x00" in text:
            found.append(f"{name} must have at most {LONGEST_KEY} characters and no NUL, not {text[:60]!r}")
    if options.priority not in PRIORITIES:
        found.append(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {options.priority}")
    for name, seconds in (("delay", options.delay_s), ("start_by", options.start_by_s), ("deadline", options.deadline_s)):
        if not 0 <= seconds <= LONGEST_DELAY_S:
            found.append(f"{name} must be between 0 and {LONGEST_DELAY_S} seconds, not {seconds}")
    if options.due_at is not None:
        if options.due_at.tzinfo is None:
            found.append("due_at has no time zone: give an aware datetime, e.g. datetime.now(UTC)")
        if options.delay_s:
            found.append("delay and due_at exclude each other: give one")
    return found
