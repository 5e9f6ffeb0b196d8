"""Durable tasks in a Flask application: ``MillstreamFlask(app, handlers)``; submissions join Flask-SQLAlchemy's session.

::

    db, millstream = SQLAlchemy(app), MillstreamFlask(app, handlers)

    @app.post("/orders")
    def order():
        db.session.add(Order(...))
        confirm.delay(7)
        db.session.commit()              # the order and its task, or neither

Imported by users' applications; needs the extra ``[flask]``. What must never happen here: submissions that vanish without a word because nobody committed the session.
"""

from __future__ import annotations

from typing import Any

import structlog
from flask import Flask, current_app, g, has_app_context

from millstream_schema.errors import ConfigurationError

from .frameworks import FrameworkTasks, installation_of
from .handlers import Handlers
from .installation import VARIABLES, Installation
from .tasks import Tasks
from .worker import Millstream

log = structlog.get_logger(__name__)
_EXTENSION, _JOINED = "millstream", "_millstream_joined"


class MillstreamFlask:
    """The extension. Register it after Flask-SQLAlchemy's.

    ``app.config``: ``MILLSTREAM_DATABASE`` (by default Flask-SQLAlchemy's own), ``MILLSTREAM_NAMESPACE``, ``MILLSTREAM_ENLIST`` (True: submissions join ``db.session``; False:
    they commit by themselves, unless a session is named), and the fields of ``Installation`` in capitals (``MILLSTREAM_PREFIX`` …).
    ``millstream``: the object that is installed in the project's Celery application; then submissions wake the workers.
    """

    def __init__(self, app: Flask | None = None, handlers: Handlers | None = None, *, millstream: Millstream | None = None) -> None:
        self._handlers = handlers or Handlers()
        self._millstream = millstream
        self._clients: FrameworkTasks | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Raises ConfigurationError for settings that do not exist."""
        known = {f"MILLSTREAM_{name.upper()}" for name in (*VARIABLES, "namespace", "enlist")}
        unknown = sorted(name for name in app.config if name.startswith("MILLSTREAM_") and name not in known)
        if unknown:
            raise ConfigurationError(f"unknown settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
        app.extensions[_EXTENSION] = self
        namespace = str(app.config.get("MILLSTREAM_NAMESPACE", "default"))
        self._clients = FrameworkTasks(lambda: _installation(app), self._handlers, namespace, _session, self._millstream)
        app.teardown_appcontext(_told_of_what_is_lost)

    @property
    def tasks(self) -> Tasks:
        """The application's client, made when it is first asked for. Raises ConfigurationError before :meth:`init_app`."""
        if self._clients is None:
            raise ConfigurationError("MillstreamFlask has no application yet: call init_app(app)")
        return self._clients.client

    def close(self) -> None:
        """Give the connections back."""
        if self._clients is not None:
            self._clients.close()


def _installation(app: Flask) -> Installation:
    given = {name: app.config.get(f"MILLSTREAM_{name.upper()}") for name in VARIABLES}
    database = ""
    if not given["database"]:
        found = app.extensions.get("sqlalchemy")
        if found is None:
            raise ConfigurationError("set MILLSTREAM_DATABASE, or register Flask-SQLAlchemy, whose database is then used")
        with app.app_context():
            database = found.engine.url.render_as_string(hide_password=False)
    return installation_of(given, database)


def _session() -> Any:
    """Flask-SQLAlchemy's, inside an application's context; None where there is none or the settings say so."""
    if not has_app_context() or not current_app.config.get("MILLSTREAM_ENLIST", True):
        return None
    extension = current_app.extensions.get("sqlalchemy")
    if extension is None:
        return None
    session = extension.session()
    session.connection()  # begins its transaction, if it has none
    setattr(g, _JOINED, session.get_transaction())
    return session


def _told_of_what_is_lost(error: BaseException | None) -> None:
    """When a request ends well and its session was never committed, the tasks submitted in it are lost with it: somebody should know."""
    joined = g.get(_JOINED)
    extension = current_app.extensions.get("sqlalchemy")
    if error is None and joined is not None and extension is not None and extension.session().get_transaction() is joined:
        log.warning("tasks were submitted in a session that nobody committed; they are lost with it: call db.session.commit()")
