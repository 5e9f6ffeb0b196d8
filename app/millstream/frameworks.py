"""What the integrations of web frameworks share: an installation from the framework's settings, a client made at its first use.

Used by ``millstream.django``, ``millstream.flask`` and ``Millstream.bind``. What must never happen here: a connection opened while a framework starts, which may be about to fork.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream_schema.durable.records import Receipt
from millstream_schema.durable.requests import Options
from millstream_tasks.durable.handlers import Handler

from .handlers import Handlers
from .installation import VARIABLES, Installation
from .joining import TaskReceipt
from .results import TaskResult
from .tasks import Tasks

if TYPE_CHECKING:
    from .worker import Millstream

Sessions = Callable[[], Any]


def installation_of(given: Mapping[str, Any], database: str) -> Installation:
    """From settings named as :class:`Installation`'s fields. ``database``: if they name none. Raises ConfigurationError."""
    found = {name: given[name] for name in VARIABLES if given.get(name) not in (None, "")}
    return Installation.checked({"database": database, **found})


class FrameworkTasks:
    """The client of one application. ``.delay()`` and ``.apply_async()`` of its handlers submit by it.

    ``millstream``: the object that is installed in the project's Celery application; then submissions wake the workers, else these find them by polling.
    """

    def __init__(
        self,
        installation: Callable[[], Installation],
        handlers: Handlers,
        namespace: str,
        sessions: Sessions,
        millstream: Millstream | None = None,
    ) -> None:
        self._installation = installation
        self._handlers = handlers
        self._namespace = namespace
        self._sessions = sessions
        self._millstream = millstream
        self._lock = threading.Lock()
        self._made: dict[str, Tasks] = {}
        handlers.bind(self)

    @property
    def client(self) -> Tasks:
        """Made when it is first asked for, and again when the settings name another database (as under a framework's tests)."""
        installation = self._millstream.installation if self._millstream is not None else self._installation()
        with self._lock:
            found = self._made.get(installation.database)
            if found is None:
                if self._millstream is not None:
                    found = self._millstream.client(self._handlers, sessions=self._sessions)
                else:
                    found = Tasks(installation, self._handlers, self._namespace, sessions=self._sessions)
                self._made[installation.database] = found
            return found

    def submit_with(
        self,
        handler: str | Handler,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        options: Options | None = None,
    ) -> TaskReceipt:
        """What ``.delay()`` and ``.apply_async()`` call."""
        return self.client.submit_with(handler, args, kwargs, key=key, options=options)

    def result(self, task: str | Receipt) -> TaskResult:
        """What they give."""
        return self.client.result(task)

    def close(self) -> None:
        """Give the connections back."""
        with self._lock:
            for client in self._made.values():
                client.close()
            self._made.clear()
