"""When a process that somebody started has to end: at a signal, or when its standard input does. What must never happen here: a process that outlives who started it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def ended_with_stdin(stop: Callable[[], None]) -> None:
    """Call ``stop`` when whoever started this process is gone."""

    def watch() -> None:
        while True:
            select.select([sys.stdin], [], [])
            if not os.read(sys.stdin.fileno(), 4096):
                stop()
                return

    threading.Thread(target=watch, name="millstream-parent", daemon=True).start()


def ended_with_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
