"""What workers tell of the handlers they serve, so that tasks can be submitted by name where the code is not: records and the choice between versions, pure.

Written when a worker session begins, read by clients. What must never happen here: a shape that says more than the annotations do; a choice that flaps between two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..canonical import fingerprint
from .records import Policy
from .requests import HandlerSpec
from .states import Effects


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a handler. ``kind``: as :mod:`inspect` names it; ``schema``: JSON Schema of what it takes, ``{}``: anything."""

    name: str
    kind: str
    required: bool
    schema: dict[str, Any]


class HandlerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A handler in one version. ``version``: hash of all that is declared; ``since_us``: when it was first told of, ``seen_us``: about when it was last served."""

    name: str
    version: str
    queue: str
    effects: Effects
    policy: str
    permit: str
    ordered: int
    parameters: str
    since_us: int = 0
    seen_us: int = 0

    def spec(self) -> HandlerSpec:
        """What its author declared."""
        policy = msgspec.json.decode(self.policy, type=Policy)
        return HandlerSpec(
            name=self.name, queue=self.queue, effects=self.effects, policy=policy, permit=self.permit, ordered=bool(self.ordered)
        )

    def shape(self) -> list[Parameter]:
        """Its parameters, in order."""
        return msgspec.json.decode(self.parameters, type=list[Parameter])


def entry(spec: HandlerSpec, parameters: Sequence[Parameter]) -> HandlerEntry:
    """What a worker tells of one of its handlers."""
    policy, shape = msgspec.json.encode(spec.policy).decode(), msgspec.json.encode(parameters).decode()
    declared = [spec.name, spec.queue, spec.effects.value, policy, spec.permit, spec.ordered, shape]
    return HandlerEntry(
        name=spec.name, version=fingerprint(declared), queue=spec.queue, effects=spec.effects, policy=policy, permit=spec.permit,
        ordered=int(spec.ordered), parameters=shape,
    )  # fmt: skip


class Served(msgspec.Struct, frozen=True):
    """What a worker session tells of itself: kept in its row. ``handlers``: name → version; ``counts``: as of its last renewal."""

    queues: tuple[str, ...] = ()
    handlers: Mapping[str, str] = {}
    counts: Mapping[str, int] = {}


def current(versions: Sequence[HandlerEntry], live: Iterable[Served]) -> HandlerEntry | None:
    """The version that counts: of those a live session serves the newest; of a handler nobody serves now the one seen last."""
    serving = {found for s in live for found in s.handlers.items()}
    held = [v for v in versions if (v.name, v.version) in serving]
    if held:
        return max(held, key=lambda v: (v.since_us, v.version))
    return max(versions, key=lambda v: (v.seen_us, v.since_us, v.version), default=None)
