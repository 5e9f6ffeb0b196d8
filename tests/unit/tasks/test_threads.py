"""Subtasks as threads: one that cannot even begin says why, at once."""

from __future__ import annotations

import threading

from tests.unit.tasks.test_pipe import DEPLOYMENT

from millstream_schema.connectors import SnapshotStorage
from millstream_schema.control import Failed, SubtaskMessage
from millstream_schema.errors import StorageUnavailable
from millstream_schema.pipeline import FactoryRegistry
from millstream_schema.ports import SystemClock
from millstream_tasks.shell.threads import ThreadLauncher


def test_a_storage_that_cannot_be_opened_fails_the_start_at_once_and_the_thread_ends() -> None:
    """Not after the start limit, and never as a subtask that only does not answer: the reason, then the end."""
    heard: list[SubtaskMessage | None] = []
    ended = threading.Event()

    def refuse(url: str) -> SnapshotStorage:
        raise StorageUnavailable(f"{url or 'the default'} is not mounted here")

    def deliver(message: SubtaskMessage | None) -> None:
        heard.append(message)
        if message is None:
            ended.set()

    launcher = ThreadLauncher(FactoryRegistry(), SystemClock(), refuse, lambda: None, encode=True)
    launcher.launch(DEPLOYMENT, deliver)
    assert ended.wait(10)
    assert heard == [Failed("start", "StorageUnavailable: the default is not mounted here"), None]
    launcher.close()
