"""The loop that drives a :class:`Node` on one thread.

Run by embedded mode and by node processes. What must never happen here: a step that fails and takes the loop, and with it the lease, along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from millstream_schema.hints import NodeHint

from ..node import Node

log = structlog.get_logger(__name__)
LONGEST = 1.0


class NodeLoop:
    """Steps a node until it is told to stop. A failing step is logged and tried again: the loop never dies silently."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._stop = False
        self.node: Node

    def wake(self) -> None:
        """Thread-safe."""
        self._event.set()

    def hint(self, hint: NodeHint) -> None:
        """Thread-safe."""
        self.node.hint(hint)
        self._event.set()

    def stop(self) -> None:
        """Thread-safe; the loop drains the node and returns."""
        self._stop = True
        self._event.set()

    def run(self, node: Node, alive: Callable[[], bool] = lambda: True) -> None:
        self.node = node
        while not self._stop and alive():
            self._event.clear()
            try:
                wait = node.step()
            except Exception:
                log.exception("node step failed; it is tried again")
                wait = LONGEST
            if wait > 0:
                self._event.wait(min(wait, LONGEST))
        node.drain()
