"""From a call to what its submission stores: names checked, arguments encoded with their exact types, one digest for "the same request".

Called by clients and by handlers that submit. What must never happen here: a request that is accepted and cannot be read again; a default that changes what a digest means.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .. import given
from ..canonical import canonical_json, fingerprint
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
OPTION_NAMES = frozenset({
    "args", "kwargs", "options", "key", "business_key", "delay", "due_at", "start_by", "deadline", "priority", "queue", "permit", "session",
})  # fmt: skip
"""What ``submit`` and its like call their own options: a handler's parameter of such a name would be taken for one."""


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
    expires_at: dt.datetime | None = None


def require_options(options: object) -> None:
    """Raises TaskInvalid."""
    given.require("options", options, given.a(Options), TaskInvalid)


def plain_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name. Raises TaskInvalid."""
    if not isinstance(args, list | tuple):
        raise TaskInvalid(f"args must be a list of the arguments by position, not {given.shown(args)}")
    if not isinstance(kwargs, Mapping) or not all(map(given.is_text, kwargs)):
        raise TaskInvalid(f"kwargs must be a dict of arguments by their names, not {given.shown(kwargs)}")
    return tuple(args), dict(kwargs)


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """As text whose values come back with their exact types. Raises TaskInvalid for what cannot be stored or is too large."""
    try:
        text = encode_column([list(args), kwargs], NO_TYPES, format="json")[2:].decode()
    except CodecError as exc:
        raise TaskInvalid(f"the arguments cannot be stored: {_plainly(exc)}") from exc
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
        raise TaskInvalid(
            f"the result cannot be stored: {_plainly(exc)}: return plain values (None, text, numbers, dates, lists, dicts, …)"
        ) from exc
    if len(text.encode()) > LARGEST_ARGUMENTS:
        raise TaskInvalid(f"the result takes {len(text.encode())} bytes, {LARGEST_ARGUMENTS} are allowed: return an address instead")
    return text


def _plainly(error: CodecError) -> str:
    """Without the advice to register a type: that is for stream jobs."""
    return str(error).partition(": register the type")[0]


def decode_result(text: str) -> Any:
    """What :func:`encode_result` wrote; None for a task without one."""
    return decode_column(b"\x01J" + text.encode(), NO_TYPES)[0] if text else None


def digest(handler: str, arguments: str, options: Options) -> str:
    """What makes two requests the same: handler, arguments and options as given, by a numbered rule. Equal sets and dicts are one, and so are 5 and 5.0 seconds."""
    said = {}
    for name, value in msgspec.to_builtins(options).items():
        if not name.endswith("_s"):
            said[name] = value
        elif value:
            said[name] = float(value)
    types, items = msgspec.json.decode(arguments)
    return f"{DIGEST_RULE}:{fingerprint([handler, types, [_sorted(item) for item in items], said])}"


def _sorted(node: Any) -> Any:
    """An encoded value with what has no order of its own in one: a process may hold equal sets in different orders."""
    if not isinstance(node, list):
        return node
    tag, *parts = node[0], *(_sorted(part) for part in node[1:])
    if tag in ("s", "z"):
        parts.sort(key=canonical_json)
    elif tag == "k":
        parts = sorted(([k, v] for k, v in zip(parts[::2], parts[1::2], strict=True)), key=canonical_json)
    return [tag, *parts]


def new_task(
    spec: HandlerSpec, namespace: str, task_id: str, key: str, arguments: str, options: Options, *, permit: str, actor: str, origin: str
) -> NewTask:
    """The complete request. ``permit``: the handler's, filled in; one in the options wins. Raises TaskInvalid, naming what is wrong with which option."""
    permit = permit if options.permit == "" else options.permit
    problems = _problems(spec, namespace, key, permit, options)
    if problems:
        raise TaskInvalid("; ".join(problems))
    start_by_us = int(options.start_by_s * 1e6) or (0 if options.expires_at else spec.policy.start_by_ms * 1000)
    return NewTask(
        id=task_id, namespace=namespace, handler=spec.name, key=key or task_id, digest=digest(spec.name, arguments, options),
        queue=options.queue or spec.queue, args=arguments, effects=spec.effects, policy=spec.policy, priority=options.priority,
        delay_us=int(options.delay_s * 1e6),
        due_us=_instant(options.due_at), expires_us=_instant(options.expires_at), start_by_us=start_by_us,
        deadline_us=int(options.deadline_s * 1e6) or spec.policy.deadline_ms * 1000,
        permit=permit, ordered=spec.ordered, business_key=options.business_key, origin=origin, actor=actor,
    )  # fmt: skip


def _problems(spec: HandlerSpec, namespace: str, key: str, permit: str, options: Options) -> list[str]:
    found = []
    if not NAME.match(namespace):
        found.append(f"namespace {given.shown(namespace)} must match {NAME.pattern}")
    if not HANDLER.match(spec.name):
        found.append(f"handler {given.shown(spec.name)} must match {HANDLER.pattern}")
    if options.queue != "" and (said := given.named(NAME)(options.queue)):
        found.append(f"queue {said}")
    for name, text in (("key", key), ("business_key", options.business_key), ("permit", permit)):
        if said := given.text(text):
            found.append(f"{name} {said}")
    if type(options.priority) is not int or options.priority not in PRIORITIES:
        found.append(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {given.shown(options.priority)}")
    for name, seconds in (("delay", options.delay_s), ("start_by", options.start_by_s), ("deadline", options.deadline_s)):
        if not given.is_number(seconds) or not 0 <= seconds <= LONGEST_DELAY_S:
            found.append(f"{name} must be a number between 0 and {LONGEST_DELAY_S} seconds, not {given.shown(seconds)}")
    for name, instant in (("due_at", options.due_at), ("expires_at", options.expires_at)):
        if instant is not None and (said := given.instant(instant)):
            found.append(f"{name} {said}")
    if options.due_at is not None and options.delay_s:
        found.append("delay and due_at exclude each other: give one")
    if options.expires_at is not None and options.start_by_s:
        found.append("expires_at and start_by exclude each other: give one")
    return found


def _instant(moment: dt.datetime | None) -> int:
    """UTC µs; 0: none."""
    return 0 if moment is None else given.micros(moment)
