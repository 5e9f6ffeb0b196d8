"""Which messages of a queue were taken, in which epoch, and what may be acknowledged: decisions only, no broker.

Called by the queue reader on its one thread. A message is known by its id; its delivery tags die with each connection and come anew::

    pending ── emitted ──► open ── save_state(n) ──► sealed in n ── finish_commit(≥ n, True) ──► durable ── retention ──► forgotten
       ▲                                                                                            │
       └── connection lost: delivered again                        delivered again: acknowledged, not emitted

What must never happen here: an acknowledgement of a message whose epoch is not durable, or an id emitted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream_schema.connectors import Json
from millstream_schema.errors import SourceError


class Ledger:
    """The ids of one queue. Times are UTC milliseconds; ``retention_ms`` counts from when an epoch became durable."""

    def __init__(self, retention_ms: int) -> None:
        self._retention_ms = retention_ms
        self._open: list[str] = []
        self._open_nameless: list[int] = []
        self._sealed: dict[int, list[str]] = {}
        self._sealed_nameless: dict[int, list[int]] = {}
        self._taken: set[str] = set()
        self._durable: dict[str, None] = {}
        self._durable_batches: list[tuple[int, list[str]]] = []
        self._tags: dict[str, list[int]] = {}  # by id, of this connection, not acknowledged
        self._unacked: dict[int, None] = {}  # in the order of delivery
        self._due: set[int] = set()

    @property
    def unacked(self) -> int:
        """Deliveries of this connection that count against the prefetch window."""
        return len(self._unacked)

    @property
    def wants_epoch(self) -> bool:
        """Whether something waits for an epoch before it can be acknowledged."""
        return bool(self._taken or self._open_nameless or self._sealed_nameless)

    def delivered(self, tag: int, message_id: str | None) -> bool:
        """Note a delivery. True when it is to be emitted (or, without an id, handed to the poison policy)."""
        self._unacked[tag] = None
        if message_id is None:
            return True
        if message_id in self._durable:
            self._due.add(tag)
            return False
        if message_id in self._tags:  # the same id twice on one connection: one record, two tags
            self._tags[message_id].append(tag)
            return False
        self._tags[message_id] = [tag]
        return message_id not in self._taken

    def emitted(self, message_id: str) -> None:
        """The record goes downstream (or was poison and is reported): it belongs to the next epoch that is saved."""
        self._open.append(message_id)
        self._taken.add(message_id)

    def discarded(self, tag: int) -> None:
        """A message without an id was handed to the poison policy: acknowledged with its epoch, reported again if redelivered before."""
        self._open_nameless.append(tag)

    def connection_lost(self) -> None:
        """Every tag is void."""
        self._tags.clear()
        self._unacked.clear()
        self._due.clear()
        self._open_nameless.clear()
        self._sealed_nameless.clear()

    def save(self, epoch: int, now_ms: int) -> Json:
        """Cut: what was emitted since the last cut belongs to ``epoch``. The state for its snapshot."""
        self._forget(now_ms)
        if self._open:
            self._sealed.setdefault(epoch, []).extend(self._open)
            self._open = []
        if self._open_nameless:
            self._sealed_nameless.setdefault(epoch, []).extend(self._open_nameless)
            self._open_nameless = []
        return {
            "taken": [[number, list(ids)] for number, ids in self._sealed.items()],
            "durable": [[at, list(ids)] for at, ids in self._durable_batches],
        }

    def durable(self, epoch: int, now_ms: int) -> None:
        """``epoch`` and all before it are durable: their messages may be acknowledged."""
        for number in sorted(n for n in self._sealed if n <= epoch):
            self._add_durable(self._sealed.pop(number), now_ms)
        for number in [n for n in self._sealed_nameless if n <= epoch]:
            self._due.update(self._sealed_nameless.pop(number))

    def restore(self, epoch: int, state: Json, now_ms: int) -> None:
        """Start from the state saved for the durable ``epoch``. Retention starts again: whether the broker took the acknowledgements
        before the crash is not known."""
        taken, durable = _batches(state, "taken"), _batches(state, "durable")
        above = [number for number, _ in taken if number > epoch]
        if above:
            raise SourceError(f"the queue state of epoch {epoch} holds messages of epoch {above[0]}; it is not the state of that epoch")
        for _, ids in [*durable, *taken]:
            self._add_durable(ids, now_ms)

    def take_due(self) -> list[tuple[int, bool]]:
        """Acknowledgements to send now, as (tag, multiple). Exactly the due tags are covered; a ``multiple`` only where all before are due."""
        if not self._due:
            return []
        last = 0
        covered = 0
        for tag in self._unacked:
            if tag not in self._due:
                break
            last, covered = tag, covered + 1
        acks = [(last, covered > 1)] if covered else []
        acks += [(tag, False) for tag in sorted(self._due) if tag > last]
        for tag in self._due:
            self._unacked.pop(tag, None)
        self._due = set()
        return acks

    def _add_durable(self, ids: list[str], now_ms: int) -> None:
        if not ids:
            return
        self._durable_batches.append((now_ms, ids))
        for message_id in ids:
            self._durable[message_id] = None
            self._taken.discard(message_id)
            self._due.update(self._tags.pop(message_id, ()))

    def _forget(self, now_ms: int) -> None:
        kept = [(at, ids) for at, ids in self._durable_batches if at + self._retention_ms > now_ms]
        if len(kept) == len(self._durable_batches):
            return
        for at, ids in self._durable_batches:
            if at + self._retention_ms <= now_ms:
                for message_id in ids:
                    self._durable.pop(message_id, None)
        self._durable_batches = kept


def _batches(state: Json, name: str) -> Sequence[tuple[int, list[str]]]:
    found = state.get(name) if isinstance(state, dict) else None
    if not isinstance(found, list):
        raise SourceError(f"this is not the state of a queue source: {str(state)[:200]}")
    batches: list[tuple[int, list[str]]] = []
    for item in found:
        if not (isinstance(item, list | tuple) and len(item) == 2 and type(item[0]) is int and isinstance(item[1], list)):
            raise SourceError(f"this is not the state of a queue source: {str(item)[:200]}")
        batches.append((item[0], [str(message_id) for message_id in item[1]]))
    return batches
